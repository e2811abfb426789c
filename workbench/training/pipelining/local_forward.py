"""Blocks of a stage that has one rank. All layouts on one rank are equal, so such a block runs as plain torch.

Inside, torch functions see shards, which are the whole tensors; no layout is looked up and no layout hook runs. Inputs
from other stages are boxed first, results are wrapped, and exchange counters advance as in the block. The first call
shows whether a replay is exact: the block draws no random keys, reads nothing of other stages but its inputs, and its
graph has only torch's own functions of inputs and of the block's parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.errors import WorkbenchError
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, spec_of, wrap
from workbench.tensors.world import World
from workbench.training.pipelining.forward_cache import (
    CallObserver,
    CallRecord,
    ForwardCache,
    distinct_tensors,
)
from workbench.training.pipelining.made_tensors import nodes_between
from workbench.training.pipelining.placeholder_forward import PlaceholderForward
from workbench.training.strategies.state import ParallelState, parameter_stages

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
"""Modules of whose parts the program calls some by themselves."""
_NO_HOOKS: Mapping[int, Any] = MappingProxyType({})
_FUSED_FOR_PLAIN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""In evaluation they call fused functions if all their tensors are plain."""


@dataclass
class LocalRecord:
    """The record of a call.

    Attributes:
        boxing_of_input: for every input from another stage, the number of the boxing that brings it here.
        layouts: the layouts of the result's tensors, in order; one that is returned twice counts once.
    """

    call: CallRecord
    boxing_of_input: dict[int, int]
    layouts: list[Layout]


class LocalForward(ForwardCache):
    """The forward of a block whose parameters all lie on this rank."""

    takes_plain = True

    def __init__(self, module: nn.Module, placement: Placement, world: World, hooks: Set[int]) -> None:
        super().__init__(module, world, hooks)
        self.placement = placement
        self._hooked = [
            (part.__dict__, part._forward_pre_hooks, part._forward_hooks)
            for part in self._parts[1:]
            if part._forward_pre_hooks or part._forward_hooks
        ]

    def may_skip(self, tensor: GlobalTensor, target: Spec, function: str) -> bool:
        """Boxings that stay on this rank, unless the code asks for them: it would not find a layout."""
        return bool(function) and tensor._spec.layout.placement == target.layout.placement == self.placement

    def replay(self, record: LocalRecord, inputs: list[GlobalTensor], args: Any, kwargs: Any) -> Any:
        """Run the block in plain torch; run it unchanged where that fails, as in code that reads a tensor's layout."""
        boxed = self.box_inputs(record.call, inputs)
        context = self.world.context
        counted, given = context.position, (args, kwargs)
        if record.boxing_of_input:
            here = {id(inputs[index]): boxed[boxing] for index, boxing in record.boxing_of_input.items()}
            given = tree_map(lambda leaf: here.get(id(leaf), leaf), given)
        try:
            return self._run(record, *given)
        except (AttributeError, TypeError, WorkbenchError):
            self.stop_replaying(record)
            result = self.forward(*args, **kwargs)
            context.position = counted
            return result

    def _run(self, record: LocalRecord, args: Any, kwargs: Any) -> Any:
        with local_torch(), self._without_hooks():
            result = self.forward(*args, **kwargs)
            if type(result) is torch.Tensor:
                return self._wrapped(result, record.layouts[0])
            leaves, structure = tree_flatten(result)
            layouts = iter(record.layouts)
            made = [self._wrapped(v, next(layouts)) if type(v) is torch.Tensor else v for v in leaves]
        return tree_unflatten(made, structure)

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """Context without the layout hooks inside the block, which have nothing to box."""
        for part, *_ in self._hooked:
            part["_forward_pre_hooks"], part["_forward_hooks"] = _NO_HOOKS, _NO_HOOKS
        try:
            yield
        finally:
            for part, before, after in self._hooked:
                part["_forward_pre_hooks"], part["_forward_hooks"] = before, after

    def _wrapped(self, result: torch.Tensor, layout: Layout) -> GlobalTensor:
        return wrap(result, spec_of(self.world, layout, result.shape))

    def record(self, result: Any, call: CallRecord, observer: CallObserver) -> LocalRecord | None:
        """The record of a call; None unless its inputs are on this rank or boxed to it, and torch alone makes the
        results here.
        """
        tensors: list[Any] = distinct_tensors(tree_leaves(result))
        boxing_of_input = self._boxing_of_input(observer)
        if call.num_keys or observer.recomputes or boxing_of_input is None:
            return None
        if any(isinstance(part, _FUSED_FOR_PLAIN) and not part.training for part in self._parts):
            return None
        held = {id(t) for part in self._parts for t in (*part._parameters.values(), *part._buffers.values())}
        held |= {id(tensor) for tensor in observer.inputs}
        if any(id(t) in held or not self._is_here(t) for t in tensors):
            return None
        if not self._is_torch_alone(tensors, observer):
            return None
        return LocalRecord(call, boxing_of_input, [tensor._spec.layout for tensor in tensors])

    def _is_here(self, tensor: Any) -> bool:
        return type(tensor) is GlobalTensor and tensor._spec.layout.placement == self.placement

    def _boxing_of_input(self, observer: CallObserver) -> dict[int, int] | None:
        """For every input from elsewhere, the number of the boxing that brings it here; None if one has none."""
        found: dict[int, int] = {}
        for index, tensor in enumerate(observer.inputs):
            if self._is_here(tensor):
                continue
            boxings = [i for i, b in enumerate(observer.boxings) if b.index == index]
            if len(boxings) != 1 or observer.boxings[boxings[0]].layout.placement != self.placement:
                return None
            found[index] = boxings[0]
        return found

    def _is_torch_alone(self, results: list[Any], observer: CallObserver) -> bool:
        """Whether the history of the results, back to inputs and parameters, holds nothing but torch's functions."""
        inputs = observer.inputs
        leaves = {id(p) for part in self._parts for p in part._parameters.values()} | {id(t) for t in inputs}
        for node in nodes_between(results, inputs):
            if hasattr(node, "variable"):
                if id(node.variable) not in leaves:
                    return False
            elif hasattr(node, "boxing"):
                source, target, tag = node.boxing[:3]
                stays = source.layout.placement == target.layout.placement == self.placement
                if tag not in observer.tags and not stays:
                    return False
            elif isinstance(node, BackwardCFunction):
                return False
        return True


