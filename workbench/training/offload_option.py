"""The option ``offload`` of a strategy on a module."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import nn

from workbench.tensors.global_tensor import GlobalTensor
from workbench.training.gradients.shard import state_spec
from workbench.training.offload.activations import OffloadedActivations
from workbench.training.offload.host_memory import check_space
from workbench.training.strategies.state import ParallelState

_STATE_PER_PARAMETER = 2
"""Bytes of Adam's state per byte of a parameter."""


def install(module: nn.Module, state: ParallelState) -> list[Any]:
    """Let the parts of a step that the strategy names lie elsewhere.

    Raises:
        StrategyError: on CPUs, the disk has too little space for the state of Adam.
    """
    option, world = state.strategy.options.offload, state.layouts.world
    kinds = option.split("+") if world.device.type != "meta" else []
    parameters = [p for p in module.parameters() if isinstance(p, GlobalTensor)]
    for parameter in parameters:
        parameter._keeps_state_on_host = "optimizer" in kinds
    specs = [(state_spec(p), p.dtype.itemsize) for p in parameters] if "optimizer" in kinds else []
    held = sum(prod(spec.local_shape) * size for spec, size in specs if not spec.is_placeholder)
    if any(kinds):
        check_space(_STATE_PER_PARAMETER * held, world, f"offload={option}")
    if "activations" not in kinds:
        return []
    offloaded = OffloadedActivations(module, world)
    state.on_interrupt.append(offloaded.end_all)
    return offloaded.hooks
