"""Figures of runs as pure functions: records -> plotly ``Figure``. No state, no I/O; every axis has its unit.

Curves are by step; bars and points are one per run or rank. Bytes are decimal (1 MB = 10^6 bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.core.metrics import TOLERANCE, RunRecord, difference
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
from workbench.ui.number_text import grouped, short_difference, speedup_text

_MOST_DECADES = 8
"""Numbers beside a logarithmic axis: of training that diverges there would be dozens."""


def finished(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs that have figures to draw: those without an error."""
    return [run for run in runs if run.error is None]


def loss_figure(runs: Sequence[RunRecord], baseline: RunRecord | None = None, colours: Palette = LIGHT) -> go.Figure:
    """Loss by step of several runs, with the one-device run as a broad pale line behind them."""
    figure = go.Figure()
    if baseline is not None and baseline.losses:
        steps, losses = _by_step(baseline.losses)
        figure.add_trace(one_device_trace(steps, losses, colours))
    drawn = finished(runs)
    for index, run in enumerate(drawn):
        steps, losses = _by_step(run.losses)
        figure.add_traces(stepwise_traces(steps, losses, run.name, index, len(drawn), colours))
    figure.update_layout(**base_layout(colours, "Loss", "same weights and data order for all"))
    figure.update_xaxes(**axis(colours, "step", showgrid=False))
    figure.update_yaxes(**axis(colours, "loss", rangemode="tozero"))
    return figure


def loss_difference_figure(
    runs: Sequence[RunRecord], baseline: RunRecord, tolerance: float = TOLERANCE, colours: Palette = LIGHT
) -> go.Figure:
    """Difference of each run's loss to one device's, by step, on a logarithmic axis, with the tolerance.

    Differences that are zero or not finite have no place on a logarithmic axis and are left out.
    """
    figure = go.Figure()
    drawn = finished(runs)
    extremes = [tolerance]
    for index, run in enumerate(drawn):
        steps, values = _difference(run, baseline)
        extremes += [values.min(), values.max()] if len(values) else []
        figure.add_traces(stepwise_traces(steps, values, run.name, index, len(drawn), colours))
    figure.add_hline(y=tolerance, line={"color": colours.error, "width": 1.5})
    figure.add_annotation(**_limit_label(tolerance, colours))
    figure.update_layout(
        **base_layout(colours, "Difference to one device", "of the loss; relative where that is above 1")
    )
    figure.update_xaxes(**axis(colours, "step", showgrid=False))
    figure.update_yaxes(**axis(colours, "difference of the loss"), **_decades(min(extremes), max(extremes)))
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
    figure = go.Figure()
    drawn = finished(runs)
    for index, run in enumerate(drawn):
        times_s = np.array(run.step_times_s, dtype=float)
        rate = run.batch_size / np.where(times_s > 0, times_s, np.nan)
        steps, rates = decimate(np.arange(1, len(rate) + 1), rate)
        figure.add_traces(stepwise_traces(steps, rates, run.name, index, len(drawn), colours))
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
    """Bars of samples/s, fastest first, the one-device run last and paler, each with its number and speed-up."""
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
        text=[_rate_text(run) for run in drawn],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.4g} samples/s<extra></extra>",
    )
    layout = rows_layout(colours, "Throughput", "median, more is better", len(drawn), showlegend=False)
    figure = go.Figure(bars, layout=layout)
    figure.update_layout(margin={"r": 140, "b": 56}, height=layout["height"] - 40)
    figure.update_xaxes(**axis(colours, "samples/s", rangemode="tozero"))
    figure.update_yaxes(**axis(colours, "", autorange="reversed", showgrid=False))
    return figure


def _rate_text(run: RunRecord) -> str:
    speedup = f" ({speedup_text(run.speedup)})" if run.speedup is not None else ""
    return f" {grouped(run.samples_per_s)}{speedup}"


def live_bytes(memory: dict[str, int]) -> int:
    """Bytes of all kinds of live storage together, without the peak."""
    return sum(size for kind, size in memory.items() if kind != "peak")


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
