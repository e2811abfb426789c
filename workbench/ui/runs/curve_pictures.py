"""Several runs by step, laid over one another: losses, their difference to one device, throughput.

Pure functions, rows and records -> HTML with SVG in the page's colours. A strategy has one colour and one mark; its
runs with other seeds are further lines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from workbench.core.metrics import RunRecord
from workbench.theme import LIGHT
from workbench.ui.assets import element
from workbench.ui.decimate import decimate
from workbench.ui.number_text import short_difference, short_number, three_digits
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

_APART = "Difference to one device"
Points = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class _Kind:
    """A picture of the ``points`` of runs, and of ``limits``. ``write_tick`` writes a value beside the axis, ``write``
    any.
    """

    title: str
    detail: str
    unit: str
    points: Callable[[RunRecord], Points]
    axis: Callable[[np.ndarray], panel_svg.Axis]
    write_tick: Callable[[float], str]
    write: Callable[[float], str]
    limits: tuple[float, ...] = ()


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
        width = 5 if self.is_truth else 1.5
        return f"stroke: {self.colour}; stroke-linejoin: round; stroke-linecap: round; stroke-width: {width}"

    @property
    def mark(self) -> str:
        return _MARKS[self.number % len(_MARKS)]


def curve_pictures(rows: Sequence[Row], members: Mapping[str, Sequence[RunRecord]], selected: str = "") -> list[str]:
    """The pictures of losses, of their difference to one device, and of throughput, those that have something to show.

    Args:
        rows: those of the table, in its order; failed runs have no curves.
        members: by the key of a row its runs. Its order gives the colours, so they stay while the table is sorted.
        selected: the key of a row; the others are pale.
    """
    shown = [(row, run) for row in rows for run in members.get(row.key, ())]
    tolerances = tuple(sorted({run.verdict.tolerance for _, run in shown if run.equal is not None}))
    kinds = (
        _Kind("Loss by step", "1 device behind the others", "loss", _losses, _axis, short_number, "{:.6g}".format),
        _Kind(_APART, "of the loss", "", _differences, _log_axis, short_difference, short_difference, tolerances),
        _Kind("Throughput by step", "median of neighbours", "samples/s", _rates, _axis, short_number, three_digits),
    )
    return [picture for kind in kinds if (picture := _picture(rows, members, selected, kind))]


def _losses(run: RunRecord) -> Points:
    values = np.array(run.losses, dtype=float)
    steps, is_finite = run.first_step + np.arange(1, len(values) + 1), np.isfinite(values)
    return decimate(steps[is_finite], values[is_finite], _MOST_POINTS)


def _differences(run: RunRecord) -> Points:
    """Differences of the loss to the one device of the run's verdict, where they have a logarithm."""
    apart = np.array(run.verdict.differences[run.first_step :][: len(run.losses)], dtype=float)
    is_drawable = (apart >= sys.float_info.min) & np.isfinite(apart)
    steps = run.first_step + np.flatnonzero(is_drawable) + 1
    return decimate(steps, apart[is_drawable], _MOST_POINTS)


def _rates(run: RunRecord) -> Points:
    """Medians of stretches of steps, few enough to be drawn, and of five neighbours of these."""
    rates = np.array(run.step_rates, dtype=float)
    is_known = np.isfinite(rates) & (rates > 0)
    steps, rates = run.first_step + np.flatnonzero(is_known) + 1, rates[is_known]
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
    kind: _Kind,
) -> str:
    places = {key: number for number, key in enumerate(members)}
    known = [row for row in rows if not row.failure and any(run.step_times_s for run in members.get(row.key, ()))]
    truths, others = ([row for row in known if row.is_truth is of] for of in (True, False))
    chosen = [
        _Strategy(row.key, row.name, places[row.key], row.is_truth, tuple(map(kind.points, members[row.key])))
        for row in [*truths, *others[:_MOST_STRATEGIES]]
    ]
    drawn = [one for one in chosen if any(len(steps) for steps, _ in one.curves)]
    if not drawn:
        return ""
    steps, values = (np.concatenate([curve[of] for one in drawn for curve in one.curves]) for of in (0, 1))
    across = panel_svg.Axis(0.0, float(max(steps.max(), 2)), _LEFT, _RIGHT)
    up = kind.axis(np.append(values, kind.limits))
    parts = [*panel_svg.frame(across, up, ("step", kind.unit), _whole, kind.write_tick), *_limits(up, kind)]
    for place, one in enumerate(drawn):
        is_pale = bool(selected) and one.key != selected
        parts.append(_curves(one, (place, len(drawn)), across.at, up.at, kind.write, is_pale))
    summary = f"{kind.title} of {', '.join(one.name for one in drawn)}"
    left_out = len(others) - _MOST_STRATEGIES
    rest = f" \u00b7 {counted(left_out, 'row')} not drawn" if left_out > 0 else ""
    last = sorted(drawn, key=lambda one: one.is_truth)
    names = short_names([one.name for one in last])
    legend = "".join(_key(one, name, one.key == selected) for one, name in zip(last, names, strict=True))
    picture = panel_svg.svg(_WIDTH, _HEIGHT, summary, *parts)
    return panel_svg.section(kind.title, f"{kind.detail}{rest}", picture, panel_svg.legend(legend))


