"""The last state of the live view as one SVG picture, which a saved notebook shows without kernel and scripts.

Colours are style-sheet variables (``theme.style_sheet``), so it reads in both themes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

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
from workbench.units import format_bytes, format_seconds

_MOST_POINTS = 400
_WIDTH = WIDE.width
_PANES = [WIDE.pane(index)[:2] for index in range(len(TITLES))]
_TITLES_LEFT = [WIDE.corner(index)[0] + 12 for index in range(len(TITLES))]


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
    parts = [_title(left, 24, title, detail) for left, title, detail in zip(_TITLES_LEFT, TITLES, details, strict=True)]
    behind = np.arange(1, len(one_device) + 1), np.asarray(one_device, dtype=float)
    parts += _curve(0, history, history.median_rate.points, (history.rate.points, 1), "median of 1 s, pale: each step")
    parts += _curve(1, history, history.loss.points, (behind, 6), "pale: 1 device" if one_device else "", log_loss)
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
    named = f'role="img" aria-label="{escape(description, quote=True)}" font-family="{escape(UI_FONT)}"'
    return f'<svg class="wb-live-picture" {size} {named}>{hatch}{"".join(parts)}</svg>'


Points = tuple[np.ndarray, np.ndarray]


def _curve(
    pane: int, history: History, points: Points, behind: tuple[Points, int], legend: str, is_log: bool = False
) -> list[str]:
    """A curve with a pale, wider curve behind it."""
    steps = steps_shown(history.last_step, history.num_steps)
    drawn, pale = (_shown(values, steps) for values in (points, behind[0]))
    low, top = _ends([*drawn[1].tolist(), *pale[1].tolist()], is_log)
    left, right = _PANES[pane]
    bottom = PANES_HEIGHT - BOTTOM

    def path(values: Points, colour: str, width: float) -> str:
        places = [
            (f"{left + (right - left) * a / steps:.1f}", f"{bottom - PLOT_HEIGHT * _share(b, low, top, is_log):.1f}")
            for a, b in zip(*values, strict=True)
            if b > 0 or not is_log
        ]
        if len(places) == 1:
            ((x, y),) = places
            return f'<circle cx="{x}" cy="{y}" r="{1 + width}" style="fill:var({colour})"/>'
        points = " ".join(map(",".join, places))
        style = f"fill:none;stroke:var({colour});stroke-width:{width}"
        return f'<polyline points="{points}" style="{style}"/>' if places else ""

    parts = [
        _rule(left, TOP, right, TOP),
        _rule(left, bottom, right, bottom),
        _text(left - 6, TOP + 4, _short(top) if top else "0", "end"),
    ]
    parts += [_text(left - 6, bottom + 4, _short(low) if low else "0", "end"), _text(left, bottom + 16, "0", "middle")]
    parts.append(_text(right, bottom + 16, f"step {steps}", "end"))
    parts.append(path(pale, "--wb-idle", behind[1]))
    parts.append(path(drawn, "--wb-ink", 1.5))
    for change in history.changes:
        at = left + (right - left) * change.step / steps
        parts.append(_line(at, TOP, at, bottom, "--wb-ink"))
        if change is history.changes[-1]:
            parts += [
                _text(at - 5, bottom - 8, change.before, "end", "--wb-ink"),
                _text(at + 5, bottom - 8, change.after, "start", "--wb-ink"),
            ]
    return [*parts, _text(_TITLES_LEFT[pane], PANES_HEIGHT - 16, legend, "start")]


def _shown(points: Points, steps: int) -> Points:
    """The points up to a step, without losses that are no numbers."""
    x, y = points
    kept = (x <= steps) & np.isfinite(np.asarray(y, dtype=float))
    return decimate(x[kept], y[kept], _MOST_POINTS)


def _ends(values: Sequence[float], is_log: bool) -> tuple[float, float]:
    """The ends of an axis: from 0, from below the smallest value if that is negative, or from the smallest value that
    has a logarithm.
    """
    if is_log:
        known = [value for value in values if value > 0]
        low, top = min(known, default=0.1), max(known, default=1.0)
        return (low, top) if low < top else (low / 2, top * 2)
    low, top = min([0.0, *values]), max([0.0, *values])
    return low - 0.05 * (top - low) if low < 0 else low, top if low < top else 1.0


def _share(value: float, low: float, top: float, is_log: bool) -> float:
    """The place of a value on an axis, 0 to 1."""
    return math.log(value / low) / math.log(top / low) if is_log else (value - low) / (top - low)


def _short(value: float) -> str:
    return three_digits(value) if abs(value) < 10_000 else f"{value / 1000:.3g}k"


def _rows(ranks: Sequence[int]) -> list[tuple[int, float, float]]:
    """Rank, top and height of every bar of a pane."""
    step = PLOT_HEIGHT / len(ranks)
    size = min(MEASURED, 0.7 * step)
    return [(rank, TOP + step * index + (step - size) / 2, size) for index, rank in enumerate(ranks)]


def _memory(history: History, ranks: Sequence[int], limit_bytes: float | None, machine: str) -> list[str]:
    left, right = _PANES[2]
    largest = max([*history.peak_bytes, 1]) * 1.5
    parts = []
    if limit_bytes:
        words, at = limit_text(limit_bytes, machine), left + (right - left) * limit_bytes / largest
        if at <= right:
            parts.append(_line(at, TOP, at, PANES_HEIGHT - BOTTOM, "--wb-error"))
        else:
            words, at = f"{words} \u2192", right
        parts.append(_text(at, TOP - 4, words, "end", "--wb-error"))
    for rank, y, size in _rows(ranks):
        parts.append(_text(left - 6, y + size / 2 + 4, f"rank {rank}", "end", "--wb-ink"))
        x = float(left)
        for kind in MEMORY_KINDS:
            width = (right - left) * history.memory_by_kind[rank].get(kind, 0) / largest
            parts.append(_rect(x, y, width, size, f"--wb-memory-{kind}"))
            x += width
        at = left + (right - left) * history.peak_bytes[rank] / largest
        parts.append(_rect(x, y, at - x, size, ""))
        parts += [
            _line(at, y - 2, at, y + size + 2, "--wb-ink"),
            _text(at + 6, y + size / 2 + 4, format_bytes(history.peak_bytes[rank]), "start", "--wb-ink"),
        ]
    return [
        *parts,
        _text(_TITLES_LEFT[2], PANES_HEIGHT - 16, "param., grad., optim., activ., boxing, other", "start"),
    ]


def _split(history: History, ranks: Sequence[int]) -> list[str]:
    left, right = _PANES[3]
    split = history.split
    parts = []
    for rank, y, size in _rows(ranks) if split else []:
        parts.append(_text(left - 6, y + size / 2 + 4, f"rank {rank}", "end", "--wb-ink"))
        x = float(left)
        shares = split[rank]
        for share, fill in ((shares.compute, "--wb-compute"), (shares.boxing, "--wb-boxing"), (shares.waiting, "")):
            width = (right - left) * share
            parts.append(_rect(x, y, width, size, fill))
            x += width
        place = f'x="{left + 6}" y="{y + size / 2 + 4:.1f}" font-size="12"'
        parts.append(f'<text {place} style="fill:#10181f">{percent(shares.compute)}</text>')
    return [*parts, _text(_TITLES_LEFT[3], PANES_HEIGHT - 16, "compute, boxing, waiting (hatched)", "start")]


def _timeline(bars: TimelineBars, ranks: Sequence[int]) -> list[str]:
    longest = max(bars.measured_s, bars.simulated_s or 0.0) or 1.0
    scale = (WIDE.timeline_right - TIMELINE_LEFT) / longest
    parts = [
        _rule(0, PANES_HEIGHT, _WIDTH, PANES_HEIGHT),
        _title(12, PANES_HEIGHT + 24, f"Timeline, step {bars.step + 1}", bars.summary()),
    ]
    for row, rank in enumerate(ranks):
        y = WIDE.timeline_top + ROW * row + 2
        parts += [_text(12, y + 13, f"rank {rank}", "start", "--wb-ink"), _text(12, y + 28, "simulated", "start")]
        parts.append(_rect(TIMELINE_LEFT, y, bars.measured_s * scale, MEASURED, ""))
    for kind in KINDS:
        fill = f"--wb-{kind.replace('_', '-')}"
        parts += _timeline_bars(bars.measured[kind], fill, scale, 2, MEASURED, 1.0)
        parts += _timeline_bars(bars.simulated[kind], fill, scale, 2 + MEASURED + 4, SIMULATED, 0.6)
    bottom = WIDE.timeline_top + ROW * len(ranks)
    parts += [
        _rule(TIMELINE_LEFT, bottom, WIDE.timeline_right, bottom),
        _text(TIMELINE_LEFT, bottom + 16, "0", "middle"),
    ]
    return [*parts, _text(WIDE.timeline_right, bottom + 16, format_seconds(longest), "end")]


def _timeline_bars(bars: Bars, fill: str, scale: float, offset: float, size: float, opacity: float) -> list[str]:
    parts = []
    for row, start_s, length_s, label in zip(bars.rows, bars.start_s, bars.length_s, bars.labels, strict=True):
        x, y, width = TIMELINE_LEFT + start_s * scale, WIDE.timeline_top + ROW * row + offset, length_s * scale
        parts.append(_rect(x, y, width, size, fill, opacity))
        if label and width >= 16:
            place = f'x="{x + width / 2:.1f}" y="{y + 13:.1f}" text-anchor="middle" font-size="12"'
            parts.append(f'<text {place} style="fill:#10181f">{label}</text>')
    return parts


def _title(x: float, y: float, title: str, detail: str) -> str:
    quiet = f'<tspan font-weight="400" font-size="12" style="fill:var(--wb-muted)"> {escape(detail)}</tspan>'
    look = 'font-weight="600" font-size="13" style="fill:var(--wb-ink)"'
    return f'<text x="{x}" y="{y}" {look}>{escape(title)} {quiet}</text>'


def _text(x: float, y: float, content: str, anchor: str, fill: str = "--wb-muted") -> str:
    look = f'font-size="12" text-anchor="{anchor}" style="fill:var({fill})"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(content)}</text>'


def _rect(x: float, y: float, width: float, size: float, fill: str, opacity: float = 1.0) -> str:
    if width <= 0:
        return ""
    look = f"fill:{f'var({fill})' if fill else 'url(#wb-hatch)'};opacity:{opacity:g}"
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{size:.1f}" style="{look}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str) -> str:
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" style="fill:none;stroke:var({stroke})"/>'


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return _line(x1, y1, x2, y2, "--wb-line")
