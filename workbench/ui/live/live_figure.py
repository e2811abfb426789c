"""The live view of a run in ONE figure: throughput, loss, memory and time split side by side, the timeline below.

One figure, because every plotly widget carries 5 MB of script. ``empty_figure`` builds it. The ``show_...`` functions
update it, and only the changes are sent to a page (``figure_widget.LiveFigureWidget``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.core.metrics import MEMORY_KINDS, MEMORY_LABELS, RunRecord
from workbench.theme import LIGHT, Palette
from workbench.ui.decimate import decimate
from workbench.ui.figure_parts import titled
from workbench.ui.live import figure_layout as figure_layout
from workbench.ui.live.figure_layout import (
    LOSS_LEGEND,
    RATE_LEGEND,
    TIMELINE_TITLE,
    TITLES,
    WIDE,
    Frame,
    layout,
    measured_y,
    shown_ranks,
    simulated_y,
)
from workbench.ui.live.figure_traces import OTHER, curve_traces, memory_traces, split_traces, timeline_traces
from workbench.ui.live.history import History, Split, running_medians
from workbench.ui.live.timeline_bars import KINDS, Bars, TimelineBars
from workbench.ui.number_text import percent, three_digits
from workbench.ui.pictures import panel_svg
from workbench.ui.pictures.svg import text_width
from workbench.units import byte_scale, format_bytes

_LEAST_LABEL_PX = 16
_TITLE_LEFT = 12
_NEAR = 2.0
"""A limit of memory is drawn if it makes the axis no longer than so many times."""


def empty_figure(num_ranks: int, num_steps: int, colours: Palette = LIGHT, frame: Frame = WIDE) -> go.Figure:
    """The figure before the first step: axes over ``num_steps`` (0: unknown), titles, and empty traces."""
    figure = go.Figure(layout=layout(num_ranks, num_steps, colours, frame))
    figure.add_traces([*curve_traces(colours), *memory_traces(num_ranks, colours), *split_traces(num_ranks, colours)])
    figure.add_traces(timeline_traces(num_ranks, colours))
    return figure


def show_curves(figure: go.Figure, history: History, colours: Palette = LIGHT, has_ended: bool = False) -> None:
    """Draw throughput and loss by step, and their latest values in the titles."""
    curves = (("throughput", history.rate), ("median", history.median_rate), ("this run", history.loss))
    for name, curve in curves:
        _set(figure, name, *curve.settled)
        _set(figure, f"{name}, newest", *curve.tail)
    rate, loss = history.latest_rate, history.latest_loss
    _entitle(
        figure,
        0,
        f"{three_digits(rate)} samples/s {'at the end' if has_ended else 'now'}" if rate is not None else "",
        colours,
    )
    _entitle(figure, 1, f"{loss:.4g}" if loss is not None else "", colours)


def show_steps(figure: go.Figure, last_step: int, num_steps: int) -> None:
    """Let the curves' axes reach the last step."""
    figure.layout.xaxis.range = figure.layout.xaxis2.range = [0, figure_layout.steps_shown(last_step, num_steps)]


