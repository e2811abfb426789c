"""Figures of runs as pure functions: records -> plotly ``Figure``. No state, no I/O; every axis has its unit.

Curves are by step; bars and points are one per run or rank. Bytes are decimal (1 MB = 10^6 bytes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.core.metrics import TOLERANCE, RunRecord, difference
from workbench.core.seeds import groups, without_seed
from workbench.theme import LIGHT, Palette
from workbench.ui.decimate import decimate
from workbench.ui.figure_parts import (
    BAR_WIDTH,
    axis,
    base_layout,
    byte_scale,
    memory_traces,
    one_device_trace,
    peak_trace,
    rows_layout,
    stepwise_traces,
)
from workbench.ui.number_text import grouped, short_difference, speedup_text, three_digits

_MOST_DECADES = 8
"""Numbers beside a logarithmic axis: of training that diverges there would be dozens."""


def finished(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs that have figures to draw: those without an error."""
    return [run for run in runs if run.error is None]


def _curves(
    runs: Sequence[RunRecord], points: Callable[[RunRecord], tuple[np.ndarray, np.ndarray]], colours: Palette
) -> list[go.Scatter]:
    """The curves of finished runs; those that differ in their seed only have one colour and one name."""
    traces, drawn = list[go.Scatter](), groups(finished(runs))
    for index, group in enumerate(drawn):
        for number, run in enumerate(group):
            name = without_seed(run) if len(group) > 1 else run.name
            line, markers = stepwise_traces(*points(run), name, index, len(drawn), colours)
            traces += [line, markers.update(showlegend=number == 0)]
    return traces


def loss_figure(runs: Sequence[RunRecord], baselines: Sequence[RunRecord] = (), colours: Palette = LIGHT) -> go.Figure:
    """Loss by step of several runs, with the one-device runs as broad pale lines behind them."""
    figure = go.Figure()
    for number, baseline in enumerate(baselines):
        if baseline.losses:
            line = one_device_trace(*_by_step(baseline.losses), colours)
            figure.add_trace(line.update(showlegend=number == 0, legendgroup="1 device"))
    figure.add_traces(_curves(runs, lambda run: _by_step(run.losses), colours))
    figure.update_layout(**base_layout(colours, "Loss", "same weights and data order for all"))
    figure.update_xaxes(**axis(colours, "step", showgrid=False))
    figure.update_yaxes(**axis(colours, "loss", rangemode="tozero"))
    return figure


