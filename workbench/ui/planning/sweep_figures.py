"""Draws simulations by pure functions: sweep -> plotly Figure.

The figures show throughput, memory and waiting over a swept value, the parts of a step's time, and a pipeline of any
size. Points that do not fit into memory are hollow. Impossible points are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.errors import StrategyError
from workbench.pipeline.simulate import Timeline
from workbench.planning.sweep import Point, Sweep
from workbench.theme import LIGHT, Palette
from workbench.ui.figure_parts import axis, base_layout, legend, run_colour, run_symbol
from workbench.units import byte_scale

NAMES = {"gpus": "GPUs", "batch_size": "samples per step", "seq": "positions", "sequence": "positions",
         "hidden": "hidden size", "layers": "layers", "hardware": "machine"}  # fmt: skip
"""The names of swept values on an axis. Other values keep their own names."""
PARTS = ("compute", "boxing", "gradient", "bubble", "optimizer")
_PART_NAMES = {"gradient": "sums of gradients", "bubble": "waiting for stages", "optimizer": "optimizer"}
_NUM_COLUMNS = 720
_TRILLION = 1e12


@dataclass(frozen=True, slots=True)
class Metric:
    """The meaning of a curve: title, unit, and the value of a point."""

    title: str
    unit: str
    value: Callable[[Point], float]


METRICS = {
    "throughput": Metric("Throughput", "samples/s", lambda point: point.row()["samples_per_s"]),
    "per_gpu": Metric("Throughput of a GPU", "TFLOP/s", lambda point: point.row()["flops_per_s_per_gpu"] / _TRILLION),
    "step": Metric("Step", "s", lambda point: point.row()["step_s"]),
    "memory": Metric("Memory of the fullest GPU", "bytes", lambda point: point.row()["peak_bytes"]),
    "bubble": Metric("Waiting for other stages", "% of the step", lambda point: 100 * _share(point, "bubble_s")),
}
"""The quantities that can be drawn over a swept value."""


def sweep_figure(sweep: Sweep, metric: str = "throughput", x: str | None = None, colours: Palette = LIGHT) -> go.Figure:
    """One of ``METRICS`` against a swept value; a curve for every combination of the other ones.

    Args:
        sweep: the result of ``wb.planner.simulate``.
        metric: "throughput", "per_gpu", "step", "memory" or "bubble".
        x: name of the value along the axis. Default: the first swept value that is a number.

    Raises:
        StrategyError: no such metric or value.
    """
    if metric not in METRICS:
        raise StrategyError(f"sweep_figure: metric {metric!r} is none of {', '.join(METRICS)}.")
    shown, x = METRICS[metric], _axis_of(sweep, x)
    curves = _curves(sweep, x)
    limits = _limits(sweep) if metric == "memory" else {}
    divisor, unit = 1.0, shown.unit
    if metric == "memory":
        peaks = [shown.value(point) for points in curves.values() for point in points]
        divisor, unit = byte_scale(max([*peaks, *limits.values()], default=1.0))
    figure = go.Figure()
    for index, (name, points) in enumerate(curves.items()):
        xs = [point.values[x] for point in points]
        ys = [shown.value(point) / divisor for point in points]
        figure.add_trace(_curve(name, xs, ys, points, index, unit, colours))
    for name, limit in limits.items():
        _add_limit(figure, limit / divisor, f"memory of {name}", colours)
    detail = "hollow: does not fit" if any(not _fits(point) for points in curves.values() for point in points) else ""
    figure.update_layout(**base_layout(colours, shown.title, detail, showlegend=len(curves) > 1))
    figure.update_xaxes(**axis(colours, NAMES.get(x, x), showgrid=False))
    figure.update_yaxes(**axis(colours, unit, rangemode="tozero"))
    return figure


def parts_figure(sweep: Sweep, x: str | None = None, colours: Palette = LIGHT) -> go.Figure:
    """Where the seconds of a step go, as stacked bars: one for every point, in order."""
    x = _axis_of(sweep, x)
    points = [point for point in sweep.points if point.estimate is not None]
    others = [name for name in sweep.swept if name != x]
    values = [str(point.values[x]) for point in points]
    labels = [[_label(point.values, others) for point in points], values] if others else values
    fills = {"compute": colours.compute, "boxing": colours.boxing, "gradient": colours.boxing_tint,
             "bubble": colours.idle, "optimizer": colours.optimizer_step}  # fmt: skip
    figure = go.Figure()
    for part in PARTS:
        name = _PART_NAMES.get(part, part)
        figure.add_trace(
            go.Bar(
                x=labels,
                y=[getattr(point.estimate, f"{part}_s") for point in points],
                name=name,
                marker={"color": fills[part], "line": {"color": colours.muted, "width": 0.5}},
                hovertemplate=f"%{{x}}, {name}: %{{y:.3g}} s<extra></extra>",
            )
        )
    place = legend(colours, y=-0.34 if others else -0.22)
    title = base_layout(colours, "Where a step's time goes", "the slowest GPU", legend=place)
    figure.update_layout(**title, barmode="stack", bargap=0.35)
    kind = "multicategory" if others else "category"
    figure.update_xaxes(**axis(colours, NAMES.get(x, x), showgrid=False, type=kind, dividercolor=colours.line))
    figure.update_yaxes(**axis(colours, "s", rangemode="tozero"))
    return figure


def pipeline_figure(timeline: Timeline, colours: Palette = LIGHT) -> go.Figure:
    """The timeline of pipelines of any size: a row of colours per rank of the pipeline axis.

    A column of the picture is a slice of time and shows what the rank does in its middle.
    """
    rows = [spans for spans in timeline.spans if spans]
    if not rows:
        raise StrategyError("pipeline_figure: a timeline of 0 actions. Simulate with with_timeline=True.")
    start = min(spans[0].start_s for spans in rows)
    times = start + (np.arange(_NUM_COLUMNS) + 0.5) / _NUM_COLUMNS * timeline.makespan_s
    doing = np.array([_doing(spans, times) for spans in rows], dtype=np.uint8)
    fills = [colours.sunk, colours.forward, colours.backward]
    steps = [[edge, fills[index]] for index in range(3) for edge in (index / 3, (index + 1) / 3)]
    figure = go.Figure(
        go.Heatmap(
            z=doing,
            x=times - start,
            y=list(range(len(rows))),
            zmin=-0.5,
            zmax=2.5,
            colorscale=steps,
            showscale=False,
            hovertemplate="stage %{y}, %{x:.3g} s<extra></extra>",
        )
    )
    for word, fill in zip(("forward", "backward", "waits"), (fills[1], fills[2], fills[0]), strict=True):
        marker = {"color": fill, "symbol": "square", "size": 11, "line": {"color": colours.muted, "width": 0.5}}
        figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", name=word, marker=marker))
    detail = f"{len(rows)} ranks wait {timeline.bubble:.0%} of the time"
    height = min(560, max(220, 120 + 24 * len(rows)))
    place = legend(colours, y=-56 / (height - 92))
    figure.update_layout(**base_layout(colours, "Pipeline", detail, height=height, legend=place))
    figure.update_xaxes(**axis(colours, "s", showgrid=False))
    figure.update_yaxes(**axis(colours, "stage", showgrid=False, autorange="reversed"))
    return figure


def _doing(spans: Sequence[Any], times: np.ndarray) -> np.ndarray:
    """0 for waiting, 1 for forward, 2 for backward, at every time."""
    starts, stops = (np.array([getattr(span, name) for span in spans]) for name in ("start_s", "stop_s"))
    kinds = np.array([1 if span.action.kind == "F" else 2 for span in spans])
    index = np.searchsorted(starts, times, side="right") - 1
    is_busy = (index >= 0) & (times < stops[np.maximum(index, 0)])
    return np.where(is_busy, kinds[np.maximum(index, 0)], 0)


def _axis_of(sweep: Sweep, x: str | None) -> str:
    numbers = [name for name in sweep.swept if all(isinstance(p.values[name], int | float) for p in sweep.points)]
    if x is None:
        if not numbers:
            raise StrategyError("no number was swept: give wb.planner.simulate a list, e.g. gpus=[8, 16, 32].")
        return numbers[0]
    if x not in sweep.swept:
        raise StrategyError(f"{x!r} was not swept; swept were {', '.join(sweep.swept) or 'none'}.")
    return x


def _curves(sweep: Sweep, x: str) -> dict[str, list[Point]]:
    """The possible points, by the values that are not along the axis."""
    others = [name for name in sweep.swept if name != x]
    curves: dict[str, list[Point]] = {}
    for point in sweep.points:
        if point.estimate is not None:
            curves.setdefault(_label(point.values, others), []).append(point)
    return {name: sorted(points, key=lambda point: point.values[x]) for name, points in curves.items()}


def _label(values: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(
        str(values[name]) if name == "hardware" else f"{values[name]} {NAMES.get(name, name)}" for name in names
    )


def _curve(
    name: str, xs: list[Any], ys: list[float], points: Sequence[Point], index: int, unit: str, colours: Palette
) -> go.Scatter:
    colour = run_colour(colours, index)
    fills = [colour if _fits(point) else colours.background for point in points]
    marker = {"color": fills, "size": 9, "symbol": run_symbol(index), "line": {"color": colour, "width": 2}}
    return go.Scatter(
        x=xs,
        y=ys,
        name=name,
        mode="lines+markers",
        line={"color": colour, "width": 1.5},
        marker=marker,
        customdata=[point.row()["degrees"] for point in points],
        hovertemplate=f"{name} %{{x}}: %{{y:.4g}} {unit}, %{{customdata}}<extra></extra>",
    )


def _limits(sweep: Sweep) -> dict[str, float]:
    """Memory by machine; machines with equal memory share a line."""
    names: dict[float, dict[str, None]] = {}
    for point in sweep.points:
        names.setdefault(point.machine.memory_bytes, {})[point.machine.name] = None
    return {", ".join(known): size for size, known in names.items()}


def _add_limit(figure: go.Figure, value: float, text: str, colours: Palette) -> None:
    figure.add_hline(y=value, line={"color": colours.error, "width": 1.5})
    place = {"x": 1, "xref": "paper", "xanchor": "right", "y": value, "yanchor": "bottom", "showarrow": False}
    figure.add_annotation(text=text, font={"color": colours.error}, **place)


def _fits(point: Point) -> bool:
    return bool(point.row()["fits"])


def _share(point: Point, name: str) -> float:
    row = point.row()
    return float(row[name] / row["step_s"])
