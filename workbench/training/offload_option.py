"""The option ``offload`` of a strategy on a module."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import nn

from workbench.tensors.global_tensor import GlobalTensor, Spec, spec_of
from workbench.training.gradients.shard import shard_layouts, state_spec
from workbench.training.offload.activations import OffloadedActivations
from workbench.training.offload.host_memory import check_space
from workbench.training.strategies.shard_parameters import parameter_spec
from workbench.training.strategies.state import ParallelState, parameter_owners

_STATE_PER_PARAMETER = 2
"""Bytes of Adam's state per byte of a parameter."""


def check(module: nn.Module, state: ParallelState) -> None:
    """Refuse what has no place beside the devices.

    Raises:
        StrategyError: on CPUs, the disk has too little space for the state of Adam.
    """
    kinds = _kinds(state)
    if kinds:
        held = _held_bytes(module, state) if "optimizer" in kinds else 0
        check_space(_STATE_PER_PARAMETER * held, state.layouts.world, f"offload={state.strategy.options.offload}")


def install(module: nn.Module, state: ParallelState) -> list[Any]:
    """Let the parts of a step that the strategy names lie elsewhere."""
    kinds = _kinds(state)
    for parameter in module.parameters():
        if isinstance(parameter, GlobalTensor):
            parameter._keeps_state_on_host = "optimizer" in kinds
    if "activations" not in kinds:
        return []
    offloaded = OffloadedActivations(module, state.layouts.world)
    state.on_interrupt.append(offloaded.end_all)
    return offloaded.hooks


def _kinds(state: ParallelState) -> list[str]:
    """What lies elsewhere; nothing in a dry run."""
    option, world = state.strategy.options.offload, state.layouts.world
    return option.split("+") if option and world.device.type != "meta" else []


def _held_bytes(module: nn.Module, state: ParallelState) -> int:
    """Bytes of the parts of parameters on which this rank's optimizer will step, without those whose state has its
    place from a strategy before.
    """
    owners, world = parameter_owners(module, state.resolved), state.layouts.world
    specs = [parameter_spec(parameter, choice, state.layouts) for parameter, choice in owners.items()]
    if state.strategy.options.zero:
        groups = [state.resolved.shard_groups(choice.stage) for choice in owners.values()]
        layouts = zip(specs, shard_layouts(specs, groups), strict=True)
        specs = [spec if layout is None else spec_of(world, layout, spec.shape) for spec, layout in layouts]
    sizes = zip(owners, specs, strict=True)
    new = [(p, spec) for p, spec in sizes if not (spec.is_placeholder or _has_place(p, spec))]
    return sum(prod(spec.local_shape) * parameter.dtype.itemsize for parameter, spec in new)


def _has_place(parameter: torch.Tensor, spec: Spec) -> bool:
    return isinstance(parameter, GlobalTensor) and parameter._keeps_state_on_host and state_spec(parameter) is spec
