"""Optimizers from before a change of strategy: their steps would train nothing, or only a part of the model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from workbench.errors import LayoutError
from workbench.kernels.blocks import slice_region
from workbench.tensors.boxing.box import box
from workbench.tensors.conversion import REPLACED
from workbench.tensors.global_tensor import GlobalTensor, Spec, plain
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World
from workbench.training.gradients.shard import state_spec

MOVE_STATE = (
    "State lies where its parameter does: give the optimizer when the strategy changes, wb.parallelize(module, "
    "strategy, optimizer=optimizer), or make a new one."
)
_GIVE_OPTIMIZER = (
    "Give it the optimizer, wb.parallelize(module, strategy, optimizer=optimizer), several as a list, or make it "
    "afterwards."
)
_with_state: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()
"""Optimizers of global parameters that have stepped, or whose state was loaded, the first one first."""


def mark_stateful(optimizer: Optimizer) -> None:
    """Record that an optimizer has state in the layouts of its parameters."""
    _with_state[optimizer] = None


def optimizers_of(module: nn.Module, world: World) -> list[Optimizer]:
    """The optimizers that have state of parameters of a module, in the order of these parameters. All ranks call it.

    Ranks may hold others: Python frees a dropped optimizer at a different time on each rank, and a traceback may keep
    one. So they compare which parameters each one has, and of several for the same parameters the newest counts first.
    """
    number_of = {id(parameter): number for number, parameter in enumerate(module.parameters())}
    found: dict[tuple[tuple[int, ...], int], Optimizer] = {}
    for optimizer in reversed(list(_with_state)):
        numbers = tuple(sorted(number_of.get(id(p), -1) for params in _groups_of(optimizer) for p in params))
        if any(number >= 0 for number in numbers):
            found[numbers, sum(known == numbers for known, _ in found)] = optimizer
    if world.device.type == "meta":  # a dry run has no other ranks
        return list(found.values())
    everywhere = set(found).intersection(*all_gather_object(list(found), world, "optimizers of a module"))
    return [found[key] for key in sorted(everywhere)]


def _groups_of(optimizer: Optimizer) -> list[list[torch.Tensor]]:
    """The parameters of each group, also after a step that raised, which has left parts in their places."""
    swap = optimizer.__dict__.get("_workbench_swap")
    held: list[list[torch.Tensor]] | None = None if swap is None else swap.held
    return [group["params"] for group in optimizer.param_groups] if held is None else held


def check_not_replaced(call: str, parameters: Sequence[torch.Tensor], fix: str = _GIVE_OPTIMIZER) -> None:
    """Raise for replaced parameters, which get no gradients any more.

    Raises:
        LayoutError: some of the ``parameters`` of a call were replaced.
    """
    if replaced := sum(not isinstance(parameter, GlobalTensor) and parameter in REPLACED for parameter in parameters):
        raise LayoutError(
            f"{call}: {replaced} of {len(parameters)} parameters are those of a module before wb.parallelize, "
            f"which has put global tensors in their place. {fix}"
        )


def check_state_layouts(optimizer: Optimizer, parameters: Sequence[GlobalTensor], specs: Sequence[Spec]) -> None:
    """Raise for state in the layouts of ``specs``: ranks that hold a parameter only now would start with new state.

    All ranks see that layouts have changed, and exchange whether there is such state.

    Raises:
        LayoutError: on all ranks, if one has state of a parameter that has another layout now.
    """
    moved = [p for p, spec in zip(parameters, specs, strict=True) if state_spec(p).layout != spec.layout]
    if not moved:
        return
    values = [optimizer.state.get(p, {}).values() for p in moved]
    number = sum(any(isinstance(value, torch.Tensor) and value.dim() for value in of_one) for of_one in values)
    most = max(all_gather_object(number, moved[0]._spec.world, "state of an optimizer"))
    if most:
        raise LayoutError(
            f"{type(optimizer).__name__}: {len(moved)} of {len(parameters)} parameters have other layouts than in the "
            f"step before, and state that lies as they lay, up to {most} of them on a rank. {MOVE_STATE}"
        )


def part_of(parameter: GlobalTensor, value: Any) -> Any:
    """A value of an optimizer's state, which may be global or that of the whole parameter, as this rank's part.

    Raises:
        LayoutError: it is the part of another layout.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return _part_of_state(parameter, value).contiguous()


def _part_of_state(parameter: GlobalTensor, value: torch.Tensor) -> torch.Tensor:
    spec = state_spec(parameter)
    if isinstance(value, GlobalTensor):
        if tuple(value._spec.shape) != tuple(spec.shape):
            return plain(value)
        return plain(box(value.detach(), spec.layout))
    if tuple(value.shape) == tuple(spec.shape) != tuple(spec.local_shape):
        return slice_region(value, spec.layout.region(spec.shape, spec.world.rank)).clone(
            memory_format=torch.contiguous_format
        )
    if value.dim() == len(spec.shape) > 0 and tuple(value.shape) != tuple(spec.local_shape):
        raise LayoutError(
            f"optimizer.step(): state of shape {tuple(value.shape)} for a parameter of shape {tuple(spec.shape)}, of "
            f"which this rank steps on {tuple(spec.local_shape)} ({spec.layout}). {MOVE_STATE}"
        )
    return value
