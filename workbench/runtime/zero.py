"""ZeRO as a choice of sbp: which of a parameter's state, gradient and values are split over the ranks that share it.

    zero=1   the optimizer's state: gradients are summed to shards, the step works on these, parameters are gathered
    zero=2   gradients too: after every backward P -> S, and only the shard is kept (so accumulation communicates per
             micro-batch, and takes a shard's memory)
    zero=3   parameters too: a layer gathers them before its forward and again for its backward

The ranks that share a parameter are those of the axes on which it is B; layouts of shards are in ``shard``.
Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (2020).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from workbench.runtime.boxing import box
from workbench.runtime.overlap import watch
from workbench.runtime.shard import choose_shards, shard_of
from workbench.runtime.strategies.state import ParallelState, layers_of
from workbench.runtime.tensor import GlobalTensor
from workbench.runtime.unsharding import Unshard


def install(module: nn.Module, state: ParallelState) -> list[Any]:
    """Shard what ``zero=`` of the strategy says, and follow the module's gradients."""
    stage = state.strategy.options.zero
    parameters = [p for p in module.parameters() if isinstance(p, GlobalTensor)]
    for parameter in parameters:
        parameter.__dict__.pop("_shard", None)  # of an earlier strategy
    if stage:
        choose_shards(parameters)
    handles: list[Any] = []
    if stage == 3:
        whole = _split_values(module)
        handles += [Unshard(layer, whole).install() for layer in _gathering_layers(module)]
    return [*handles, watch(module, scatters=stage == 2)]


def _split_values(module: nn.Module) -> dict[int, Any]:
    """Leave every rank its shard of the parameters; gives the layouts that they had, by parameter."""
    whole: dict[int, Any] = {}
    for parameter in module.parameters():
        shard = shard_of(parameter) if isinstance(parameter, GlobalTensor) else None
        if shard is not None:
            whole[id(parameter)] = shard.of.layout
            with torch.no_grad():
                parameter.data = box(parameter.data, shard.spec.layout)  # type: ignore[arg-type]
    return whole


def _gathering_layers(module: nn.Module) -> list[nn.Module]:
    """The modules around whose call parameters are whole; attention of torch uses those of its parts itself."""
    inside = {
        id(part)
        for attention in module.modules()
        if isinstance(attention, nn.MultiheadAttention)
        for part in attention.modules()
        if part is not attention
    }
    return [layer for _, layer in layers_of(module) if id(layer) not in inside]
