"""ZeRO as a choice of sbp: which of a parameter's state, gradient and values are split over the ranks that share it.

    zero=1   the optimizer's state: gradients are summed to shards, the step works on these, parameters are gathered
    zero=2   gradients too: every backward ends with P -> S, and only the shard is kept (so accumulation communicates
             per micro-batch, and takes a shard's memory)
    zero=3   parameters too: a block gathers them before its forward and again for its backward

The axes on which a parameter is B give the ranks that share it. ``shard`` has the layouts of shards. With ``shards=``
the data axis is two axes: shards are B over groups of ranks, and S inside a group. Their gradients are terms over the
groups: stages 1 and 2 sum them with each scatter, and stage 3 once in a step, as data parallelism sums whole gradients.
Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (2020).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from workbench.tensors.boxing.box import box
from workbench.tensors.global_tensor import GlobalTensor
from workbench.training.gradients.overlap import install_reducer
from workbench.training.gradients.shard import Shard, choose_shards, shard_of
from workbench.training.recompute import repeated_blocks
from workbench.training.strategies.state import ParallelState, layers_of, parameter_stages
from workbench.training.zero.gathered_call import ShardedParameter
from workbench.training.zero.sharded_units import ExecutionOrder, ShardedUnit

_SMALL_BYTES = 2**20
"""A block of so many bytes is gathered at once whatever its share of the model is."""
_LARGEST_SHARE = 4
"""A larger block is gathered at once if the model has so many of them; else layer by layer, to hold less."""


def install(module: nn.Module, state: ParallelState) -> list[Any]:
    """Shard as ``zero=`` of the strategy says, and observe the module's gradients."""
    stage = state.strategy.options.zero
    parameters = [p for p in module.parameters() if isinstance(p, GlobalTensor)]
    for parameter in parameters:
        parameter._optimizer_shard = None  # an earlier strategy may have set it
    if stage:
        stages = parameter_stages(module, state.resolved)
        choose_shards(parameters, {id(p): state.resolved.shard_groups(stages[id(p)]) for p in parameters})
    handles: list[Any] = []
    if stage == 3:
        execution_order = ExecutionOrder()
        handles += [unit.install() for unit in _units(module, state, _split_values(module), execution_order)]
        handles.append(execution_order.install(module))
        state.on_interrupt.append(execution_order.reset)
    return [*handles, install_reducer(module, scatters=stage == 2)]


def _split_values(module: nn.Module) -> dict[int, Shard]:
    """Reduce every rank's parameters to its shards. Returns the shards by the ids of the parameters."""
    shards: dict[int, Shard] = {}
    for parameter in module.parameters():
        shard = shard_of(parameter) if isinstance(parameter, GlobalTensor) else None
        if isinstance(parameter, GlobalTensor) and shard is not None:
            shards[id(parameter)] = shard
            with torch.no_grad():
                parameter._take_data(box(parameter.detach(), shard.spec.layout))
    return shards


def _units(
    module: nn.Module, state: ParallelState, shards: dict[int, Shard], execution_order: ExecutionOrder
) -> Iterator[ShardedUnit]:
    """The blocks whose parameters are gathered together, the layers outside of blocks, and layers that are called
    alone.

    torch's attention reads the parameters of its parts without calling them.
    """
    stages = parameter_stages(module, state.resolved)
    members: dict[nn.Module, list[ShardedParameter]] = {}
    for choice, (_, layer) in zip(state.resolved.layers, layers_of(module), strict=True):
        named = layer.named_parameters(recurse=False, remove_duplicate=False)
        own = [(name, p) for name, p in named if id(p) in shards]
        # Layout hooks box whole parameters of other stages here, around each use.
        here = [(name, p) for name, p in own if stages[id(p)] == choice.stage]
        members[layer] = [ShardedParameter(layer, name, shards[id(p)]) for name, p in here]

    def inside(part: nn.Module) -> list[ShardedParameter]:
        return [member for layer in part.modules() for member in members.get(layer, ())]

    largest = max(_SMALL_BYTES, _whole_bytes(inside(module)) / _LARGEST_SHARE)
    gathered = {block: inside(block) for block in repeated_blocks(module) if _whole_bytes(inside(block)) <= largest}
    in_attention: set[nn.Module] = set()
    for layer, found in members.items():
        if isinstance(layer, nn.MultiheadAttention):
            in_attention.update(part for part in layer.modules() if part is not layer)
            yield ShardedUnit(layer, inside(layer), execution_order, list(layer.modules()))
        elif layer not in in_attention:
            yield ShardedUnit(layer, gathered.pop(layer, found), execution_order, [layer])
    for block, found in gathered.items():
        yield ShardedUnit(block, found, execution_order, [])


def _whole_bytes(members: list[ShardedParameter]) -> int:
    return sum(4 * math.prod(member.shard.of.shape) for member in members)
