"""Blocks of other stages in one step: what a block does on ghosts is noted once, then told to the graph by one node.

A rank runs the whole program, and a block that lies on another stage costs it twenty calls that do nothing. What the
call of such a block leaves behind on this rank is little: ghosts of known layouts, linked to some of its inputs and
parameters, the boxings of inputs, and how far counters of exchanges and random keys went. It is the same for every
call with the same layouts and values; a block of which that cannot be said for sure runs as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from workbench.core.boxing import plan_boxing
from workbench.core.layout import Layout
from workbench.core.strategy import Options
from workbench.runtime.boxing import box_implicitly
from workbench.runtime.ops.ghost import TENSOR, OutputInfo, autocast_state, ghost_outputs
from workbench.runtime.random import draw_key
from workbench.runtime.tensor import GlobalTensor, Spec, label, local_torch
from workbench.runtime.world import World

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
"""Modules of whose parts the program calls some by themselves."""
VALUES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Enum)
"""Arguments that can be compared and never change."""
_MAX_RECORDS = 64
_MAX_KEYS = 256


@dataclass(frozen=True, slots=True)
class InputBoxing:
    """A boxing of the ``index``-th tensor of a call, ``offset`` exchanges after its start."""

    index: int
    layout: Layout
    function: str
    offset: int


@dataclass
class Record:
    """What a call leaves behind. Links count inputs first, then forms made by ``boxings``, then ``parameters``."""

    boxings: list[InputBoxing]
    parameters: list[GlobalTensor]
    num_tags: int
    num_keys: int
    infos: list[OutputInfo]
    specs: list[Spec]
    structure: Any
    leaves: list[Any]


@dataclass
class Watch:
    """The call that is being noted: boxings of its inputs, and whether anything else has to do with this rank."""

    inputs: list[GlobalTensor]
    start: int
    boxings: list[InputBoxing] = field(default_factory=list)
    tags: dict[int, int] = field(default_factory=dict)
    is_local: bool = True

    def add(self, tensor: GlobalTensor, target: Spec, function: str, tag: int, edge: int) -> None:
        """Take note of a boxing."""
        index = next((i for i, known in enumerate(self.inputs) if known is tensor), None)
        if index is not None:
            self.tags[tag] = len(self.boxings)
            self.boxings.append(InputBoxing(index, target.layout, function, edge - self.start))
            return
        source = tensor._spec
        if source.is_ghost and target.is_ghost:
            return
        with local_torch():
            learns = tensor.requires_grad
        plan = plan_boxing(source.layout, target.layout, source.shape, 1)
        self.is_local = self.is_local and target.is_ghost and plan.is_local and not learns


class GhostModule:
    """A module whose parameters lie on other stages, as one stage calls it."""

    def __init__(self, module: nn.Module, world: World) -> None:
        self.module, self.world = module, world
        self._parts = list(module.modules())
        self._records: dict[Any, Record | None] = {}

    def install(self) -> None:
        """From now on the module's forward goes through here."""
        attributes = self.module.__dict__
        self._before = attributes.get("forward")
        self._forward: Callable[..., Any] = self.module.forward
        attributes["forward"] = self

    def remove(self) -> None:
        """The module's forward is its own again."""
        if self._before is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        world = self.world
        leaves, structure = tree_flatten((args, kwargs))
        key = self._key(leaves, structure)
        is_watched = world.tracer is not None or world.recorder is not None  # by somebody who wants every boxing
        if key is None or is_watched or world.running is None or world.running.watch is not None:
            return self._forward(*args, **kwargs)
        inputs = [leaf for leaf in leaves if isinstance(leaf, GlobalTensor)]
        record = self._records.get(key, self)
        if isinstance(record, Record):
            return self._replay(record, inputs)
        if record is None:
            return self._forward(*args, **kwargs)
        result, made = self._note(inputs, args, kwargs)
        if len(self._records) >= _MAX_RECORDS:
            self._records.clear()
        self._records[key] = made
        return result

    def _key(self, leaves: list[Any], structure: Any) -> Any:
        """All that the outcome depends on, or None where a value cannot be compared."""
        parts: list[Any] = [structure, torch.is_grad_enabled(), autocast_state()]
        with local_torch():
            for part in self._parts:
                learns = tuple(p is not None and (id(p), p.requires_grad) for p in part._parameters.values())
                parts.append((part.training, len(part._forward_hooks), len(part._forward_pre_hooks), learns))
            for leaf in leaves:
                if isinstance(leaf, GlobalTensor):
                    forms = tuple(form[0] for form in leaf.__dict__.get("_forms", ()))
                    parts.append((leaf._spec, leaf.dtype, leaf.requires_grad, leaf._is_param, forms))
                elif isinstance(leaf, VALUES):
                    parts.append((type(leaf), leaf))
                else:  # a plain tensor, whose values may decide, or an object that may be changed, such as a cache
                    return None
        return tuple(parts)

    def _replay(self, record: Record, inputs: list[GlobalTensor]) -> Any:
        world = self.world
        start = world.num_edges.get(world.micro_batch, 0)
        forms = []
        for boxing in record.boxings:
            world.num_edges[world.micro_batch] = start + boxing.offset
            forms.append(box_implicitly(inputs[boxing.index], boxing.layout, boxing.function))
        world.num_edges[world.micro_batch] = start + record.num_tags
        for _ in range(record.num_keys):
            draw_key(world)
        operands = [*inputs, *forms, *record.parameters]
        ghosts = ghost_outputs(record.infos, operands, record.specs, world.device)
        made = iter(label(ghost, spec) for ghost, spec in zip(ghosts, record.specs, strict=True))
        return tree_unflatten([next(made) if leaf is TENSOR else leaf for leaf in record.leaves], record.structure)

    def _note(self, inputs: list[GlobalTensor], args: Any, kwargs: Any) -> tuple[Any, Record | None]:
        """Run the module and tell what it has left behind; None where a shortcut might leave something else."""
        world, before = self.world, self._state(inputs)
        keys_before = None if world.generator is None else world.generator.get_state()
        start = world.num_edges.get(world.micro_batch, 0)
        world.running.watch = watch = Watch(inputs, start)
        try:
            result = self._forward(*args, **kwargs)
        finally:
            world.running.watch = None
        num_keys = _keys_between(keys_before, world)
        if not watch.is_local or num_keys is None or not _same(before, self._state(inputs)):
            return result, None
        leaves, structure = tree_flatten(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not all(_is_fresh_ghost(tensor, inputs) for tensor in tensors):
            return result, None
        links = _Links(inputs, watch)
        with local_torch():
            infos: list[OutputInfo] = [(t._spec.shape, t.dtype, t.requires_grad and links.of(t)) for t in tensors]  # type: ignore[attr-defined]
        if not links.are_known:
            return result, None
        return result, Record(
            watch.boxings,
            links.parameters,
            world.num_edges.get(world.micro_batch, 0) - start,
            num_keys,
            infos,
            [tensor._spec for tensor in tensors],  # type: ignore[attr-defined]
            structure,
            [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
        )

    def _state(self, inputs: list[GlobalTensor]) -> list[Any]:
        """Whatever a forward may change besides returning something: attributes, buffers, inputs, torch's generator."""
        found: list[Any] = [torch.get_rng_state().numpy().tobytes()]
        with local_torch():
            found += [tensor._version for tensor in inputs]
            for part in self._parts:
                found += [(name, value) for name, value in part.__dict__.items() if name != "forward"]
                held = (*part._parameters.values(), *part._buffers.values())
                found += [(id(tensor), tensor._version) for tensor in held if tensor is not None]
        return found


def _same(before: list[Any], after: list[Any]) -> bool:
    def alike(a: Any, b: Any) -> bool:
        if isinstance(a, tuple) and len(a) == 2 and isinstance(a[0], str):
            return a[0] == b[0] and (a[1] is b[1] or (isinstance(a[1], (int, float, str)) and a[1] == b[1]))
        return a == b

    return len(before) == len(after) and all(alike(a, b) for a, b in zip(before, after, strict=True))


def _keys_between(before: torch.Tensor | None, world: World) -> int | None:
    """How many random keys were drawn since the generator's state was ``before``; None if it is hard to say."""
    if before is None or world.generator is None:
        return 0
    counting, now = torch.Generator(), world.generator.get_state()
    counting.set_state(before)
    for count in range(_MAX_KEYS):
        if torch.equal(counting.get_state(), now):
            return count
        draw_key(world, counting)
    return None


def _is_fresh_ghost(tensor: torch.Tensor, inputs: list[GlobalTensor]) -> bool:
    """A ghost of its own, which is neither an input nor a view that writes would have to be told of."""
    return (
        type(tensor) is GlobalTensor
        and tensor._spec.is_ghost
        and tensor.__dict__.get("_ghost_base") is None
        and not any(tensor is known for known in inputs)
    )


class _Links:
    """Which inputs, forms of inputs and parameters the history of a result reaches."""

    def __init__(self, inputs: list[GlobalTensor], watch: Watch) -> None:
        self.parameters: list[GlobalTensor] = []
        self.are_known = True
        self._tags, self._first_form = watch.tags, len(inputs)
        self._first_parameter = len(inputs) + len(watch.boxings)
        self._edges: dict[Any, int] = {}
        with local_torch():
            for number, tensor in enumerate(inputs):
                if tensor.requires_grad and not tensor.is_leaf:
                    self._edges[tensor.grad_fn, tensor.output_nr] = number
        self._leaves = {id(tensor): number for number, tensor in enumerate(inputs)}

    def of(self, result: torch.Tensor) -> tuple[int, ...]:
        found, seen, waiting = set(), set(), [(result.grad_fn, result.output_nr)]
        while waiting:
            edge = waiting.pop()
            node: Any = edge[0]
            if node is None:
                continue
            if edge in self._edges:
                found.add(self._edges[edge])
            elif hasattr(node, "variable"):
                found.add(self._leaf(node.variable))
            elif node not in seen:
                seen.add(node)
                form = self._tags.get(node.boxing[2]) if hasattr(node, "boxing") else None
                if form is not None:
                    found.add(self._first_form + form)
                else:
                    waiting += node.next_functions
        return tuple(sorted(found))

    def _leaf(self, leaf: Any) -> int:
        if id(leaf) in self._leaves:
            return self._leaves[id(leaf)]
        self.are_known = self.are_known and isinstance(leaf, GlobalTensor) and leaf._spec.is_ghost
        self._leaves[id(leaf)] = self._first_parameter + len(self.parameters)
        self.parameters.append(leaf)
        return self._leaves[id(leaf)]


@contextmanager
def standing_in(modules: Sequence[GhostModule]) -> Iterator[None]:
    """While this lasts, the forwards of these modules are noted and told in short."""
    for module in modules:
        module.install()
    try:
        yield
    finally:
        for module in modules:
            module.remove()


def runs_once(options: Options) -> bool:
    """Whether a module's forward is all that its call does: no recomputation, no gathering in its backward."""
    return not options.recompute and options.zero < 3


def ghost_modules(root: nn.Module, stage_of: Mapping[int, int], stage: int, world: World) -> list[GhostModule]:
    """The largest modules that can stand in for themselves: all their parameters lie on one other stage.

    ``stage_of`` gives the stage of a parameter by its id.
    """
    found: list[GhostModule] = []
    for child in root.children():
        stages = {stage_of[id(parameter)] for parameter in child.parameters()}
        if not isinstance(child, CONTAINERS) and len(stages) == 1 and stage not in stages and any(child.children()):
            found.append(GhostModule(child, world))
        elif stages - {stage}:
            found += ghost_modules(child, stage_of, stage, world)
    return found