def forward_caches(
    root: nn.Module,
    stage_of: Mapping[int, int],
    stage: int,
    placement: Placement | None,
    world: World,
    hooks: Set[int] = frozenset(),
) -> list[ForwardCache]:
    """Those of the largest modules with parts of their own whose parameters all lie on one stage: on another one, or on
    this one, if it is one rank.

    Args:
        stage_of: the stage of a parameter by its id.
        stage, placement: this rank's stage and its ranks; -1 and None if it has none.
        hooks: the ids of hooks that ``parallelize`` has put on layers. A block with other hooks inside runs unchanged.
    """
    found = list[ForwardCache]()
    for block, of_block in dict(_blocks(root, stage_of)).items():
        if of_block != stage:
            found.append(PlaceholderForward(block, world, hooks))
        elif placement is not None and placement.num_ranks == 1:
            found.append(LocalForward(block, placement, world, hooks))
    return found


def _blocks(root: nn.Module, stage_of: Mapping[int, int]) -> Iterator[tuple[nn.Module, int]]:
    """The blocks with their stages."""
    for child in root.children():
        stages = {stage_of[id(parameter)] for parameter in child.parameters()}
        if len(stages) == 1 and not isinstance(child, _CONTAINERS) and any(child.children()):
            yield child, stages.pop()
        elif stages:
            yield from _blocks(child, stage_of)


def forward_caches_of(
    module: nn.Module, state: ParallelState, stage: int, placement: Placement, world: World
) -> list[ForwardCache]:
    """The forward caches of a module's blocks on one stage; none if a call runs more than the forward: recomputation,
    or a gathering in its backward.
    """
    resolved = state.resolved
    if resolved.num_stages == 1 or resolved.options.recompute or resolved.options.zero == 3:
        return []
    stages = parameter_stages(module, resolved)
    hooks = {number for handle in state.handles if (number := getattr(handle, "id", None)) is not None}
    return forward_caches(module, stages, stage, placement, world, hooks)
