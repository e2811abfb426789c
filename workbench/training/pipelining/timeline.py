"""The measured timeline of a scheduled step, in the same type as a simulated one."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from workbench.core.metrics import ActionSpan
from workbench.pipeline.schedules import Action
from workbench.pipeline.simulate import Span, Timeline
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World, current
from workbench.training.recorded_actions import RecordedAction, read_actions
from workbench.training.strategies.state import state_of


def timeline(module: nn.Module) -> Timeline:
    """When each rank ran each action of the module's last ``forward_backward`` or ``evaluate``. All ranks call it.

    Spans are by rank of the world, in seconds from the start of the step. ``waited_s`` of a span is the time in
    exchanges, waits and copies. A barrier aligns the clocks of several hosts, to some tenths of a millisecond. Times
    on a GPU are the GPU's: when it did the work, not when the host asked for it.

    Raises:
        StrategyError: the module is not parallelized.

    After a step under ``"0: data; 1: data@1 | 2x1x1 mb=4 1f1b"``, ``wb.debug.timeline(model).bubble`` is the part of
    the time, 0 to 1, in which ranks wait.
    """
    return timeline_of(state_of(module).spans)


def timeline_of(actions: Sequence[RecordedAction]) -> Timeline:
    """The timeline of all ranks from what each has measured of itself. All ranks call it; see ``timeline``."""
    world = current()
    offset = clock_offset(world)
    gathered = all_gather_object((offset, read_actions(world.traffic, actions, 0.0)), world, "timeline()")
    start = min((span.start_s - offset for offset, spans in gathered for span in spans), default=0.0)
    return Timeline(
        tuple(
            tuple(_span(rank, span, offset + start) for span in spans) for rank, (offset, spans) in enumerate(gathered)
        )
    )


def clock_offset(world: World) -> float:
    """What this rank's clock shows at a moment that is the same on all ranks; zero where they read one clock.

    All ranks call it.
    """
    if world.transport.scope != "network":
        return 0.0
    world.transport.all_gather(torch.zeros(1, device=world.device), "timeline()")
    return time.perf_counter()


def _span(rank: int, span: ActionSpan, start_s: float) -> Span:
    action = Action(span.stage, span.kind, span.micro_batch)
    return Span(rank, action, span.start_s - start_s, span.stop_s - start_s, span.boxing_s)
