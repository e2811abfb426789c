"""Forward caches of blocks and layers of other stages: the first call is recorded, later ones add one node.

A rank runs the whole program, and each block of another stage costs it twenty calls without data. The call of such a
block has few effects on this rank: placeholders of known layouts, linked to some of its inputs and
parameters, the boxings of inputs, and advanced counters of exchanges and random keys. They are the same for every call
with the same layouts and values. A block with other effects runs unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from workbench.core.boxing import plan_boxing
from workbench.tensors.dispatch.placeholder_calls import OutputInfo, placeholder_outputs
from workbench.tensors.dispatch.weight_gradients import has_hooks
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, wrap
from workbench.tensors.leaf_gradients import mark_placeholder
from workbench.tensors.random import draw_key
from workbench.tensors.world import World
from workbench.training.pipelining.forward_cache import (
    CallObserver,
    CallRecord,
    ForwardCache,
    InputBoxing,
    blocks,
    distinct_tensors,
)
from workbench.training.pipelining.running_step import RunningStep
from workbench.training.strategies.layout_hooks import PrepareInput


class ResultNumber(int):
    """Stands for a tensor among the leaves of a result."""


class ResultGroup(NamedTuple):
    """Results that are linked to the same inputs and parameters, by number, with links to inputs alone."""

    numbers: list[int]
    infos: list[OutputInfo]
    specs: list[Spec]
    parameters: list[GlobalTensor]


@dataclass
class PlaceholderRecord:
    """The effects of a call. Links count inputs first, then results of ``boxings``, then ``parameters``.

    Attributes:
        groups: results that are linked alike; None if a parameter has hooks or is the only link.
        leaves: of the call's result, each tensor as its number among the results: a tensor may be returned twice.
    """

    boxings: list[InputBoxing]
    parameters: list[GlobalTensor]
    num_tags: int
    num_keys: int
    infos: list[OutputInfo]
    groups: list[ResultGroup] | None
    specs: list[Spec]
    structure: Any
    leaves: list[Any | ResultNumber]


class PlaceholderForward(ForwardCache):
    """The forward of a module whose parameters lie on other stages."""

    def may_skip(self, tensor: GlobalTensor, target: Spec, function: str) -> bool:
        """Boxings between placeholders, and those that send nothing and have no gradient."""
        source = tensor._spec
        if source.is_placeholder and target.is_placeholder:
            return True
        with local_torch():
            learns = tensor.requires_grad
        plan = plan_boxing(source.layout, target.layout, source.shape, 1)
        return target.is_placeholder and plan.is_local and not learns

    def replay(self, record: PlaceholderRecord, inputs: list[GlobalTensor], args: Any, kwargs: Any) -> Any:
        """Make placeholders with the links of the recorded ones."""
        world = self.world
        boxed = self.box_inputs(record.boxings, record.num_tags, inputs)
        for _ in range(record.num_keys):
            draw_key(world)
        operands = [*inputs, *boxed]
        if record.groups is None or world.context.differentiates_within_steps:
            linked = [*operands, *record.parameters]
            placeholders = placeholder_outputs(record.infos, linked, record.specs, world.device)
        else:
            placeholders = self._in_groups(record.groups, operands, len(record.specs))
        if record.structure.is_leaf() and len(placeholders) == 1:
            return wrap(placeholders[0], record.specs[0])
        made = [wrap(placeholder, spec) for placeholder, spec in zip(placeholders, record.specs, strict=True)]
        leaves = [made[leaf] if type(leaf) is ResultNumber else leaf for leaf in record.leaves]
        return tree_unflatten(leaves, record.structure)

    def _in_groups(self, groups: list[ResultGroup], operands: list[GlobalTensor], count: int) -> list[Any]:
        """Results whose backward marks the parameters that they are linked to, and no others."""
        placeholders: list[Any] = [None] * count
        for group in groups:
            mark = partial(_mark_parameters, group.parameters, self.world.context.running)
            made = placeholder_outputs(group.infos, operands, group.specs, self.world.device, on_backward=mark)
            for number, placeholder in zip(group.numbers, made, strict=True):
                placeholders[number] = placeholder
        return placeholders

    def record(self, result: Any, inputs: list[GlobalTensor], call: CallRecord) -> PlaceholderRecord | None:
        """The record of a call; None if a result is not a new placeholder, or has links to other tensors."""
        leaves, structure = tree_flatten(result)
        tensors = distinct_tensors(leaves)
        if not all(_is_fresh_placeholder(tensor, inputs) for tensor in tensors):
            return None
        links = _HistoryLinks(inputs, call.observer)
        with local_torch():
            infos: list[OutputInfo] = [(t._spec.shape, t.dtype, t.requires_grad and links.of(t)) for t in tensors]
        if not links.are_known:
            return None
        specs = [tensor._spec for tensor in tensors]
        num_operands = len(inputs) + len(call.observer.boxings)
        number_of = {id(tensor): ResultNumber(number) for number, tensor in enumerate(tensors)}
        return PlaceholderRecord(
            call.observer.boxings,
            links.parameters,
            call.num_tags,
            call.num_keys,
            infos,
            _groups(infos, specs, num_operands, links.parameters),
            specs,
            structure,
            [number_of.get(id(leaf), leaf) for leaf in leaves],
        )


class PlaceholderLayerForward(PlaceholderForward):
    """A layer on another stage that is in no block: the cache runs its input hook too, so a replay skips both.

    A layer with other hooks or another forward runs unchanged, because these receive the boxed inputs.
    """

    def __init__(self, module: nn.Module, world: World, hooks: Set[int] = frozenset()) -> None:
        super().__init__(module, world, hooks)
        # Results of torch's modules depend on no values
        self.takes_plain = type(module).__module__.startswith("torch.nn.")
        self._input_hook: PrepareInput | None = None

    def install(self) -> None:
        """Replace the forward and the input hook."""
        self._input_hook = _only_hook(self.module)
        if self._input_hook is None:
            return
        super().install()
        forward, input_hook = self.forward, self._input_hook

        def forward_with_hook(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = input_hook.box_inputs(args, kwargs)
            return forward(*args, **kwargs)

        self.forward, input_hook.is_disabled = forward_with_hook, True

    def remove(self) -> None:
        """Restore the forward and the input hook."""
        if self._input_hook is not None:
            self._input_hook.is_disabled = False
            super().remove()


def _only_hook(module: nn.Module) -> PrepareInput | None:
    """The input hook of a layer that has no other hook, and the forward of its class."""
    before = list(module._forward_pre_hooks.values())
    others = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks, "forward" in module.__dict__)
    return before[0] if len(before) == 1 and isinstance(before[0], PrepareInput) and not any(others) else None


def _groups(
    infos: list[OutputInfo], specs: list[Spec], num_operands: int, parameters: list[GlobalTensor]
) -> list[ResultGroup] | None:
    """Results by their links: links to operands alone, as links to a dozen parameters take longer than the rest of a
    block's call.

    None if a result has gradients through parameters only, or a hook waits for the gradient of a parameter.
    """
    if any(map(has_hooks, parameters)):
        return None
    groups: dict[Any, ResultGroup] = {}
    for number, (shape, dtype, links) in enumerate(infos):
        numbers = links if isinstance(links, tuple) else ()
        kept = tuple(link for link in numbers if link < num_operands) if isinstance(links, tuple) else links
        if links and not kept:
            return None
        learning = parameters if links is True else [parameters[n - num_operands] for n in numbers if n >= num_operands]
        group = groups.setdefault(links, ResultGroup([], [], [], learning))
        group.numbers.append(number)
        group.infos.append((shape, dtype, kept))
        group.specs.append(specs[number])
    return list(groups.values())


def _mark_parameters(parameters: list[GlobalTensor], running: RunningStep) -> None:
    """Mark that the owner of the parameters has their gradients now, if the schedule's own backward runs."""
    if running.runs_backward:
        for parameter in parameters:
            if parameter._gradient.placeholder is False:
                mark_placeholder(parameter)


