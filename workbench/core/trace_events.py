"""Events in the trace event format, which Perfetto and Chrome open: a process per rank, microseconds."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from workbench.core.metrics import ACTION_NAMES, ActionSpan, StepSpans

Event = dict[str, Any]


def metadata(kind: str, rank: int, track: int, **values: Any) -> Event:
    """An event that names a process or a thread, or says its place."""
    return {"name": kind, "ph": "M", "ts": 0, "pid": rank, "tid": track, "args": values}


def rank_name(rank: int, host: str = "") -> Iterator[Event]:
    """The events that name the process of a rank, and sort it."""
    yield metadata("process_name", rank, 0, name=f"rank {rank}" + (f" on {host}" if host else ""))
    yield metadata("process_sort_index", rank, 0, sort_index=rank)


def track_name(rank: int, track: int, name: str) -> Iterator[Event]:
    """The events that name a track of a rank. Tracks are in the order of their numbers."""
    yield metadata("thread_name", rank, track, name=name)
    yield metadata("thread_sort_index", rank, track, sort_index=track)


def span(name: str, category: str, rank: int, track: int, start_s: float, stop_s: float, **values: Any) -> Event:
    """An event with a length."""
    times = {"ts": start_s * 1e6, "dur": (stop_s - start_s) * 1e6}
    return {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": track, **times, "args": values}


def action_event(action: ActionSpan, step: int, rank: int, track: int, start_s: float = 0.0) -> Event:
    """An action of a step, on a clock that is ``start_s`` later."""
    return span(
        "optimizer" if action.kind == "O" else f"{action.kind}{action.micro_batch}",
        ACTION_NAMES.get(action.kind, action.kind),
        rank, track, action.start_s - start_s, action.stop_s - start_s,
        step=step, stage=action.stage, boxing_us=action.boxing_s * 1e6,
        exchanges=action.num_exchanges, sent_bytes=action.sent_bytes,
    )  # fmt: skip


def chrome_trace(steps: Iterable[StepSpans]) -> dict[str, Any]:
    """Recorded steps as a trace, with an event per action; microseconds from the first one.

    >>> chrome_trace([])["traceEvents"]
    []
    """
    recorded = list(steps)
    start_s = min((action.start_s for step in recorded for action in step.spans), default=0.0)
    names = [metadata("process_name", rank, 0, name=f"rank {rank}") for rank in sorted({s.rank for s in recorded})]
    events = [action_event(a, step.step, step.rank, 0, start_s) for step in recorded for a in step.spans]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def lanes(intervals: Sequence[tuple[float, float]]) -> list[int]:
    """A lane for each interval, in ascending order of starts, so that no two of one lane overlap.

    >>> lanes([(0, 3), (1, 2), (2.5, 4)])
    [0, 1, 1]
    """
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    found = []
    for start, stop in intervals:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (stop, lane))
        found.append(lane)
    return found


def encoded(events: Iterable[Event]) -> bytes:
    """Events as a part of a file, which ``writers.profile_files`` joins with others."""
    return ",\n".join(json.dumps(event, separators=(",", ":")) for event in events).encode()
