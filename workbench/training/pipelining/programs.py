"""A step of a program that calls ``backward`` itself and places its stages itself, such as one of ``flow.nn.Graph``.

A forward is a run of the program, in which ``backward`` only records its loss. The schedule runs the backward of the
micro-batch from that loss later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from workbench.core.options import V_SCHEDULES
from workbench.core.placement import Placement
from workbench.errors import StrategyError
from workbench.tensors.random import draw_key
from workbench.tensors.world import World, current
from workbench.training.pipelining.executor import Executor, SingleStage, table_of
from workbench.training.pipelining.forward_cache import ForwardCache
from workbench.training.pipelining.local_forward import forward_caches
from workbench.training.pipelining.running_step import RunningStep
from workbench.training.recorded_actions import RecordedAction

Program = Callable[[Any], Any]
"""Inputs of a micro-batch -> what the program returns."""


def train_program(
    program: Program,
    parts: Sequence[Any],
    shares: Sequence[float],
    *,
    placements: Sequence[Placement] = (),
    schedule: str = "1f1b",
    forward_caches: Sequence[ForwardCache] = (),
    weigh: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[list[Any], list[RecordedAction]]:
    """Forward and backward of micro-batches. All ranks call it.

    Args:
        program: calls ``backward()`` on at least one scalar loss.
        parts: the inputs of every micro-batch.
        shares: the weight of every micro-batch's losses in the step.
        placements: the ranks of every stage, disjoint, in the order of the program. Fewer than two: micro-batches run
            one after the other.
        schedule: the name of the table that the stages run.
        forward_caches: see ``forward_caches_for``.
        weigh: (loss) -> the loss that backward starts from, such as the scaled one of a ``GradScaler``.

    Returns:
        the program's result for every micro-batch, without history; and the times of this rank's actions.

    Raises:
        StrategyError: no such schedule, or one that puts several stages on a rank; or the program calls no backward
            from a scalar.
    """
    if schedule in V_SCHEDULES and len(placements) > 1:
        raise StrategyError(
            f"schedule {schedule!r}: it puts 2 stages on each rank, but each of the program's {len(placements)} stages "
            "has ranks of its own. Use 1f1b, gpipe or zero_bubble."
        )
    world, outputs = current(), [None] * len(parts)
    table = table_of(schedule, len(placements), len(parts))
    own = max(0, _stage_of(world, placements))
    running = RunningStep(tuple(placements) or (_everywhere(world),), schedule, table, len(parts))

    def forward(index: int) -> torch.Tensor:
        output, losses = _losses_of(running, program, parts[index])
        if not losses:
            raise StrategyError(
                f"a training step of {len(parts)} micro-batches whose program calls backward() on 0 losses. Call "
                "loss.backward() on a scalar in it, on every micro-batch."
            )
        outputs[index] = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output)
        total = sum(losses[1:], losses[0]) * shares[index]
        return total if weigh is None else weigh(total)

    executor = Executor(world, {own: SingleStage(world, forward_caches)}, running, draw_key(world))
    executor.train(table[own], forward)
    return outputs, executor.spans


def forward_caches_for(
    modules: Iterable[nn.Module], stage_of: Mapping[int, int], placements: Sequence[Placement]
) -> list[ForwardCache]:
    """Forward caches for modules whose calls run only the forward; keep them between steps.

    Args:
        modules: the modules that the program calls.
        stage_of: the stage of each of their parameters, by its id.
        placements: as for ``train_program``.
    """
    world = current()
    stage = _stage_of(world, placements)
    own = placements[stage] if stage >= 0 else None
    return [cache for module in modules for cache in forward_caches(module, stage_of, stage, own, world)]


def _stage_of(world: World, placements: Sequence[Placement]) -> int:
    """This rank's stage; -1 if it has none."""
    return next((stage for stage, placement in enumerate(placements) if world.rank in placement), -1)


def run_program(program: Program, inputs: Any) -> tuple[Any, int]:
    """The program's result without history, and the number of losses on which it called ``backward``."""
    world = current()
    running = RunningStep((_everywhere(world),), "", [[]], 1)
    with world.context.temporarily(running=running), torch.no_grad():
        output, losses = _losses_of(running, program, inputs)
    return output, len(losses)


def _losses_of(running: RunningStep, program: Program, inputs: Any) -> tuple[Any, list[torch.Tensor]]:
    losses: list[torch.Tensor] = []
    running.losses = losses
    try:
        return program(inputs), losses
    finally:
        running.losses = None


def _everywhere(world: World) -> Placement:
    return Placement.of(world.device.type, list(range(world.world_size)))