def show_memory(
    figure: go.Figure,
    history: History,
    colours: Palette = LIGHT,
    limit_bytes: float | None = None,
    expected_bytes: Sequence[float] = (),
) -> float | None:
    """Show every rank's memory by kind, its peak and its predicted peak. Returns the place of the limit on the axis,
    None if it is far away.
    """
    ranks = shown_ranks(history.num_ranks)
    peaks = [history.peak_bytes[rank] for rank in ranks]
    if not any(peaks):
        return None
    divisor, unit = byte_scale(max(history.peak_bytes))
    places, starts = np.array(peaks, dtype=float) / divisor, np.zeros(len(ranks))
    for kind in MEMORY_KINDS:
        trace = _trace(figure, MEMORY_LABELS[kind])
        lengths = np.array([history.memory_by_kind[rank].get(kind, 0) for rank in ranks], dtype=float) / divisor
        trace.base, trace.x = starts, lengths
        starts = starts + lengths
    other = _trace(figure, OTHER)
    other.base, other.x = starts, np.maximum(places - starts, 0.0)
    expected = np.array([expected_bytes[rank] if expected_bytes else np.nan for rank in ranks]) / divisor
    _trace(figure, "peak of the process").x = places
    _trace(figure, "predicted peak").x = expected
    right, words = np.fmax(places, expected), _trace(figure, "peak in words")
    words.x, words.text = right, [f"\u2002{format_bytes(peak)}" for peak in peaks]
    figure.layout.xaxis3.ticksuffix = f" {unit}"
    end, limit = 1.5 * float(max(right.max(), starts.max())), (limit_bytes or 0.0) / divisor
    is_near = 0 < limit <= _NEAR * end
    figure.layout.xaxis3.range = [0, max(end, 1.08 * limit) if is_near else end]
    _entitle(figure, 2, f"hatched: {OTHER}, tick: peak, {format_bytes(max(history.peak_bytes))}", colours)
    return limit if is_near else None


def show_split(figure: go.Figure, split: Sequence[Split], boxed_bytes: int, colours: Palette = LIGHT) -> None:
    """Show the shares of the ranks' time, with numbers if there is room."""
    if not split:
        return
    chosen = [split[rank] for rank in shown_ranks(len(split))]
    starts = np.zeros(len(chosen))
    for name in ("compute", "boxing", "waiting"):
        lengths = np.array([getattr(part, name) for part in chosen]) * 100
        trace = _trace(figure, name)
        trace.base, trace.x = starts, lengths
        trace.text = [percent(length / 100) if length >= 15 else "" for length in lengths]
        starts = starts + lengths
    _entitle(figure, 3, f"{format_bytes(boxed_bytes)} boxed per step", colours)


def show_timeline(figure: go.Figure, bars: TimelineBars, colours: Palette = LIGHT) -> None:
    """Show one whole step, measured and, thin below, simulated."""
    longest = max(bars.measured_s, bars.simulated_s or 0.0)
    divisor, unit = panel_svg.scale_of(longest, panel_svg.SECONDS)
    length = Frame(figure.layout.width).timeline_right - figure_layout.TIMELINE_LEFT
    px_per_s = length / longest if longest else 0.0
    rows = _trace(figure, "idle").y
    _trace(figure, "idle").x = np.full(len(rows), bars.measured_s / divisor)
    for kind in KINDS:
        _set_bars(_trace(figure, f"{kind}, measured"), bars.measured[kind], measured_y, divisor, px_per_s)
        _set_bars(_trace(figure, f"{kind}, simulated"), bars.simulated[kind], simulated_y, divisor, px_per_s)
    figure.layout.xaxis5.ticksuffix = f" {unit}"
    figure.layout.xaxis5.range = [0, longest / divisor]
    title = f"Timeline, step {bars.step + 1}"
    room_px = figure.layout.width - 2 * _TITLE_LEFT - text_width(title, 14)  # it is bold
    _entitle(figure, TIMELINE_TITLE, bars.summary(room_px), colours, title)


def show_one_device(figure: go.Figure, losses: Sequence[float], colours: Palette = LIGHT) -> None:
    """Put the one-device losses behind the run's, and their name in the legend."""
    values = np.asarray(losses, dtype=float)
    _set(figure, "1 device", *decimate(np.arange(1, len(values) + 1), values))
    show_legends(figure, colours)


