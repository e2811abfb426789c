"""What a program keeps outside of parameters and buffers: attributes of modules, the contents of lists, dicts, objects,
tensors and generators that these hold, and the generators of Python, numpy and torch. A forward may read and change it.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.tensors import default_generator
from workbench.tensors.global_tensor import local_torch
from workbench.tensors.reached_objects import (
    HOLDERS,
    PLAIN_VALUES,
    Variables,
    contents_of_cell,
    fill_cell,
    is_of_others,
    reached_from,
)
from workbench.tensors.tensor_state import version_of

_OF_NUMPY = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_GENERATORS = (random.Random, *_OF_NUMPY, torch.Generator)
_NO_OBJECTS = (nn.Module, torch.Tensor, type, FunctionType, MethodType, ModuleType, *HOLDERS, *_GENERATORS)
_MOST_REACHED = 20_000
"""Values that are looked at, of those that the code of a program reaches."""


@lru_cache(maxsize=1024)
def _is_of_the_program(kind: type) -> bool:
    return not issubclass(kind, _NO_OBJECTS) and not is_of_others(kind)


def is_object(value: Any) -> bool:
    """Whether it is an object of the program, such as a configuration, and may have attributes of its own."""
    return _is_of_the_program(type(value)) and hasattr(value, "__dict__")  # type: ignore[arg-type]


def entries_of(value: Any) -> dict[str, Any]:
    """The attributes of an object of the program; none of anything else."""
    return value.__dict__ if is_object(value) else {}


def random_states(device: torch.device | None) -> list[Any]:
    """The states of the generators of torch, Python and numpy."""
    return [*default_generator.states(device), random.getstate(), np.random.get_state()]  # noqa: NPY002


def numbers_drawn(parts: Iterable[Any]) -> list[Any]:
    """What changes when numbers are drawn of Python or numpy: by the process, or of generators that the parts have."""
    own = [v for part in parts for v in generators_of(part) if not isinstance(v, torch.Generator)]
    return [random.getstate(), pickle.dumps(np.random.get_state()), *map(_contents, own)]  # noqa: NPY002


def generators_of(value: Any) -> list[Any]:
    """The generators of Python, numpy and torch among the attributes of an object."""
    return [each for each in getattr(value, "__dict__", {}).values() if isinstance(each, _GENERATORS)]


def _comparable(states: list[Any]) -> list[Any]:
    *of_torch, of_python, of_numpy = states
    return [*(state.numpy().tobytes() for state in of_torch), of_python, pickle.dumps(of_numpy)]


def _entries(contents: Any) -> Sequence[Any]:
    return (*contents, *contents.values()) if isinstance(contents, dict) else contents


def set_random_states(states: list[Any], device: torch.device | None) -> None:
    """Go on from what ``random_states`` has returned for the same kind of device."""
    *of_torch, of_python, of_numpy = states
    default_generator.set_states(of_torch, device)
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002


@contextmanager
def undrawn(device: torch.device | None = None) -> Iterator[None]:
    """A context after which the generators of torch, Python and numpy go on as if nothing had been drawn in it."""
    before = random_states(device)
    try:
        yield
    finally:
        set_random_states(before, device)


@contextmanager
def all_seeded(seed: int) -> Iterator[None]:
    """A context that begins with this seed for torch, Python and numpy."""
    with default_generator.seeded(seed):
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        yield


def _state_of_numpy(generator: Any) -> Any:
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return getattr(generator, "bit_generator", generator).state


def _set_state_of_numpy(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def _contents(value: Any) -> Any:
    """A copy of what a list, a dict, an object, a plain tensor or a generator holds; None for anything else."""
    if type(value) in PLAIN_VALUES or isinstance(value, random.SystemRandom):
        return None
    if type(value) is torch.Tensor and not value.requires_grad:
        return version_of(value), value.clone()
    if isinstance(value, HOLDERS):
        if isinstance(value, dict):  # a subclass may make something anew in its ``[]``
            return {key: dict.__getitem__(value, key) for key in value}
        return list(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, _OF_NUMPY):
        return pickle.dumps(_state_of_numpy(value))
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else (value.tobytes(),)
    if isinstance(value, CellType):
        return contents_of_cell(value)
    if isinstance(value, Variables):
        return value.read()
    return dict(value.__dict__) if is_object(value) else None


def _put_back(value: Any, contents: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(contents)
    elif isinstance(value, _OF_NUMPY):
        _set_state_of_numpy(value, pickle.loads(contents))
    elif isinstance(value, torch.Generator):
        value.set_state(torch.frombuffer(bytearray(contents), dtype=torch.uint8))
    elif isinstance(value, torch.Tensor):
        if version_of(value) != contents[0]:  # a write would stop the backward of what has saved this tensor
            value.copy_(contents[1])
    elif isinstance(value, np.ndarray):
        value[...] = np.frombuffer(contents[0], value.dtype).reshape(value.shape)
    elif isinstance(value, CellType):
        fill_cell(value, contents)
    elif isinstance(value, Variables):
        value.write(contents)
    elif isinstance(contents, dict):
        entries = value if isinstance(value, dict) else value.__dict__
        for name in entries.keys() - contents.keys():
            del entries[name]
        entries.update(contents)
    else:
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(contents)


def _same(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether these are the same objects, or equal values, also in tuples of them."""
    return len(before) == len(after) and (all(map(is_, before, after)) or all(map(_is_same, before, after)))


