"""A timeline as rows of bars in pixels. Neighbours too thin to distinguish are one bar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.core.strategy import ResolvedStrategy
from workbench.pipeline.schedules import Action
from workbench.pipeline.simulate import Span, Timeline
from workbench.units import format_ranks, format_seconds

_ROOM_FOR_A_NUMBER = 14.0
_THINNEST = 1.0
_MAX_BARS = 2000


@dataclass(frozen=True, slots=True)
class ActionBar:
    """One action, or several of a kind that lie within a pixel: place in pixels, number of its micro-batch, tip.

    ``boxing`` pixels of its width are exchanges; they are drawn at its end.
    """

    kind: str
    left: float
    width: float
    text: str
    tip: str
    boxing: float = 0.0


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """The row of one slice of the pipeline axis."""

    label: str
    ranks: tuple[int, ...]
    bars: tuple[ActionBar, ...]


def timeline_rows(
    timeline: Timeline, resolved: ResolvedStrategy, width: float, shares: Sequence[tuple[float, float]] = ()
) -> list[TimelineRow]:
    """A row for every slice of the pipeline axis. The whole step is ``width`` pixels wide.

    Args:
        shares: by stage, the shares of a forward and of a backward that are exchanges. Without it none are drawn.
    """
    starts = [span.start_s for spans in timeline.spans for span in spans]
    start = min(starts, default=0.0)
    scale = width / timeline.makespan_s if timeline.makespan_s else 0.0
    thinnest = 0.0 if len(starts) <= _MAX_BARS else _THINNEST
    rows = []
    for number, spans in enumerate(timeline.spans):
        ranks = tuple(resolved.stage_ranks(number))
        label = f"rank {ranks[0]}" if len(ranks) == 1 else f"stage {number}"
        rows.append(TimelineRow(label, ranks, tuple(_bars(spans, start, scale, thinnest, label, ranks, shares))))
    return rows


def _bars(
    spans: Sequence[Span],
    start: float,
    scale: float,
    thinnest: float,
    label: str,
    ranks: Sequence[int],
    shares: Sequence[tuple[float, float]],
) -> list[ActionBar]:
    found: list[ActionBar] = []
    for span in spans:
        left, width = (span.start_s - start) * scale, (span.stop_s - span.start_s) * scale
        last = found[-1] if found else None
        if last is not None and last.width < thinnest and left - (last.left + last.width) < thinnest:
            kind = last.kind if last.kind == span.action.kind else "B"
            found[-1] = ActionBar(kind, last.left, left + width - last.left, "", f"{label}: several actions")
            continue
        share = _share(span.action, shares)
        text = str(span.action.micro_batch) if width * (1 - share) >= _ROOM_FOR_A_NUMBER else ""
        seconds = span.stop_s - span.start_s
        tip = (
            f"{label} (ranks {format_ranks(list(ranks))}): {span.action}, {format_seconds(seconds)}"
            f"\nfrom {format_seconds(span.start_s - start)} to {format_seconds(span.stop_s - start)}"
        )
        tip += f"\nboxing {format_seconds(share * seconds)} of it" if share else ""
        found.append(ActionBar(span.action.kind, left, width, text, tip, width * share))
    return found


def _share(action: Action, shares: Sequence[tuple[float, float]]) -> float:
    """The share of an action that is exchanges. A backward has them in its first half, for which other ranks wait."""
    if not shares or action.kind == "W":
        return 0.0
    forward, backward = shares[action.stage]
    return forward if action.kind == "F" else backward