def show_expected(
    figure: go.Figure, num_steps: int, samples_per_s: float | None, from_step: int = 0, colours: Palette = LIGHT
) -> None:
    """Show the prediction: a dashed line of throughput from ``from_step`` on, with its name in the legend."""
    trace = _trace(figure, "predicted")
    x, y = (list(values) if values is not None else [] for values in (trace.x, trace.y))
    if samples_per_s is not None:
        kept = [index for index, step in enumerate(x) if step < from_step]
        x, y = [x[i] for i in kept], [y[i] for i in kept]
        if x:
            x, y = [*x, from_step], [*y, y[-1]]
        trace.x = np.array([*x, from_step, num_steps], dtype=float)
        trace.y = np.array([*y, samples_per_s, samples_per_s], dtype=float)
    show_legends(figure, colours)


def show_legends(figure: go.Figure, colours: Palette = LIGHT) -> None:
    """Name the drawn lines of throughput and loss in the legend."""
    predicted, one_device = (_trace(figure, name).x for name in ("predicted", "1 device"))
    notes = figure.layout.annotations
    notes[RATE_LEGEND].text = figure_layout.rate_legend(colours, predicted is not None and len(predicted) > 0)
    notes[LOSS_LEGEND].text = figure_layout.loss_legend(colours, one_device is not None and len(one_device) > 0)


def show_loss_scale(figure: go.Figure, is_log: bool) -> None:
    """Let the loss's axis be logarithmic, or linear from 0."""
    figure.layout.yaxis2.update(type="log" if is_log else "linear", rangemode="normal" if is_log else "tozero")


def show_record(figure: go.Figure, record: RunRecord, colours: Palette = LIGHT) -> None:
    """Draw the curves of a finished run from its record."""
    steps = np.arange(1, len(record.losses) + 1)
    times_s = np.array(record.step_times_s, dtype=float)
    rates = np.array(record.step_rates, dtype=float)
    at = np.arange(1, len(rates) + 1)
    _set(figure, "throughput", *decimate(at, rates))
    _set(figure, "median", *decimate(at, running_medians(rates, times_s)))
    _set(figure, "this run", *decimate(steps, np.array(record.losses, dtype=float)))
    for name in ("throughput", "median", "this run"):
        _set(figure, f"{name}, newest", np.zeros(0), np.zeros(0))
    figure.layout.xaxis.range = figure.layout.xaxis2.range = [0, max(len(rates), 1)]
    _entitle(figure, 0, f"{three_digits(record.samples_per_s)} samples/s, median", colours)
    difference = f" \u00b7 at most {record.loss_difference:.0e} from 1 device" if record.loss_difference else ""
    _entitle(figure, 1, f"{record.losses[-1]:.4g}{difference}" if record.losses else "", colours)


def keep_prediction(fresh: go.Figure, figure: go.Figure) -> None:
    """Give a fresh figure the predicted throughput of the one that it replaces."""
    new, old = _trace(fresh, "predicted"), _trace(figure, "predicted")
    new.x, new.y = old.x, old.y


def _set_bars(trace: Any, bars: Bars, place: Any, divisor: float, px_per_s: float) -> None:
    trace.y = np.array([place(row) for row in bars.rows])
    trace.base = np.array(bars.start_s) / divisor
    trace.x = np.array(bars.length_s) / divisor
    trace.customdata = bars.tips
    wide = [length * px_per_s >= _LEAST_LABEL_PX for length in bars.length_s]
    trace.text = [label if fits else "" for label, fits in zip(bars.labels, wide, strict=True)]


def _entitle(figure: go.Figure, index: int, detail: str, colours: Palette, name: str | None = None) -> None:
    figure.layout.annotations[index].text = titled(name or TITLES[index], detail, colours)


def _trace(figure: go.Figure, name: str) -> Any:
    return next(trace for trace in figure.data if trace.name == name)


def _set(figure: go.Figure, name: str, x: np.ndarray, y: np.ndarray) -> None:
    """Show the points of a curve. A single one is a marker, since a line needs two."""
    trace, is_one = _trace(figure, name), len(x) == 1
    trace.x, trace.y = x, np.asarray(y, dtype=float)
    trace.mode, trace.cliponaxis = "lines+markers" if is_one else "lines", not is_one