def _is_same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if type(before) is not type(after):
        return False
    if isinstance(before, tuple):
        return _same(before, after)
    return isinstance(before, (int, float, str, bytes)) and bool(before == after)


def tables_of(module: nn.Module) -> list[dict[str, Any]]:
    """The dicts in which a module and those in it hold parameters and modules. A forward may add some to them."""
    return [table for part in module.modules() for table in (part._parameters, part._modules)]


class ProgramState:
    """The state at one moment, to compare with or to go on from: of what these objects have, at any depth.

    Args:
        objects: modules, with the modules in them, and other objects.
        tensors: further tensors.
        code: functions and modules of which also that belongs to it which their code names: the object of a method,
            variables around a lambda and of its module, the arguments of a partial.
        copies_tensors: False where ``UndoneWrites`` keep what is written.

    Attributes:
        is_whole: False where the code reaches what nobody can put back, such as an iterator, or too much.
    """

    def __init__(
        self,
        objects: Iterable[Any],
        device: torch.device,
        tensors: Iterable[torch.Tensor] = (),
        code: Iterable[Any] = (),
        *,
        copies_tensors: bool = True,
    ) -> None:
        self._device, self._random = device, random_states(device)
        self._held: dict[int, tuple[Any, Any]] = {}
        self._copies_tensors = copies_tensors
        with local_torch():
            self.is_whole = self._hold_all(code, with_code=True)
            self._hold_all([*objects, *tensors], with_code=False)

    def _hold_all(self, values: Iterable[Any], with_code: bool) -> bool:
        is_whole, seen, waiting = True, dict[int, Any](), deque(values)
        while waiting:
            value = waiting.popleft()
            if type(value) in PLAIN_VALUES or id(value) in seen:
                continue
            seen[id(value)] = value
            if with_code and len(seen) + len(waiting) > _MOST_REACHED:
                return False
            self._hold(value)
            reached = reached_from(value, with_code)
            is_whole = is_whole and reached is not None
            waiting += reached or ()
        return is_whole

    def _hold(self, value: Any) -> None:
        if isinstance(value, torch.Tensor) and not self._copies_tensors:
            return
        if isinstance(value, nn.Module):
            value = value.__dict__
        if (contents := _contents(value)) is not None:
            self._held[id(value)] = value, contents

    def is_unchanged(self) -> bool:
        """Whether the program has this state now."""
        draws = not _same(_comparable(self._random), _comparable(random_states(self._device)))
        return not draws and self.has_same_objects()

    def has_same_objects(self) -> bool:
        """Whether the program has this state now, but for the generators of torch, Python and numpy."""
        with local_torch():
            return all(_is_as_before(value, contents) for value, contents in self._held.values())

    def put_back(self) -> None:
        """Go on from this state."""
        set_random_states(self._random, self._device)
        self.put_back_objects()

    def put_back_objects(self) -> None:
        """Go on from this state, but for the generators of torch, Python and numpy."""
        with local_torch(), torch.no_grad():
            for value, contents in self._held.values():
                if not _is_as_before(value, contents):
                    _put_back(value, contents)


def _is_as_before(value: Any, contents: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(version_of(value) == contents[0])
    now = value if type(value) is dict else _contents(value) or ()
    return _same(_entries(contents), _entries(now))


class UndoneWrites(TorchDispatchMode):
    """A context at whose end all tensors have the values that they had before it."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[number] if number < len(args) else kwargs.get(argument.name)
                for tensor in tree_leaves(written):
                    if isinstance(tensor, torch.Tensor) and id(tensor) not in self._before:
                        self._before[id(tensor)] = tensor, tensor.clone()
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with local_torch(), torch.no_grad():
            for tensor, before in reversed(self._before.values()):
                tensor.copy_(before)
