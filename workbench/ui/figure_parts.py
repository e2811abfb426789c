"""Building blocks of the figures: axes, traces and annotations in one look. Data in, plotly objects out.

Used by ``run_figures`` and by the live figure, whose panes show the same curves side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.core.metrics import MEMORY_KINDS
from workbench.theme import UI_FONT, Palette
from workbench.units import format_bytes

MEMORY_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "buffers": "boxing buffers",
}
_BYTES_PER_UNIT = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
_NUM_MARKERS = 6
ROW_HEIGHT = 26
BAR_WIDTH = 0.62
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon")


def byte_scale(largest: float) -> tuple[float, str]:
    """Divisor and unit for an axis that reaches ``largest`` bytes: ``byte_scale(3e6)`` -> ``(1e6, 'MB')``."""
    unit = format_bytes(largest).split()[1]
    return _BYTES_PER_UNIT[unit], unit


def run_colour(colours: Palette, index: int) -> str:
    """Colour of the ``index``-th run of a comparison: first shades of all hues, then second shades."""
    shade, hue = divmod(index, len(colours.stages))
    return colours.stages[hue].shades[shade % 2]


def run_symbol(index: int) -> str:
    """Marker of the ``index``-th run, so that colour is never the only difference."""
    return _SYMBOLS[index % len(_SYMBOLS)]


def axis(colours: Palette, title: str, **more: Any) -> dict[str, Any]:
    """One axis: title with unit, light grid, no zero line, never zoomed by accident."""
    settings = {
        "title": {"text": title, "font": {"size": 12, "color": colours.muted}, "standoff": 6},
        "tickfont": {"size": 12, "color": colours.muted},
        "gridcolor": colours.line,
        "linecolor": colours.strong_line,
        "zeroline": False,
        "automargin": True,
        "ticks": "",
    }
    return settings | more


def titled(name: str, detail: str, colours: Palette) -> str:
    """A bold name and a quiet detail."""
    return f"<b>{name}</b>" + (f' <span style="font-size:12px;color:{colours.muted}">{detail}</span>' if detail else "")


def base_layout(colours: Palette, title: str, detail: str = "", **more: Any) -> dict[str, Any]:
    """Layout shared by all figures: transparent ground, left title with a quiet second part, no animation."""
    settings = {
        "title": {
            "text": titled(title, detail, colours),
            "font": {"size": 13},
            "x": 0,
            "xref": "paper",
            "y": 1,
            "yref": "container",
            "pad": {"t": 12},
            "yanchor": "top",
        },
        "font": {"family": UI_FONT, "size": 12, "color": colours.ink},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 56, "r": 20, "t": 44, "b": 48},
        "legend": legend(colours),
        "hoverlabel": {"bgcolor": colours.background, "font": {"color": colours.ink, "size": 12}},
        "height": 320,
        "template": "none",
    }
    return settings | more


def rows_layout(colours: Palette, title: str, detail: str, num_rows: int, **more: Any) -> dict[str, Any]:
    """``base_layout`` for horizontal bars: rows are ``ROW_HEIGHT`` px high, the legend fits under the axis."""
    plot_height = ROW_HEIGHT * max(num_rows, 1)
    margin = {"l": 56, "r": 84, "t": 40, "b": 96}
    place = legend(colours, y=-46 / plot_height)
    height = plot_height + margin["t"] + margin["b"]
    return base_layout(colours, title, detail, height=height, margin=margin, legend=place) | more


def legend(colours: Palette, **more: Any) -> dict[str, Any]:
    """A horizontal legend under the plot, so that it never covers data."""
    place = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "xanchor": "left", "traceorder": "normal"}
    return place | {"font": {"size": 12, "color": colours.ink}, "bgcolor": "rgba(0,0,0,0)"} | more


def one_device_trace(steps: np.ndarray, losses: np.ndarray, colours: Palette) -> go.Scatter:
    """The one-device losses: a broad pale line that other curves are drawn upon."""
    line = {"color": colours.idle, "width": 7}
    hover = "1 device, step %{x}: %{y:.6g}<extra></extra>"
    return go.Scatter(x=steps, y=losses, name="1 device", mode="lines", line=line, hovertemplate=hover)


def stepwise_traces(
    steps: np.ndarray, values: np.ndarray, name: str, index: int, num_runs: int, colours: Palette
) -> list[go.Scatter]:
    """One run's curve by step, and its markers. The runs' markers sit at different steps: equal curves stay visible."""
    colour = run_colour(colours, index)
    hover = f"{name}, step %{{x}}: %{{y:.4g}}<extra></extra>"
    marked = _marked(len(steps), index, num_runs)
    line = {"color": colour, "width": 1.5}
    marker = {"color": colour, "size": 8, "symbol": run_symbol(index)}
    shared = {"legendgroup": name, "hovertemplate": hover}
    return [
        go.Scatter(x=steps, y=values, name=name, mode="lines", line=line, showlegend=False, **shared),
        go.Scatter(x=steps[marked], y=values[marked], name=name, mode="markers", marker=marker, **shared),
    ]


def _marked(num_points: int, index: int, num_runs: int) -> np.ndarray:
    """Positions of the ``index``-th run's markers: at least one, about ``_NUM_MARKERS``, shifted from run to run."""
    stride = max(num_points // _NUM_MARKERS, num_runs, 1)
    return np.arange(index * stride // max(num_runs, 1) % max(num_points, 1), num_points, stride)


def memory_traces(
    labels: Any,
    memory_by_kind: Sequence[dict[str, int]],
    divisor: float,
    unit: str,
    colours: Palette,
    width: float = BAR_WIDTH,
) -> list[go.Bar]:
    """Stacked horizontal bars, one trace per kind of memory, one bar per rank."""
    traces = []
    for kind in MEMORY_KINDS:
        values = np.array([memory.get(kind, 0) for memory in memory_by_kind], dtype=float) / divisor
        name = MEMORY_LABELS[kind]
        traces.append(
            go.Bar(
                x=values,
                y=labels,
                name=name,
                orientation="h",
                width=width,
                marker={"color": colours.memory[kind], "line": {"color": colours.background, "width": 0.5}},
                hovertemplate=f"%{{y}}, {name}: %{{x:.3g}} {unit}<extra></extra>",
            )
        )
    return traces


def peak_trace(labels: Any, peaks: np.ndarray, divisor: float, unit: str, colours: Palette, **more: Any) -> go.Scatter:
    """A tick with its number where the rank's memory peaked."""
    values = np.asarray(peaks, dtype=float) / divisor
    return go.Scatter(
        x=values,
        y=labels,
        name="peak of the process",
        mode="markers+text",
        marker={"symbol": "line-ns", "size": 18, "line": {"color": colours.ink, "width": 2}, "color": colours.ink},
        text=[format_bytes(peak) for peak in peaks],
        textposition="middle right",
        textfont={"color": colours.ink, "size": 12},
        hovertemplate=f"%{{y}}, peak: %{{x:.3g}} {unit}<extra></extra>",
        cliponaxis=False,
        **more,
    )
