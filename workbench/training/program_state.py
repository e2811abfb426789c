"""What a program keeps outside of parameters and buffers: attributes of modules, the contents of lists, dicts, objects,
tensors and generators that these hold, and the generators of Python, numpy and torch. A forward may read and change it.
"""

from __future__ import annotations

import pickle
import random
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from workbench.tensors import default_generator
from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.tensor_state import version_of

OF_TORCH = frozenset(nn.Module().__dict__)
"""Attributes that every module has."""
_HOLDERS = (list, dict, set, deque)
_GENERATORS = (random.Random, np.random.Generator, torch.Generator)
_NO_OBJECTS = (nn.Module, torch.Tensor, type, FunctionType, MethodType, ModuleType, *_HOLDERS, *_GENERATORS)
_PLAIN_VALUES = frozenset({bool, int, float, str, type(None)})
_OTHERS_CODE = ("builtins", "torch", "numpy", "workbench")


@lru_cache(maxsize=1024)
def _is_of_the_program(kind: type) -> bool:
    return not issubclass(kind, _NO_OBJECTS) and kind.__module__.partition(".")[0] not in _OTHERS_CODE


def is_object(value: Any) -> bool:
    """Whether it is an object of the program, such as a configuration, and may have attributes of its own."""
    return _is_of_the_program(type(value)) and hasattr(value, "__dict__")  # type: ignore[arg-type]


def entries_of(value: Any) -> dict[str, Any]:
    """The attributes of an object of the program; none of anything else."""
    return value.__dict__ if is_object(value) else {}


def parts_of(program: Any) -> list[Any]:
    """The modules or the object with the attributes that a call of a module, or of a loss function, may change."""
    return list(program.modules()) if isinstance(program, nn.Module) else [program] if entries_of(program) else []


def random_states(device: torch.device) -> list[Any]:
    """The states of the generators of torch, Python and numpy."""
    return [*default_generator.states(device), random.getstate(), np.random.get_state()]  # noqa: NPY002


def numbers_drawn(parts: Iterable[Any]) -> list[Any]:
    """What changes when numbers are drawn of Python or numpy: by the process, or of generators that the parts have."""
    own = [v for part in parts for v in part.__dict__.values() if isinstance(v, (random.Random, np.random.Generator))]
    return [random.getstate(), pickle.dumps(np.random.get_state()), *map(_contents, own)]  # noqa: NPY002


def _comparable(states: list[Any]) -> list[Any]:
    *of_torch, of_python, of_numpy = states
    return [*(state.numpy().tobytes() for state in of_torch), of_python, pickle.dumps(of_numpy)]


def _entries(contents: Any) -> Sequence[Any]:
    return (*contents, *contents.values()) if isinstance(contents, dict) else contents


def set_random_states(states: list[Any], device: torch.device) -> None:
    """Go on from what ``random_states`` has returned for the same kind of device."""
    *of_torch, of_python, of_numpy = states
    default_generator.set_states(of_torch, device)
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002


def _contents(value: Any) -> Any:
    """A copy of what a list, a dict, an object, a plain tensor or a generator holds; None for anything else."""
    if type(value) in _PLAIN_VALUES:
        return None
    if type(value) is torch.Tensor and not value.requires_grad:
        return version_of(value), value.clone()
    if isinstance(value, _HOLDERS):
        return dict(value) if isinstance(value, dict) else list(value)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    return dict(entries_of(value)) or None


