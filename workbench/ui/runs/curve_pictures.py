"""Losses and throughput of several runs by step, laid over one another, with one device as the reference.

Pure functions, rows and records -> HTML with SVG in the page's colours. A strategy has one colour and one mark; its
runs with other seeds are further lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from workbench.core.metrics import RunRecord
from workbench.theme import LIGHT
from workbench.ui.assets import element
from workbench.ui.decimate import decimate
from workbench.ui.number_text import short_number
from workbench.ui.pictures import panel_svg
from workbench.ui.runs.table_rows import Row
from workbench.ui.short_names import short_names
from workbench.units import counted

_WIDTH, _HEIGHT = 346.0, 236.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 40.0, 338.0, 24.0, 200.0
_MOST_STRATEGIES = 8
_MOST_POINTS, _NUM_MARKS, _NEIGHBOURS = 150, 5, 5
_MARKS = (
    "M-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0 -6.4 0z",
    "M-2.8 -2.8h5.6v5.6h-5.6z",
    "M0 -4.2L4.2 0L0 4.2L-4.2 0z",
    "M0 -3.8L3.7 2.8H-3.7z",
    "M0 3.8L3.7 -2.8H-3.7z",
    "M-4 -1.2h2.8v-2.8h2.4v2.8h2.8v2.4h-2.8v2.8h-2.4v-2.8h-2.8z",
)
"""Shapes around (0, 0), so that colour is never the only difference."""

Points = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class _Strategy:
    """A row of the table, and the curves of its runs."""

    key: str
    name: str
    number: int
    is_truth: bool
    curves: tuple[Points, ...]

    @property
    def colour(self) -> str:
        if self.is_truth:
            return "var(--wb-idle)"
        shade, hue = divmod(self.number, len(LIGHT.stages))
        return f"var(--wb-stage-{hue}{'-second' if shade % 2 else ''})"

    @property
    def line(self) -> str:
        return f"stroke: {self.colour}; stroke-linejoin: round; stroke-width: {5 if self.is_truth else 1.5}"

    @property
    def mark(self) -> str:
        return _MARKS[self.number % len(_MARKS)]


def curve_pictures(rows: Sequence[Row], members: Mapping[str, Sequence[RunRecord]], selected: str = "") -> list[str]:
    """The picture of losses and that of throughput; empty where no run has steps.

    Args:
        rows: those of the table, in its order; failed runs have no curves.
        members: by the key of a row its runs. Its order gives the colours, so they stay while the table is sorted.
        selected: the key of a row; the others are pale.
    """
    loss = ("Loss by step", "1 device behind the others", "loss", _losses)
    rate = ("Throughput by step", "median of neighbouring steps", "samples/s", _rates)
    return [picture for kind in (loss, rate) if (picture := _picture(rows, members, selected, *kind))]


def _losses(run: RunRecord) -> Points:
    values = np.array(run.losses, dtype=float)
    steps, is_finite = run.first_step + np.arange(1, len(values) + 1), np.isfinite(values)
    return decimate(steps[is_finite], values[is_finite], _MOST_POINTS)


def _rates(run: RunRecord) -> Points:
    """Medians of stretches of steps, few enough to be drawn, and of five neighbours of these."""
    times_s = np.array(run.step_times_s, dtype=float)
    is_known = np.isfinite(times_s) & (times_s > 0)
    steps, rates = run.first_step + np.flatnonzero(is_known) + 1, run.batch_size / times_s[is_known]
    if len(rates) > _MOST_POINTS:
        parts = np.array_split(rates, _MOST_POINTS)
        steps, rates = (
            steps[np.cumsum([len(part) for part in parts]) - 1],
            np.array([np.median(part) for part in parts]),
        )
    if not len(rates):
        return steps, rates
    around = sliding_window_view(np.pad(rates, _NEIGHBOURS // 2, mode="edge"), _NEIGHBOURS)
    return steps, np.median(around, axis=1)


def _picture(
    rows: Sequence[Row],
    members: Mapping[str, Sequence[RunRecord]],
    selected: str,
    title: str,
    detail: str,
    unit: str,
    points: Callable[[RunRecord], Points],
) -> str:
    places = {key: number for number, key in enumerate(members)}
    known = [row for row in rows if not row.failure and any(run.step_times_s for run in members.get(row.key, ()))]
    truths, others = ([row for row in known if row.is_truth is of] for of in (True, False))
    chosen = [
        _Strategy(row.key, row.name, places[row.key], row.is_truth, tuple(map(points, members[row.key])))
        for row in [*truths, *others[:_MOST_STRATEGIES]]
    ]
    drawn = [one for one in chosen if any(len(steps) for steps, _ in one.curves)]
    if not drawn:
        return ""
    steps, values = (np.concatenate([curve[of] for one in drawn for curve in one.curves]) for of in (0, 1))
    across, up = panel_svg.Axis(0.0, float(max(steps.max(), 2)), _LEFT, _RIGHT), _axis(values)
    parts = [panel_svg.text(0, 12, unit, "quiet"), *_frame(across, up)]
    for place, one in enumerate(drawn):
        parts.append(_curves(one, place, len(drawn), across, up, bool(selected) and one.key != selected))
    summary = f"{title} of {', '.join(one.name for one in drawn)}"
    left_out = len(others) - _MOST_STRATEGIES
    rest = f" \u00b7 {counted(left_out, 'row')} not drawn" if left_out > 0 else ""
    last = sorted(drawn, key=lambda one: one.is_truth)
    names = short_names([one.name for one in last])
    legend = "".join(_key(one, name, one.key == selected) for one, name in zip(last, names, strict=True))
    picture = panel_svg.svg(_WIDTH, _HEIGHT, summary, *parts)
    return panel_svg.section(title, f"{detail}{rest}", picture, panel_svg.legend(legend), css="curves")


def _axis(values: np.ndarray) -> panel_svg.Axis:
    """From zero, unless that leaves the lower half empty; or around values below zero."""
    low, high = float(values.min()), float(values.max())
    if low >= 0:
        return panel_svg.Axis.over([low, high], _BOTTOM, _TOP)
    margin = 0.1 * (high - low or 1.0)
    return panel_svg.Axis(low - margin, high + margin, _BOTTOM, _TOP)


def _frame(across: panel_svg.Axis, up: panel_svg.Axis) -> Iterator[str]:
    for mark in up.ticks():
        y = up.at(mark)
        yield panel_svg.line(_LEFT, y, _RIGHT, y, "rule")
        yield panel_svg.text(_LEFT - 6, y + 4, short_number(mark), "quiet end")
    for mark in across.ticks(5):
        if mark == int(mark):
            yield panel_svg.text(across.at(mark), _BOTTOM + 16, short_number(mark), "quiet middle")
    yield panel_svg.line(_LEFT, _BOTTOM, _RIGHT, _BOTTOM, "axis")
    yield panel_svg.text(_RIGHT, _BOTTOM + 32, "step", "quiet end")


def _curves(one: _Strategy, place: int, count: int, across: panel_svg.Axis, up: panel_svg.Axis, is_pale: bool) -> str:
    """The lines of a strategy, and marks at steps where other strategies have none: equal curves stay visible."""
    shapes = []
    for steps, values in one.curves:
        places = [(across.at(step), up.at(value)) for step, value in zip(steps, values, strict=True)]
        line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places) if places else ""
        shapes.append(element("path", d=line, style=one.line))
        stride = max(len(places) // _NUM_MARKS, count, 1)
        marked = [] if one.is_truth else places[place * stride // count % max(len(places), 1) :: stride]
        shapes += [_mark(one, f"translate({x:.1f} {y:.1f})") for x, y in marked]
    tip = element("title", text=one.name)
    opacity = "opacity: 0.25" if is_pale and not one.is_truth else ""
    return f'<g data-key="{escape(one.key, quote=True)}" style="{opacity}">{tip}{"".join(shapes)}</g>'


def _mark(one: _Strategy, transform: str) -> str:
    return element("path", d=one.mark, transform=transform, style=f"fill: {one.colour}; stroke: none")


def _key(one: _Strategy, short: str, is_selected: bool) -> str:
    """The line and mark of a strategy, with its short name."""
    line = element("path", d="M0 6H20", style=one.line)
    mark = "" if one.is_truth else _mark(one, "translate(10 6)")
    glyph = element("svg", line, mark, width="20", height="12", aria_hidden="true")
    name = element("span", text=short, css="strong" if is_selected else "", title=one.name)
    return element("span", glyph, name, css="key", data_key=one.key)
