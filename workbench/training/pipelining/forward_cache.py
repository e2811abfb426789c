"""Forward caches of blocks: within a scheduled step, the first call of a block is recorded and later ones replay it.

A forward cache replaces the block's ``forward`` while an action runs. The first call with some inputs runs unchanged
under an observer. If the record covers all its effects besides its result, later calls with the same key replay the
record; ``placeholder_forward`` and ``local_forward`` say how. A block with other effects runs unchanged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, islice
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves

from workbench.core.layout import Layout
from workbench.tensors.boxing.box import box_implicitly, kept_boxings
from workbench.tensors.dispatch.placeholder_calls import autocast_state
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch
from workbench.tensors.leaf_gradients import has_hooks
from workbench.tensors.program_state import ProgramState, entries_of
from workbench.tensors.random import draw_key
from workbench.tensors.reached_objects import HOLDERS, OF_ALL_MODULES, OF_TORCH
from workbench.tensors.tensor_state import version_of
from workbench.tensors.world import World
from workbench.training.pipelining.made_tensors import MadeTensors

VALUES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum, np.number, np.bool_)
"""Arguments and attributes that can be compared and never change."""
TENSORS_AND_VALUES = (torch.Tensor, *VALUES)
_SETTINGS = (*VALUES, FunctionType, BuiltinFunctionType)
_MAX_RECORDS = 64
_MAX_KEYS = 256
_UNKNOWN = object()
_NO_SETTINGS = OF_TORCH - {"training"}
_HOLDERS_WITHIN, _MOST_ENTRIES = 2, 64
"""How deep settings are looked for in objects, lists and dicts that hold others, and in how many entries of each."""


@dataclass(frozen=True, slots=True)
class InputBoxing:
    """A boxing ``offset`` exchanges after a call's start, of an input or of the result of an earlier one.

    ``index`` counts the inputs first, then the results of boxings, in order.
    """

    index: int
    layout: Layout
    function: str
    offset: int


@dataclass
class CallObserver:
    """Observes the call that is recorded: boxings of its inputs, and whether a replay may skip all other boxings.

    Attributes:
        inputs: the call's global tensors.
        start: exchanges of the micro-batch before the call.
        may_skip: (tensor, target, function) of a boxing of something else -> whether a replay may skip it.
        boxings: of inputs.
        tags: the numbers of ``boxings`` in order of time, by tag.
        can_skip: whether ``may_skip`` was true of all others.
        recomputes: whether a part of the block runs again in backward.
        made: the tensors that the call makes.
    """

    inputs: list[GlobalTensor]
    start: int
    may_skip: Callable[[GlobalTensor, Spec, str], bool]
    boxings: list[InputBoxing] = field(default_factory=list)
    tags: dict[int, int] = field(default_factory=dict)
    can_skip: bool = True
    recomputes: bool = False
    made: MadeTensors = field(default_factory=MadeTensors)
    _sources: list[GlobalTensor] = field(default_factory=list)

    def add(self, tensor: GlobalTensor, target: Spec, function: str, tag: int, edge: int) -> None:
        """Record a boxing."""
        index = self._number_of(tensor)
        if index is None:
            self.can_skip = self.can_skip and self.may_skip(tensor, target, function)
            return
        self.tags[tag] = len(self.boxings)
        self.boxings.append(InputBoxing(index, target.layout, function, edge - self.start))
        self._sources.append(tensor)

    def add_reuse(self, tensor: GlobalTensor, boxed: GlobalTensor, function: str, edge: int) -> None:
        """Record that the call uses a boxing of an input that was made before it, and through which gradients go."""
        with local_torch():
            made_by = getattr(boxed.grad_fn, "boxing", None)
        if made_by is not None and made_by[2] not in self.tags and self._number_of(tensor) is not None:
            self.add(tensor, boxed._spec, function, made_by[2], edge)

    def _number_of(self, tensor: GlobalTensor) -> int | None:
        """Which input it is, or which result of a boxing that its source keeps for later calls; None if neither."""
        known: Iterator[Any] = chain(self.inputs, map(_kept_result, self._sources, self.boxings))
        return next((number for number, other in enumerate(known) if other is tensor), None)


def _kept_result(source: GlobalTensor, boxing: InputBoxing) -> GlobalTensor | None:
    return next((boxed for boxed in kept_boxings(source) if boxed._spec.layout == boxing.layout), None)


def _kept_layouts(tensor: GlobalTensor) -> tuple[Any, ...]:
    """The layouts in which a tensor is there already, each with those in which the result is."""
    return tuple([(boxed._spec.layout, _kept_layouts(boxed)) for boxed in kept_boxings(tensor)])


@dataclass
class CallRecord:
    """Effects of a call besides its result: boxings of inputs, exchanges counted, random keys drawn."""

    boxings: list[InputBoxing]
    num_tags: int
    num_keys: int


class ForwardCache(ABC):
    """A block's forward within scheduled steps. ``records`` has the record of every key; None for keys whose calls run
    unchanged.

    ``hooks`` are the ids of hooks that ``parallelize`` has put on layers; a block with others inside runs unchanged.
    A subclass says which boxings a replay may skip (``may_skip``), makes a record of a call (``record``; None where a
    replay would differ), and replays it (``replay``).
    """

    takes_plain = False
    """Whether calls with plain tensors may be replayed: their values may decide what the call does."""

    def __init__(self, module: nn.Module, world: World, hooks: Set[int] = frozenset()) -> None:
        self.module, self.world, self._hooks = module, world, hooks
        self._parts = list(module.modules())
        self.records: dict[Any, Any] = {}
        self._settings: int | None = None
        self._known_settings: dict[Any, int] = {}

    @abstractmethod
    def may_skip(self, tensor: GlobalTensor, target: Spec, function: str) -> bool:
        """Whether a replay may skip a boxing inside the block of a tensor that is not its input."""

    @abstractmethod
    def record(self, result: Any, call: CallRecord, observer: CallObserver) -> Any:
        """What ``replay`` needs of this call, or None."""

    @abstractmethod
    def replay(self, record: Any, inputs: list[GlobalTensor], args: Any, kwargs: Any) -> Any:
        """Replay a call from its record."""

    def begin_step(self) -> None:
        """Let the next call read the block's settings again."""
        self._settings = None

    def install(self) -> None:
        """Replace the module's forward by this cache."""
        attributes = self.module.__dict__
        self._before = attributes.get("forward")
        self.forward: Callable[..., Any] = self.module.forward
        attributes["forward"] = self

    def remove(self) -> None:
        """Give the module its own forward back."""
        if self._before is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        context = self.world.context
        # A tracer, recorder or agreement check must see every boxing.
        is_observed = context.tracer is not None or context.recorder is not None or context.checks_agreement
        if is_observed or context.running.observer is not None:
            return self.forward(*args, **kwargs)
        leaves, structure = _flattened(args, kwargs)
        key = self._key(leaves, structure)
        record = None if key is None else self.records.get(key, _UNKNOWN)
        if record is None:
            return self.forward(*args, **kwargs)
        inputs = [leaf for leaf in leaves if isinstance(leaf, GlobalTensor)]
        if record is not _UNKNOWN:
            return self.replay(record, inputs, args, kwargs)
        result, record = self._record_call(inputs, args, kwargs)
        if len(self.records) >= _MAX_RECORDS:
            self.records.clear()
        self.records[key] = record
        return result

    def stop_replaying(self, record: Any) -> None:
        """From now on, calls with this record's key run unchanged."""
        self.records = {key: None if known is record else known for key, known in self.records.items()}

    def box_inputs(self, call: CallRecord, inputs: list[GlobalTensor]) -> list[Any]:
        """Box inputs as the block does, and count its exchanges; the results, in the order of ``call.boxings``."""
        context, known = self.world.context, list(inputs)
        start = context.position
        for boxing in call.boxings:
            context.position = start + boxing.offset
            known.append(box_implicitly(known[boxing.index], boxing.layout, boxing.function))
        context.position = start + call.num_tags
        return known[len(inputs) :]

    def _key(self, leaves: Sequence[Any], structure: Any) -> Any:
        """The key of a call: everything that its result depends on. None where a value cannot be compared."""
        parts: list[Any] = [structure, torch.is_grad_enabled(), autocast_state(), *self.world.context.call[1:]]
        with local_torch():
            if self._settings is None:
                if len(self._known_settings) >= _MAX_RECORDS:
                    self._known_settings.clear()
                    self.records.clear()
                known = self._known_settings
                self._settings = known.setdefault(self._settings_now(), len(known))
            parts.append(self._settings)
            numbers: dict[int, int] = {}
            for leaf in leaves:
                if isinstance(leaf, GlobalTensor):
                    parts.append(numbers.setdefault(id(leaf), len(numbers)))  # one tensor twice is boxed once
                    parts += (leaf._spec, leaf.dtype, leaf.requires_grad, leaf._is_param, _kept_layouts(leaf))
                elif isinstance(leaf, VALUES):
                    parts += (type(leaf), leaf)
                elif self.takes_plain and type(leaf) is torch.Tensor and not leaf.requires_grad:
                    parts += (leaf.shape, leaf.dtype)
                else:  # a plain tensor, or an object that a call may change, such as a cache
                    return None
        return tuple(parts)

    def _settings_now(self) -> Any:
        """Settings that code may change between steps: modes, numbers, also of objects, lists and dicts that the parts
        hold, hooks, parts, which parameters take gradients.
        """
        self._parts = list(self.module.modules())
        found: list[Any] = self._hooks_of_user()
        holders: dict[int, Any] = {}
        for part in self._parts:
            for name, value in part.__dict__.items():
                if name in _NO_SETTINGS:
                    continue
                if isinstance(value, _SETTINGS):
                    found += (name, type(value), value)
                else:
                    holders[id(value)] = value
            found += map(id, part._modules.values())
            for parameter in part._parameters.values():
                if parameter is not None:
                    found += (id(parameter), parameter.requires_grad, has_hooks(parameter))
        for _ in range(_HOLDERS_WITHIN):
            inner: dict[int, Any] = {}
            for holder in holders.values():
                for name, value in _first_entries(holder):
                    if isinstance(value, _SETTINGS):
                        found += (name, type(value), value)
                    else:
                        inner[id(value)] = value
            holders = inner
        return tuple(found)

    def _hooks_of_user(self) -> list[Any]:
        """The ids of hooks inside the block that ``parallelize`` has not put there, and of those of all modules: a
        replay would not call them.
        """
        found: list[Any] = list(chain.from_iterable(OF_ALL_MODULES))
        for part in self._parts[1:]:
            found += {*part._forward_hooks, *part._forward_pre_hooks} - self._hooks
            found += (*part._backward_hooks, *part._backward_pre_hooks)
        return found

    def _record_call(self, inputs: list[GlobalTensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Run the module and record its effects; None where a replay might have other effects."""
        context, before, given = self.world.context, self.versions(inputs), _flattened(args, kwargs)
        program = ProgramState(self._parts, self.world.device)
        keys_before = None if context.generator is None else context.generator.get_state()
        start = context.position
        context.running.observer = observer = CallObserver(inputs, start, self.may_skip)
        try:
            with observer.made:
                result = self.forward(*args, **kwargs)
        finally:
            context.running.observer = None
        num_keys = _keys_between(keys_before, self.world)
        leaves = tree_leaves(result)
        results = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        has_boxings = any(isinstance(leaf, GlobalTensor) and leaf._boxings for leaf in results)
        is_left = observer.made.are_left(results, inputs)  # somebody reads a tensor elsewhere
        may_differ = is_left or has_boxings or observer.made.reads_values or not observer.can_skip
        if may_differ or num_keys is None or self._hooks_of_user():
            return result, None
        if not all(isinstance(leaf, TENSORS_AND_VALUES) for leaf in leaves):
            return result, None
        is_as_given = _are_same(given, _flattened(args, kwargs))  # no list or dict that the caller passes on
        if before != self.versions(inputs) or not is_as_given or not program.is_unchanged():
            return result, None
        call = CallRecord(observer.boxings, context.position - start, num_keys)
        return result, self.record(result, call, observer)

    def versions(self, inputs: Sequence[GlobalTensor]) -> list[Any]:
        """Of what a forward may write: inputs, parameters and buffers."""
        with local_torch():
            found: list[Any] = [version_of(tensor) for tensor in inputs]
            for part in self._parts:
                held = (*part._parameters.values(), *part._buffers.values())
                found += [(id(tensor), version_of(tensor)) for tensor in held if tensor is not None]
        return found


def _first_entries(holder: Any) -> Iterator[tuple[Any, Any]]:
    """The first entries of a list, a dict or an object, by position or name; none of anything else."""
    if isinstance(holder, dict):
        return islice(holder.items(), _MOST_ENTRIES)
    if isinstance(holder, (*HOLDERS, tuple)):
        return islice(enumerate(holder), _MOST_ENTRIES)
    return islice(entries_of(holder).items(), _MOST_ENTRIES)


def _flattened(args: Any, kwargs: Any) -> tuple[Sequence[Any], Any]:
    """The leaves of a call's arguments, and their number or structure."""
    if kwargs or not all(isinstance(arg, TENSORS_AND_VALUES) for arg in args):
        return tree_flatten((args, kwargs))
    return args, len(args)


def _are_same(before: tuple[Sequence[Any], Any], after: tuple[Sequence[Any], Any]) -> bool:
    """Whether arguments have the structure and the leaves that they had before."""
    return bool(before[1] == after[1]) and all(map(is_, before[0], after[0]))


def distinct_tensors(leaves: Sequence[Any]) -> list[Any]:
    """The tensors among the leaves of a result, each once, in order."""
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


def _keys_between(before: torch.Tensor | None, world: World) -> int | None:
    """The number of random keys that were drawn since the generator's state was ``before``; None if it cannot be
    counted.
    """
    if before is None or world.context.generator is None:
        return 0
    counting, now = torch.Generator(), world.context.generator.get_state()
    counting.set_state(before)
    for count in range(_MAX_KEYS):
        if torch.equal(counting.get_state(), now):
            return count
        draw_key(world, counting)
    return None


@contextmanager
def cached_forwards(modules: Sequence[ForwardCache]) -> Iterator[None]:
    """Context in which these caches replace the forwards of their modules."""
    for module in modules:
        module.install()
    try:
        yield
    finally:
        for module in modules:
            module.remove()