def _put_back(value: Any, contents: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(contents)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = pickle.loads(contents)
    elif isinstance(value, torch.Generator):
        value.set_state(torch.frombuffer(bytearray(contents), dtype=torch.uint8))
    elif isinstance(value, torch.Tensor):
        if version_of(value) != contents[0]:  # a write would stop the backward of what has saved this tensor
            value.copy_(contents[1])
    elif isinstance(contents, dict):
        entries = value if isinstance(value, dict) else value.__dict__
        for name in entries.keys() - contents.keys():
            del entries[name]
        entries.update(contents)
    else:
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(contents)


def flat_state(parts: Iterable[Any], device: torch.device) -> list[Any]:
    """The state as a list, for ``same``: a forward that leaves it as it was has changed nothing."""
    found = _comparable(random_states(device))
    with local_torch():
        for part in parts:
            for name, value in part.__dict__.items():
                if name == "forward":  # which a forward cache replaces
                    continue
                found += (name, value)
                if isinstance(value, torch.Tensor):
                    found.append(version_of(value))
                elif (contents := _contents(value)) is not None:
                    found += _entries(contents)
    return found


def same(before: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether two states of ``flat_state`` are equal: the same objects, and equal values."""
    if len(before) != len(after):
        return False
    values = (int, float, str, bytes, tuple)
    return all(map(is_, before, after)) or all(
        a is b or (type(a) is type(b) and isinstance(a, values) and a == b) for a, b in zip(before, after, strict=True)
    )


class ProgramState:
    """The state at one moment, to compare with or to go on from: of these modules and objects, and further tensors."""

    def __init__(self, parts: Iterable[Any], device: torch.device, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._device, self._random = device, random_states(device)
        self._held: dict[int, tuple[Any, Any]] = {}
        with local_torch():
            for part in parts:
                self._held[id(part.__dict__)] = part.__dict__, dict(part.__dict__)
                for name in part.__dict__.keys() - OF_TORCH:
                    self._hold(part.__dict__[name])
            for tensor in tensors:
                self._hold(tensor)

    def _hold(self, value: Any) -> None:
        if (contents := _contents(value)) is not None:
            self._held[id(value)] = value, contents

    def is_unchanged(self) -> bool:
        """Whether the program has this state now."""
        with local_torch():
            return same(_comparable(self._random), _comparable(random_states(self._device))) and all(
                version_of(value) == contents[0]
                if isinstance(value, torch.Tensor)
                else same(_entries(contents), _entries(value if type(value) is dict else _contents(value) or ()))
                for value, contents in self._held.values()
            )

    def put_back(self) -> None:
        """Go on from this state."""
        set_random_states(self._random, self._device)
        with local_torch(), torch.no_grad():
            for value, contents in self._held.values():
                _put_back(value, contents)


class StageStates:
    """The states of several stages of one rank. Each stage runs all micro-batches, and goes on from what it has left.

    A program that has changed nothing before the rank's first change of stages keeps one state for all of them.

    Args:
        parts, device, tensors: as for ``ProgramState``.
    """

    def __init__(self, parts: Sequence[Any], device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self._of = parts, device, tensors
        self._stage: int | None = None
        self._left: dict[int, ProgramState] = {}
        self._changes: bool | None = None

    def go_on_as(self, stage: int) -> None:
        """Let the program go on from the state of this stage."""
        if self._stage is None:
            self._stage, self._first = stage, ProgramState(*self._of)
        if stage == self._stage or self._changes is False:
            return
        if self._changes is None:
            self._changes = not self._first.is_unchanged()
        if self._changes:
            self._left[self._stage] = ProgramState(*self._of)
            self._left.get(stage, self._first).put_back()
            self._stage = stage


class MadeTensors(TorchFunctionMode):
    """Sees the tensors that a call makes, to tell whether it leaves some where its result does not have them."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch._C._is_torch_function_enabled():
            for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._made[id(leaf)] = weakref.ref(leaf)
        return result

    @contextmanager
    def without(self, tensor: torch.Tensor) -> Iterator[None]:
        """Context without a weak reference to a tensor, as torch swaps none that has one."""
        was_made = self._made.pop(id(tensor), None) is not None
        yield
        if was_made:
            self._made[id(tensor)] = weakref.ref(tensor)

    def are_left(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
        """Whether the program still has one of them that is no result, nor what a result is a view of."""
        owners = [(t._memory_owner, t._history_base) for t in results if isinstance(t, GlobalTensor)]
        known = [*results, *(owner for pair in owners for owner in pair if owner is not None)]
        for tensor in known:
            self._made.pop(id(tensor), None)
        held = _held_by_history(known, inputs)
        return any(_is_held(reference, held[key]) for key, reference in self._made.items())


def _is_held(reference: weakref.ref[torch.Tensor], num_known: int) -> bool:
    """Whether Python code has a tensor, beside ``num_known`` places. What only autograd has saved is there, too."""
    tensor = reference()
    if tensor is None:
        return False
    # The variable here and the argument count as two. Owners in C++, if there are others, have one together.
    return sys.getrefcount(tensor) - 2 - num_known > (tensor._use_count() > 1)  # type: ignore[attr-defined]


def _held_by_history(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Counter[int]:
    """How often nodes between inputs and results have each tensor, by its id: placeholders' nodes have operands."""
    found: Counter[int] = Counter()
    with local_torch():
        seen: set[Any] = {None, *(tensor.grad_fn for tensor in inputs)}
        waiting: list[Any] = [tensor.grad_fn for tensor in results]
    values: list[Any] = []
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            values += getattr(node, "__dict__", {}).values()
    known: set[int] = set()
    while values:
        value = values.pop()
        if isinstance(value, torch.Tensor):
            found[id(value)] += 1
        elif id(value) not in known:
            known.add(id(value))
            if isinstance(value, (list, tuple)):
                values += value
            elif isinstance(value, dict):
                values += value.values()
            elif isinstance(value, FunctionType):
                values += value.__closure__ or ()
            elif isinstance(value, CellType):
                values.append(value.cell_contents)
    return found
