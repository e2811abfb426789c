"""The last state of the live view as one SVG picture, which a saved notebook shows without kernel and scripts.

Colours are style-sheet variables (``theme.style_sheet``), so it reads in both themes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from math import log10

import numpy as np

from workbench.core.metrics import MEMORY_KINDS
from workbench.theme import UI_FONT
from workbench.ui.decimate import decimate
from workbench.ui.live.figure_layout import (
    BOTTOM,
    MEASURED,
    PANES_HEIGHT,
    PLOT_HEIGHT,
    ROW,
    SIMULATED,
    TIMELINE_LEFT,
    TITLES,
    TOP,
    WIDE,
    limit_text,
    shown_ranks,
    steps_shown,
)
from workbench.ui.live.history import History
from workbench.ui.live.timeline_bars import KINDS, Bars, TimelineBars, timeline_bars
from workbench.ui.number_text import percent, three_digits
from workbench.ui.pictures.panel_svg import Axis
from workbench.ui.pictures.svg import Box, line, rect, text
from workbench.units import format_bytes, format_seconds

_MOST_POINTS = 400
_WIDTH = WIDE.width
_PANES = [WIDE.pane(index)[:2] for index in range(len(TITLES))]
_TITLES_LEFT = [WIDE.corner(index)[0] + 12 for index in range(len(TITLES))]
_INK, _MUTED, _LINE, _ERROR = (f"var(--wb-{name})" for name in ("ink", "muted", "line", "error"))
_HATCH, _ON_BAR = "url(#wb-hatch)", "#10181f"
Points = tuple[np.ndarray, np.ndarray]


def live_picture(
    history: History,
    one_device: Sequence[float] = (),
    limit_bytes: float | None = None,
    machine: str = "",
    log_loss: bool = False,
) -> str:
    """Throughput, loss (on a logarithmic scale if wanted), memory (and a rank's limit on ``machine``), time split, and
    the timeline of the last recorded step, with the numbers in words.
    """
    ranks = shown_ranks(history.num_ranks)
    bars = timeline_bars(history.timeline) if history.timeline else None
    full = WIDE.height(len(ranks)) if bars is not None else PANES_HEIGHT
    rate, loss, peaks = history.latest_rate, history.latest_loss, history.peak_bytes
    details = (
        f"{three_digits(rate)} samples/s" if rate is not None else "",
        f"{loss:.4g} after {history.last_step} steps" if loss is not None else "",
        f"tick: peak, {format_bytes(max(peaks))}" if peaks else "",
        f"{format_bytes(history.boxed_bytes)} boxed per step",
    )
    legends = (
        "median of 1 s, pale: each step",
        "pale: 1 device" if one_device else "",
        "param., grad., optim., activ., boxing, other",
        "compute, boxing, waiting (hatched)",
    )
    parts = [_title(left, 24, title, detail) for left, title, detail in zip(_TITLES_LEFT, TITLES, details, strict=True)]
    parts += [_words(left, PANES_HEIGHT - 16, words) for left, words in zip(_TITLES_LEFT, legends, strict=True)]
    behind = np.arange(1, len(one_device) + 1), np.asarray(one_device, dtype=float)
    parts += _curve(0, history, history.median_rate.points, (history.rate.points, 1))
    parts += _curve(1, history, history.loss.points, (behind, 6), log_loss)
    parts += _memory(history, ranks, limit_bytes, machine)
    parts += _split(history, ranks)
    if bars is not None:
        parts += _timeline(bars, ranks)
    hatch = (
        '<defs><pattern id="wb-hatch" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="2" height="5" style="fill:var(--wb-idle)"/></pattern></defs>'
    )
    description = "Last state of the run: " + "; ".join(filter(None, details))
    size = f'viewBox="0 0 {_WIDTH} {full}" width="{_WIDTH}" height="{full}" style="max-width:100%;height:auto"'
    named = f'role="img" aria-label="{escape(description, quote=True)}"'
    font = f'font-family="{escape(UI_FONT)}" font-size="12"'
    return f'<svg class="wb-live-picture" {size} {named} {font}>{hatch}{"".join(parts)}</svg>'


def _curve(
    pane: int, history: History, points: Points, behind: tuple[Points, int], is_log: bool = False
) -> Iterator[str]:
    """A curve with a pale, wider curve behind it."""
    left, right = _PANES[pane]
    bottom = PANES_HEIGHT - BOTTOM
    across = Axis(0, steps_shown(history.last_step, history.num_steps), left, right)
    drawn, pale = (_shown(values, across.high, is_log) for values in (points, behind[0]))
    up = Axis(*_ends([*drawn[1].tolist(), *pale[1].tolist()], is_log), bottom, TOP)
    yield from (line((left, y), (right, y), _LINE) for y in (TOP, bottom))
    for end, y in ((up.high, TOP), (up.low, bottom)):
        yield _words(left - 6, y + 4, _short(10**end if is_log else end), "end")
    yield _words(left, bottom + 16, "0", "middle")
    yield _words(right, bottom + 16, f"step {across.high}", "end")
    for values, colour, width in ((pale, "var(--wb-idle)", behind[1]), (drawn, _INK, 1.5)):
        places = [(f"{across.at(x):.1f}", f"{up.at(y):.1f}") for x, y in zip(*values, strict=True)]
        if len(places) == 1:
            ((at_x, at_y),) = places
            yield f'<circle cx="{at_x}" cy="{at_y}" r="{1 + width}" fill="{colour}"/>'
        elif places:
            look = f'fill="none" stroke="{colour}" stroke-width="{width}"'
            yield f'<polyline points="{" ".join(map(",".join, places))}" {look}/>'
    for change in history.changes:
        at = across.at(change.step)
        yield line((at, TOP), (at, bottom), _INK)
    for change in history.changes[-1:]:
        at = across.at(change.step)
        yield text(at - 5, bottom - 8, change.before, anchor="end", fill=_INK)
        yield text(at + 5, bottom - 8, change.after, anchor="start", fill=_INK)


def _shown(points: Points, steps: float, is_log: bool) -> Points:
    """The points up to a step, or their logarithms, without losses that have none or are no numbers."""
    x, y = points[0], np.asarray(points[1], dtype=float)
    kept = (x <= steps) & np.isfinite(y) & ((y > 0) | (not is_log))
    return decimate(x[kept], np.log10(y[kept]) if is_log else y[kept], _MOST_POINTS)


def _ends(values: Sequence[float], is_log: bool) -> tuple[float, float]:
    """The ends of an axis: from 0, or from below the smallest value if that is negative; of logarithms, from the
    smallest.
    """
    if is_log:
        low, top = min(values, default=-1.0), max(values, default=0.0)
        return (low, top) if low < top else (low - log10(2), top + log10(2))
    low, top = min([0.0, *values]), max([0.0, *values])
    return low - 0.05 * (top - low) if low < 0 else low, top if low < top else 1.0


def _short(value: float) -> str:
    return "0" if value == 0 else three_digits(value) if abs(value) < 10_000 else f"{value / 1000:.3g}k"


def _rows(ranks: Sequence[int]) -> list[tuple[int, float, float]]:
    """Rank, top and height of every bar of a pane."""
    step = PLOT_HEIGHT / len(ranks)
    size = min(MEASURED, 0.7 * step)
    return [(rank, TOP + step * index + (step - size) / 2, size) for index, rank in enumerate(ranks)]


def _stack(pane: int, rank: int, y: float, size: float, shares: Iterable[tuple[float, str]]) -> Iterator[str]:
    """A rank's name, and shares of the pane's width beside one another, each in its colour."""
    left, right = _PANES[pane]
    yield text(left - 6, y + size / 2 + 4, f"rank {rank}", anchor="end", fill=_INK)
    x = float(left)
    for share, fill in shares:
        yield _bar(x, y, (right - left) * share, size, fill)
        x += (right - left) * share


def _memory(history: History, ranks: Sequence[int], limit_bytes: float | None, machine: str) -> Iterator[str]:
    left, right = _PANES[2]
    largest = max([*history.peak_bytes, 1]) * 1.5
    if limit_bytes:
        words, at = limit_text(limit_bytes, machine), left + (right - left) * limit_bytes / largest
        if at <= right:
            yield line((at, TOP), (at, PANES_HEIGHT - BOTTOM), _ERROR)
        else:
            words, at = f"{words} \u2192", right
        yield text(at, TOP - 4, words, anchor="end", fill=_ERROR)
    for rank, y, size in _rows(ranks):
        peak, kinds = history.peak_bytes[rank], history.memory_by_kind[rank]
        known = {kind: kinds.get(kind, 0) for kind in MEMORY_KINDS}
        shares = [(number / largest, f"var(--wb-memory-{kind})") for kind, number in known.items()]
        yield from _stack(2, rank, y, size, [*shares, ((peak - sum(known.values())) / largest, _HATCH)])
        at = left + (right - left) * peak / largest
        yield line((at, y - 2), (at, y + size + 2), _INK)
        yield text(at + 6, y + size / 2 + 4, format_bytes(peak), anchor="start", fill=_INK)


def _split(history: History, ranks: Sequence[int]) -> Iterator[str]:
    split = history.split
    for rank, y, size in _rows(ranks) if split else []:
        found = split[rank]
        kinds = (found.compute, "var(--wb-compute)"), (found.boxing, "var(--wb-boxing)"), (found.waiting, _HATCH)
        yield from _stack(3, rank, y, size, kinds)
        yield text(_PANES[3][0] + 6, y + size / 2 + 4, percent(found.compute), anchor="start", fill=_ON_BAR)


def _timeline(bars: TimelineBars, ranks: Sequence[int]) -> Iterator[str]:
    longest = max(bars.measured_s, bars.simulated_s or 0.0) or 1.0
    right = WIDE.timeline_right
    scale = (right - TIMELINE_LEFT) / longest
    yield line((0, PANES_HEIGHT), (_WIDTH, PANES_HEIGHT), _LINE)
    yield _title(12, PANES_HEIGHT + 24, f"Timeline, step {bars.step + 1}", bars.summary())
    for row, rank in enumerate(ranks):
        y = WIDE.timeline_top + ROW * row + 2
        yield text(12, y + 13, f"rank {rank}", anchor="start", fill=_INK)
        yield _words(12, y + 28, "simulated")
        yield _bar(TIMELINE_LEFT, y, bars.measured_s * scale, MEASURED, _HATCH)
    for kind in KINDS:
        fill = f"var(--wb-{kind.replace('_', '-')})"
        yield from _timeline_bars(bars.measured[kind], fill, scale, 2, MEASURED, 1.0)
        yield from _timeline_bars(bars.simulated[kind], fill, scale, 2 + MEASURED + 4, SIMULATED, 0.6)
    bottom = WIDE.timeline_top + ROW * len(ranks)
    yield line((TIMELINE_LEFT, bottom), (right, bottom), _LINE)
    yield _words(TIMELINE_LEFT, bottom + 16, "0", "middle")
    yield _words(right, bottom + 16, format_seconds(longest), "end")


def _timeline_bars(bars: Bars, fill: str, scale: float, offset: float, size: float, opacity: float) -> Iterator[str]:
    for row, start_s, length_s, label in zip(bars.rows, bars.start_s, bars.length_s, bars.labels, strict=True):
        x, y, width = TIMELINE_LEFT + start_s * scale, WIDE.timeline_top + ROW * row + offset, length_s * scale
        yield _bar(x, y, width, size, fill, opacity)
        if label and width >= 16:
            yield text(x + width / 2, y + 13, label, fill=_ON_BAR)


def _title(x: float, y: float, title: str, detail: str) -> str:
    quiet = f'<tspan font-weight="400" font-size="12" style="fill:var(--wb-muted)"> {escape(detail)}</tspan>'
    look = 'font-weight="600" font-size="13" style="fill:var(--wb-ink)"'
    return f'<text x="{x}" y="{y}" {look}>{escape(title)} {quiet}</text>'


def _words(x: float, y: float, content: str, anchor: str = "start") -> str:
    return text(x, y, content, anchor=anchor, fill=_MUTED)


def _bar(x: float, y: float, width: float, size: float, fill: str, opacity: float = 1.0) -> str:
    return rect(Box(x, y, width, size), fill, attributes={"opacity": f"{opacity:g}"}) if width > 0 else ""
