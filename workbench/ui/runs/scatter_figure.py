"""Memory against throughput, with the Pareto front of strategies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from workbench.core.metrics import RunRecord
from workbench.theme import LIGHT, Palette
from workbench.ui.figure_parts import axis, base_layout, byte_scale
from workbench.ui.runs.scatter_labels import free_sides

_PLACES = {"above": "top center", "below": "bottom center", "right": "middle right", "left": "middle left"}
_PLOT = (320.0, 165.0)
"""Pixels between the outermost points, about: figures are as wide as the page lets them."""
_MARGIN, _RING = 0.18, 7.0


def pareto_front(memory_bytes: Sequence[float], samples_per_s: Sequence[float]) -> list[int]:
    """Indices of the points that no other one beats in both less memory and more throughput, by memory.

    >>> pareto_front([3, 1, 2, 2], [9, 5, 4, 7])
    [1, 3, 0]
    """
    by_memory = sorted(range(len(memory_bytes)), key=lambda i: (memory_bytes[i], -samples_per_s[i]))
    front: list[int] = []
    for index in by_memory:
        if not front or samples_per_s[index] > samples_per_s[front[-1]]:
            front.append(index)
    return front


def scatter_figure(runs: Sequence[RunRecord], baseline: RunRecord | None = None, colours: Palette = LIGHT) -> go.Figure:
    """Largest peak memory of a rank against samples/s; Pareto points are filled and joined by steps."""
    drawn = [run for run in runs if run.error is None and run.peak_memory_bytes]
    memory = np.array([max(run.peak_memory_bytes) for run in drawn], dtype=float)
    rate = np.array([run.samples_per_s for run in drawn], dtype=float)
    with_baseline = baseline is not None and baseline.error is None and bool(baseline.peak_memory_bytes)
    all_bytes = [*memory, *([max(baseline.peak_memory_bytes)] if with_baseline and baseline else []), 1]
    divisor, unit = byte_scale(max(all_bytes))
    front = pareto_front(list(memory), list(rate))
    figure = go.Figure()
    figure.add_trace(_front_line(memory[front] / divisor, rate[front], colours))
    figure.add_trace(_points(drawn, front, memory / divisor, rate, colours, unit))
    if with_baseline and baseline is not None:
        figure.add_trace(_baseline_point(baseline, divisor, unit, colours))
    _put_labels(figure)
    figure.update_layout(
        **base_layout(colours, "Memory against throughput", "filled: no run is faster with less memory")
    )
    figure.update_layout(showlegend=False)
    figure.update_xaxes(
        **axis(colours, f"peak memory of the largest rank, {unit} (less is better)", range=_span(figure, "x"))
    )
    figure.update_yaxes(**axis(colours, "samples/s (more is better)", range=_span(figure, "y")))
    return figure


def _put_labels(figure: go.Figure) -> None:
    """Place the labels of all points; a label without room appears on hover only."""
    traces = [trace for trace in figure.data if trace.mode == "markers+text"]
    names = [name for trace in traces for name in trace.text]
    x, y = (np.concatenate([np.asarray(trace[axis], dtype=float) for trace in traces]) for axis in ("x", "y"))
    places = iter(label_places(names, x, y))
    for trace in traces:
        own = [next(places) for _ in trace.text]
        trace.hovertext = trace.text
        trace.text = [name if place else "" for name, place in zip(trace.text, own, strict=True)]
        trace.textposition = [place or "top center" for place in own]


def _front_line(memory: np.ndarray, rate: np.ndarray, colours: Palette) -> go.Scatter:
    line = {"color": colours.ink, "width": 1, "shape": "hv"}
    return go.Scatter(x=memory, y=rate, mode="lines", name="Pareto", line=line, hoverinfo="skip")


def _points(
    runs: Sequence[RunRecord], front: list[int], memory: np.ndarray, rate: np.ndarray, colours: Palette, unit: str
) -> go.Scatter:
    filled = [index in front for index in range(len(runs))]
    return go.Scatter(
        x=memory,
        y=rate,
        mode="markers+text",
        name="strategies",
        text=[run.name for run in runs],
        textfont={"color": colours.ink, "size": 12},
        cliponaxis=False,
        marker={
            "size": 11,
            "color": [colours.ink if full else colours.background for full in filled],
            "line": {"color": [colours.ink if full else colours.compute for full in filled], "width": 2},
        },
        hovertemplate=f"%{{hovertext}}: %{{y:.4g}} samples/s, %{{x:.3g}} {unit}<extra></extra>",
    )


def _baseline_point(baseline: RunRecord, divisor: float, unit: str, colours: Palette) -> go.Scatter:
    return go.Scatter(
        x=np.array([max(baseline.peak_memory_bytes) / divisor]),
        y=np.array([baseline.samples_per_s]),
        mode="markers+text",
        name="1 device",
        text=["1 device"],
        textfont={"color": colours.muted, "size": 12},
        cliponaxis=False,
        marker={"symbol": "square", "size": 10, "color": colours.muted},
        hovertemplate=f"1 device: %{{y:.4g}} samples/s, %{{x:.3g}} {unit}<extra></extra>",
    )


def label_places(names: Sequence[str], x: np.ndarray, y: np.ndarray) -> list[str | None]:
    """plotly's place for each point's label, so that none covers a point or another label; None: no room."""
    if not names:
        return []
    across, upward = (
        _PLOT[axis] * (values - values.min()) / (float(np.ptp(values)) or 1.0) for axis, values in enumerate((x, y))
    )
    points = [(float(a), -float(b)) for a, b in zip(across, upward, strict=True)]
    room = _PLOT[0] * _MARGIN
    sides = free_sides(list(zip(names, points, strict=True)), points, (-room, _PLOT[0] + room), _RING)
    return [None if side is None else _PLACES[side] for side in sides]


def _span(figure: go.Figure, axis_name: str) -> list[float]:
    """Range of an axis with room for labels around the outer points."""
    values = np.concatenate([np.asarray(trace[axis_name], dtype=float) for trace in figure.data] or [np.zeros(1)])
    if len(values) == 0:
        return [0.0, 1.0]
    low, high = float(values.min()), float(values.max())
    margin = _MARGIN * ((high - low) or high or 1.0)
    return [max(low - margin, 0.0), high + margin]