def _is_fresh_placeholder(tensor: torch.Tensor, inputs: list[GlobalTensor]) -> bool:
    """Whether it is a new placeholder: no input, no view (whose base would see writes to it), and no detached input,
    which shares the count of writes.
    """
    if type(tensor) is not GlobalTensor or not tensor._spec.is_placeholder or tensor._history_base is not None:
        return False
    owners = {id(owner) for known in inputs for owner in (known, known._memory_owner) if owner is not None}
    return id(tensor) not in owners and id(tensor._memory_owner) not in owners


class _HistoryLinks:
    """Which inputs, boxed inputs and parameters the history of a result reaches."""

    def __init__(self, inputs: list[GlobalTensor], observer: CallObserver) -> None:
        self.parameters: list[GlobalTensor] = []
        self.are_known = True
        self._tags, self._first_form = observer.tags, len(inputs)
        self._first_parameter = len(inputs) + len(observer.boxings)
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
                    self.are_known = self.are_known and not _holds_data(node)
                    waiting += node.next_functions
        return tuple(sorted(found))

    def _leaf(self, leaf: Any) -> int:
        if id(leaf) in self._leaves:
            return self._leaves[id(leaf)]
        self.are_known = self.are_known and isinstance(leaf, GlobalTensor) and leaf._spec.is_placeholder
        self._leaves[id(leaf)] = self._first_parameter + len(self.parameters)
        self.parameters.append(leaf)
        return self._leaves[id(leaf)]


def _holds_data(node: Any) -> bool:
    """Whether it is a boxing, made outside of the call, of a tensor that this rank holds: its gradient comes back."""
    return hasattr(node, "boxing") and not all(spec.is_placeholder for spec in node.boxing[:2])


def placeholder_forwards(
    root: nn.Module, stage_of: Mapping[int, int], stage: int, world: World, hooks: Set[int] = frozenset()
) -> list[PlaceholderForward]:
    """The largest modules whose parameters all lie on one other stage, and such layers in none of them.

    ``stage_of`` gives the stage of a parameter by its id, ``hooks`` are the ids of those that ``parallelize`` has made.
    """

    def is_wanted(module: nn.Module) -> bool | None:
        stages = {stage_of[id(parameter)] for parameter in module.parameters()}
        if not stages - {stage}:
            return None
        return len(stages) == 1

    found = blocks(root, is_wanted, with_layers=True)
    kinds = ((PlaceholderForward if any(m.children()) else PlaceholderLayerForward, m) for m in found)
    return [kind(m, world, hooks) for kind, m in kinds]
