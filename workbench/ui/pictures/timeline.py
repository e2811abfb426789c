"""Draws a pipeline's timeline: when each rank works on which micro-batch, and when it waits.

A pure function: timeline -> SVG. Measured and simulated timelines look the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from workbench.core.metrics import ACTION_NAMES
from workbench.pipeline.simulate import Timeline
from workbench.theme import Palette, palette
from workbench.ui.pictures.svg import Box, Picture, document, legend, line, rect, text, text_width
from workbench.units import format_seconds

MAX_RANKS = 64
_LEFT, _TOP, _WIDTH, _ROW, _BAR = 84.0, 58.0, 640.0, 34.0, 24.0


def draw_timeline(timeline: Timeline, *, theme: str = "light") -> Picture:
    """A picture of a pipeline's step. Each rank is a row, and each action is a bar with the number of its micro-batch.

    Args:
        timeline: the result of ``wb.debug.timeline(model)`` or ``simulate``, with at most 64 ranks.
        theme: ``"light"`` or ``"dark"``.

    Raises:
        ValueError: something else than a timeline, or one that has no actions or more than 64 ranks.

    >>> from workbench.pipeline.schedules import make_table
    >>> from workbench.pipeline.simulate import simulate
    >>> wb.draw.timeline(simulate(make_table("1f1b", 2, 4), 2, lambda action: 1.0))
    2 ranks, 16 actions in 10.0 s, ranks wait 20% of the time
    """
    if not hasattr(timeline, "spans"):
        raise ValueError(
            f"wb.draw.timeline: a {type(timeline).__name__} is no timeline. Give that of a module's last step: "
            "wb.draw.timeline(wb.debug.timeline(model))."
        )
    rows = [spans for spans in timeline.spans if spans]
    if not rows or len(rows) > MAX_RANKS:
        raise ValueError(
            f"wb.draw.timeline: a timeline of {len(rows)} ranks with actions; a picture has room for 1 to "
            f"{MAX_RANKS}. Give the timeline of a step that ran, or of fewer stages."
        )
    ranks, num_actions = f"{len(rows)} rank{'s' * (len(rows) > 1)}", sum(map(len, rows))
    description = (
        f"{ranks}, {num_actions} actions in {format_seconds(timeline.makespan_s)}, "
        f"ranks wait {timeline.bubble:.0%} of the time"
    )
    return Picture(timeline_picture(rows, description, palette(theme)), description)


def timeline_picture(rows: Any, description: str, colours: Palette) -> str:
    """The rows of spans as SVG text."""
    start = min(span.start_s for spans in rows for span in spans)
    stop = max(span.stop_s for spans in rows for span in spans)
    scale = _WIDTH / (stop - start) if stop > start else 0.0
    kinds = sorted({span.action.kind for spans in rows for span in spans}, key="FBIW".find)
    bottom = _TOP + len(rows) * _ROW
    parts = [text(16, 28, description, anchor="start", bold=True)]
    for index, spans in enumerate(rows):
        top = _TOP + index * _ROW
        parts.append(text(16, top + _BAR / 2 + 4, f"rank {spans[0].rank}", anchor="start", bold=True))
        parts.append(rect(Box(_LEFT, top, _WIDTH, _BAR), colours.sunk, colours.line))
        for span in spans:
            box = Box(_LEFT + (span.start_s - start) * scale, top, max(1.0, (span.stop_s - span.start_s) * scale), _BAR)
            parts += _bar(span, box, scale, colours)
    parts += [line((_LEFT, bottom + 2), (_LEFT + _WIDTH, bottom + 2), colours.strong_line)]
    parts += [text(_LEFT, bottom + 18, "0", fill=colours.muted)]
    parts += [text(_LEFT + _WIDTH, bottom + 18, format_seconds(stop - start), anchor="end", fill=colours.muted)]
    fills = {f"{kind}: {ACTION_NAMES.get(kind, kind)}": _colour(kind, colours) for kind in kinds}
    parts += legend(fills, _LEFT + 30, bottom + 8, colours)
    return document((_LEFT + _WIDTH + 24, bottom + 34), description, colours, parts)


def _bar(span: Any, box: Box, scale: float, colours: Palette) -> Iterator[str]:
    """A bar of one action. The part in which the rank waited is striped."""
    kind = span.action.kind
    yield rect(box, _colour(kind, colours), colours.background, {"class": "action"})
    waited = min(box.width, span.waited_s * scale)
    if waited >= 1:
        place = Box(box.x, box.y, waited, box.height)
        yield rect(place, colours.idle, attributes={"class": "waited"})
        yield rect(place, f"url(#term-{colours.name})")
    label = f"{kind}{span.action.micro_batch}"
    left = box.width - waited
    if left >= text_width(label, 11) + 2:
        ink = colours.ink if kind == "F" and colours.name == "light" else colours.background
        yield text(box.x + waited + left / 2, box.y + box.height / 2 + 4, label, size=11, fill=ink)


def _colour(kind: str, colours: Palette) -> str:
    return {"F": colours.forward, "W": colours.optimizer_step}.get(kind, colours.backward)