def _axis(values: np.ndarray) -> panel_svg.Axis:
    """From zero, unless that leaves the lower half empty; or around values below zero."""
    low, high = float(values.min()), float(values.max())
    if low >= 0:
        return panel_svg.Axis.over([low, high], _BOTTOM, _TOP)
    margin = 0.1 * panel_svg.span(low, high)
    return panel_svg.Axis(low - margin, high + margin, _BOTTOM, _TOP)


def _log_axis(values: np.ndarray) -> panel_svg.LogAxis:
    return panel_svg.LogAxis.over(values.tolist(), _BOTTOM, _TOP)


def _whole(step: float) -> str:
    return short_number(step) if step == int(step) else ""


def _limits(up: panel_svg.Axis, kind: _Kind) -> Iterator[str]:
    for limit in kind.limits:
        y = up.at(limit)
        yield panel_svg.line(_LEFT, y, _RIGHT, y, "wb-limit")
        yield panel_svg.text(_LEFT + 4, y - 5, f"tolerance {kind.write(limit)}", "error")  # rounding grows to the right


def _curves(
    one: _Strategy,
    place: tuple[int, int],
    x_of: Callable[[float], float],
    y_of: Callable[[float], float],
    write: Callable[[float], str],
    is_pale: bool,
) -> str:
    """The lines of a strategy, and marks at steps where other strategies have none: equal curves stay visible. The
    ``place`` is its number, and how many there are.
    """
    shapes, (number, count) = [], place
    for steps, values in one.curves:
        points = [(x_of(step), y_of(value)) for step, value in zip(steps, values, strict=True)]
        ends = points * 2 if len(points) == 1 else points  # a line of no length is a dot
        line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in ends) if points else ""
        shapes.append(element("path", d=line, style=one.line))
        stride = max(len(points) // _NUM_MARKS, count, 1)
        marked = range(number * stride // count % max(len(points), 1), 0 if one.is_truth else len(points), stride)
        for at in marked:
            tip = f"{one.name}, step {steps[at]}: {write(values[at])}"
            shapes.append(_mark(one, "translate({:.1f} {:.1f})".format(*points[at]), element("title", text=tip)))
    tip = element("title", text=one.name)
    opacity = "opacity: 0.25" if is_pale and not one.is_truth else ""
    return f'<g data-key="{escape(one.key, quote=True)}" style="{opacity}">{tip}{"".join(shapes)}</g>'


def _mark(one: _Strategy, transform: str, *parts: str) -> str:
    return element("path", *parts, d=one.mark, transform=transform, style=f"fill: {one.colour}; stroke: none")


def _key(one: _Strategy, short: str, is_selected: bool) -> str:
    """The line and mark of a strategy, with its short name."""
    line = element("path", d="M0 6H20", style=one.line)
    mark = "" if one.is_truth else _mark(one, "translate(10 6)")
    glyph = element("svg", line, mark, width="20", height="12", aria_hidden="true")
    name = element("span", text=short, css="strong" if is_selected else "", title=one.name)
    return element("span", glyph, name, css="key", data_key=one.key)
