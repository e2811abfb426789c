"""The measured timeline of a scheduled step, in the same type as a simulated one."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from workbench.core.metrics import ActionSpan
from workbench.pipeline.schedules import KINDS, Action
from workbench.pipeline.simulate import Span, Timeline
from workbench.tensors.world import World, current
from workbench.training.recorded_actions import RecordedAction, read_actions
from workbench.training.strategies.state import state_of

_FIELDS = 6


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
    spans = read_actions(world.traffic, actions, 0.0)
    rows = [[span.stage, KINDS.index(span.kind), span.micro_batch, *_times(span)] for span in spans]
    own = torch.tensor(rows, dtype=torch.float64).reshape(-1, _FIELDS)
    counts = [int(n) for n in world.transport.all_gather(torch.tensor([len(own)], device=world.device), "timeline()")]
    offset = clock_offset(world)
    padded = torch.zeros(max(counts), _FIELDS, dtype=torch.float64)
    padded[: len(own)] = own
    gathered = [part.cpu() for part in world.transport.all_gather(padded.to(world.device), "timeline()")]
    offsets = world.transport.all_gather(torch.tensor([offset], dtype=torch.float64, device=world.device), "timeline()")
    found = [
        [_span(rank, row, float(offsets[rank])) for row in part[:count].tolist()]
        for rank, (part, count) in enumerate(zip(gathered, counts, strict=True))
    ]
    start = min((span.start_s for spans in found for span in spans), default=0.0)
    return Timeline(tuple(tuple(_moved(span, -start) for span in spans) for spans in found))


def _times(span: ActionSpan) -> tuple[float, float, float]:
    return span.start_s, span.stop_s, span.boxing_s


def clock_offset(world: World) -> float:
    """What this rank's clock shows at a moment that is the same on all ranks; zero where they read one clock.

    All ranks call it.
    """
    if world.transport.scope != "network":
        return 0.0
    world.transport.all_gather(torch.zeros(1, device=world.device), "timeline()")
    return time.perf_counter()


def _span(rank: int, row: list[float], offset: float) -> Span:
    action = Action(int(row[0]), KINDS[int(row[1])], int(row[2]))
    return Span(rank, action, row[3] - offset, row[4] - offset, row[5])


def _moved(span: Span, by_s: float) -> Span:
    return Span(span.rank, span.action, span.start_s + by_s, span.stop_s + by_s, span.waited_s)