def loss_difference_figure(
    runs: Sequence[RunRecord], baselines: Sequence[RunRecord], colours: Palette = LIGHT
) -> go.Figure:
    """Difference of each run's loss to one device's of its seed, by step, on a logarithmic axis, with the tolerance.

    Differences that are zero or not finite have no place on a logarithmic axis and are left out.
    """
    by_seed = {baseline.settings.get("seed"): baseline for baseline in baselines}

    def difference_of(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
        return _difference(run, by_seed.get(run.settings.get("seed"), baselines[0]))

    figure = go.Figure(_curves(runs, difference_of, colours))
    values = [TOLERANCE, *(value for trace in figure.data for value in trace.y)]
    figure.add_hline(y=TOLERANCE, line={"color": colours.error, "width": 1.5})
    figure.add_annotation(**_limit_label(TOLERANCE, colours))
    figure.update_layout(
        **base_layout(colours, "Difference to one device", "of the loss; relative where that is above 1")
    )
    figure.update_xaxes(**axis(colours, "step", showgrid=False))
    figure.update_yaxes(**axis(colours, "difference of the loss"), **_decades(min(values), max(values)))
    return figure


def _difference(run: RunRecord, baseline: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    apart = np.array([difference(own, truth) for own, truth in zip(run.losses, baseline.losses, strict=False)])
    drawable = (apart > 0) & np.isfinite(apart)
    return decimate(np.arange(1, len(apart) + 1), np.where(drawable, apart, np.nan))


def _limit_label(tolerance: float, colours: Palette) -> dict[str, Any]:
    """The limit's number above its line, on the left, because plotly's buttons appear on the right.

    Annotations on a logarithmic axis are placed by exponent.
    """
    place = {
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "xshift": 4,
        "y": float(np.log10(tolerance)),
        "yanchor": "bottom",
    }
    return place | {
        "text": f"limit {short_difference(tolerance)}",
        "font": {"color": colours.error},
        "showarrow": False,
    }


def _decades(smallest: float, largest: float) -> dict[str, Any]:
    """Settings of a logarithmic axis over whole decades, written as 1e-7."""
    low, high = int(np.floor(np.log10(smallest))), int(np.ceil(np.log10(largest)))
    powers = range(low, max(high, low + 1) + 1, max(1, (high - low) // _MOST_DECADES))
    ticks = {"tickvals": [10.0**power for power in powers], "ticktext": [f"1e{power}" for power in powers]}
    return {"type": "log", "range": [low, max(high, low + 1) + 0.5], **ticks}


def throughput_figure(runs: Sequence[RunRecord], colours: Palette = LIGHT) -> go.Figure:
    """Samples per second by step: the batch size over each step's time."""
    figure = go.Figure(_curves(runs, rates_by_step, colours))
    figure.update_layout(**base_layout(colours, "Throughput", "by step, more is better"))
    figure.update_xaxes(**axis(colours, "step", showgrid=False))
    figure.update_yaxes(**axis(colours, "samples/s", rangemode="tozero"))
    return figure


def memory_figure(runs: Sequence[RunRecord], colours: Palette = LIGHT) -> go.Figure:
    """Memory per rank: live storages by kind as stacked bars, the process's peak as a tick with its number."""
    drawn = finished(runs)
    labels = _rank_labels(drawn)
    by_kind = [memory for run in drawn for memory in _per_rank_memory(run)]
    peaks = np.array([peak for run in drawn for peak in _per_rank_peak(run)], dtype=float)
    divisor, unit = byte_scale(max([*peaks, *(live_bytes(memory) for memory in by_kind), 1]))
    figure = go.Figure(memory_traces(labels, by_kind, divisor, unit, colours))
    figure.add_trace(peak_trace(labels, peaks, divisor, unit, colours))
    figure.update_layout(**rows_layout(colours, "Memory per rank", "tick: peak", len(peaks), barmode="stack"))
    figure.update_xaxes(**axis(colours, unit, rangemode="tozero"))
    figure.update_yaxes(**axis(colours, "", autorange="reversed", showgrid=False))
    return figure


def comparison_figure(
    runs: Sequence[RunRecord], baseline: RunRecord | None = None, colours: Palette = LIGHT
) -> go.Figure:
    """Bars of samples/s, fastest first, the one-device run last and paler, each with its number and speed-up. Those of
    several seeds (``core.seeds.over_seeds``) have error bars: the standard deviation.
    """
    drawn = sorted(finished(runs), key=lambda run: -run.samples_per_s)
    if baseline is not None and baseline.error is None:
        drawn.append(baseline)
    fills = [colours.idle if run is baseline else colours.compute for run in drawn]
    bars = go.Bar(
        x=np.array([run.samples_per_s for run in drawn], dtype=float),
        y=[run.name for run in drawn],
        orientation="h",
        width=BAR_WIDTH,
        marker={"color": fills, "line": {"color": colours.muted, "width": 0.5}},
        error_x=_error_bars(drawn, colours),
        hovertemplate="%{y}: %{x:.4g} samples/s<extra></extra>",
    )
    ends = [run.samples_per_s + run.spread.get("samples_per_s", 0.0) for run in drawn]
    texts = go.Scatter(
        x=np.array(ends, dtype=float),
        y=[run.name for run in drawn],
        mode="text",
        text=[_rate_text(run, baseline) for run in drawn],
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
    )
    layout = rows_layout(colours, "Throughput", "median, more is better", len(drawn), showlegend=False)
    figure = go.Figure([bars, texts], layout=layout)
    figure.update_layout(margin={"r": 140, "b": 56}, height=layout["height"] - 40)
    figure.update_xaxes(**axis(colours, "samples/s", rangemode="tozero"))
    figure.update_yaxes(**axis(colours, "", autorange="reversed", showgrid=False))
    return figure


def _error_bars(runs: Sequence[RunRecord], colours: Palette) -> dict[str, Any]:
    spreads = [run.spread.get("samples_per_s", 0.0) for run in runs]
    look = {"color": colours.ink, "thickness": 1.5, "width": 4}
    return {"type": "data", "array": spreads, "visible": any(spreads), **look}


def _rate_text(run: RunRecord, baseline: RunRecord | None) -> str:
    spread = f" \u00b1 {three_digits(run.spread['samples_per_s'])}" if "samples_per_s" in run.spread else ""
    ratio = run.speedup_over(baseline)
    speedup = f" ({speedup_text(ratio)})" if ratio is not None else ""
    return f" {grouped(run.samples_per_s)}{spread}{speedup}"


def live_bytes(memory: dict[str, int]) -> int:
    """Bytes of all kinds of live storage together, without the peak."""
    return sum(size for kind, size in memory.items() if kind != "peak")


def rates_by_step(run: RunRecord) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the samples per second of each."""
    times_s = np.array(run.step_times_s, dtype=float)
    return decimate(np.arange(1, len(times_s) + 1), run.batch_size / np.where(times_s > 0, times_s, np.nan))


def _by_step(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    return decimate(np.arange(1, len(values) + 1), np.array(values, dtype=float))


def _per_rank_memory(run: RunRecord) -> list[dict[str, int]]:
    return list(run.memory_by_kind) or [{}] * len(run.peak_memory_bytes)


def _per_rank_peak(run: RunRecord) -> list[int]:
    return list(run.peak_memory_bytes) or [live_bytes(memory) for memory in run.memory_by_kind]


def _rank_labels(runs: Sequence[RunRecord]) -> list[list[str]] | list[str]:
    """One label per bar: ranks of one run, or (run, rank) in two levels for several."""
    names = [run.name for run in runs for _ in _per_rank_peak(run)]
    ranks = [f"rank {rank}" for run in runs for rank in range(len(_per_rank_peak(run)))]
    return ranks if len(runs) == 1 else [names, ranks]
