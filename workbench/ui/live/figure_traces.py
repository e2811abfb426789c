"""The traces of the live figure before the first report of a run: empty, in their colours, on their axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.core.metrics import MEMORY_KINDS, MEMORY_LABELS
from workbench.theme import Palette
from workbench.ui.live import figure_layout as figure_layout
from workbench.ui.live.figure_layout import measured_y, shown_ranks
from workbench.ui.live.timeline_bars import KINDS

OTHER = "other"
"""Memory of a process at its peak that is none of the kinds: temporaries, what the allocator keeps, libraries."""


def curve_traces(colours: Palette) -> list[go.Scatter]:
    """Throughput, its running median and loss, each as settled points and newest points, and the traces behind them."""
    line, pale = {"color": colours.ink, "width": 1.5}, {"color": colours.idle, "width": 6}
    dashed = {"color": colours.muted, "width": 1, "dash": "dash"}
    nothing: dict[str, Any] = {"x": np.zeros(0), "y": np.zeros(0), "mode": "lines"}
    every = {"color": colours.idle, "width": 1}
    rate = nothing | {"line": every, "hovertemplate": "step %{x}: %{y:.4g} samples/s<extra></extra>"}
    median = nothing | {"line": line, "hovertemplate": "step %{x}: %{y:.4g} samples/s, median of 1 s<extra></extra>"}
    on_loss = {"xaxis": "x2", "yaxis": "y2"}
    loss = nothing | on_loss | {"line": line, "hovertemplate": "step %{x}: %{y:.6g}<extra></extra>"}
    expected = nothing | {"line": dashed, "hovertemplate": "predicted: %{y:.4g} samples/s<extra></extra>"}
    truth = nothing | on_loss | {"line": pale, "hovertemplate": "1 device, step %{x}: %{y:.6g}<extra></extra>"}
    return [
        go.Scatter(name="throughput", **rate),
        go.Scatter(name="throughput, newest", **rate),
        go.Scatter(name="predicted", **expected),
        go.Scatter(name="median", **median),
        go.Scatter(name="median, newest", **median),
        go.Scatter(name="1 device", **truth),
        go.Scatter(name="this run", **loss),
        go.Scatter(name="this run, newest", **loss),
    ]


def _labels(num_ranks: int) -> list[str]:
    return [f"rank {rank}" for rank in shown_ranks(num_ranks)]


def _bar_width(num_rows: int) -> float:
    return min(0.62, figure_layout.MEASURED * num_rows / figure_layout.PLOT_HEIGHT)


def memory_traces(num_ranks: int, colours: Palette) -> list[Any]:
    """A stacked bar per rank, a tick at its peak, a paler one at the predicted peak."""
    labels = _labels(num_ranks)
    zeros, empty = np.zeros(len(labels)), np.full(len(labels), np.nan)
    place = {"xaxis": "x3", "yaxis": "y3", "y": labels}
    shared = {"x": zeros, "base": zeros, "orientation": "h", "width": _bar_width(len(labels))} | place
    bars = [
        go.Bar(
            name=MEMORY_LABELS[kind],
            marker={"color": colours.memory[kind], "line": {"color": colours.background, "width": 0.5}},
            hovertemplate=f"%{{y}}, {MEMORY_LABELS[kind]}: %{{x:.3g}}<extra></extra>",
            **shared,
        )
        for kind in MEMORY_KINDS
    ]
    hover = f"%{{y}}, {OTHER}: temporaries, the allocator's spare, libraries: %{{x:.3g}}<extra></extra>"
    hatched = _hatched(colours) | {"line": {"color": colours.idle, "width": 0.5}}
    bars.append(go.Bar(name=OTHER, marker=hatched, hovertemplate=hover, **shared))
    tick = {"symbol": "line-ns", "size": 18, "color": colours.ink, "line": {"color": colours.ink, "width": 2}}
    dashed = {"symbol": "line-ns", "size": 12, "color": colours.muted, "line": {"color": colours.muted, "width": 2}}
    peaks = go.Scatter(
        name="peak of the process",
        x=empty,
        mode="markers",
        marker=tick,
        hovertemplate="%{y}, peak<extra></extra>",
        **place,
    )
    words = go.Scatter(
        name="peak in words",  # to the right of both ticks
        x=empty,
        mode="text",
        text=[""] * len(labels),
        textposition="middle right",
        textfont={"color": colours.ink, "size": 12},
        cliponaxis=False,
        hoverinfo="skip",
        **place,
    )
    expected = go.Scatter(name="predicted peak", x=empty, mode="markers", marker=dashed, hoverinfo="skip", **place)
    return [*bars, peaks, expected, words]


def split_traces(num_ranks: int, colours: Palette) -> list[go.Bar]:
    """Shares of every rank's time."""
    labels = _labels(num_ranks)
    zeros = np.zeros(len(labels))
    styles: dict[str, tuple[dict[str, Any], str]] = {
        "compute": ({"color": colours.compute}, "#10181f"),
        "boxing": ({"color": colours.boxing}, "#ffffff"),
        "waiting": (_hatched(colours), colours.ink),
    }
    return [
        go.Bar(
            name=name,
            x=zeros,
            y=labels,
            base=zeros,
            orientation="h",
            width=_bar_width(len(labels)),
            marker=marker | {"line": {"color": colours.background, "width": 0.5}},
            text=[""] * len(labels),
            hovertemplate=f"%{{y}}, {name}: %{{x:.0f}} %<extra></extra>",
            xaxis="x4",
            yaxis="y4",
            **_inside(ink),
        )
        for name, (marker, ink) in styles.items()
    ]


def _inside(ink: str) -> dict[str, Any]:
    """Text in the middle of a bar, never turned nor shrunk."""
    look = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "constraintext": "none"}
    return look | {"textfont": {"color": ink, "size": 12}}


def _hatched(colours: Palette) -> dict[str, Any]:
    pattern = {"shape": "/", "fgcolor": colours.idle, "bgcolor": "rgba(0,0,0,0)", "size": 5, "solidity": 0.35}
    return {"color": "rgba(0,0,0,0)", "pattern": pattern}


def timeline_traces(num_ranks: int, colours: Palette) -> list[go.Bar]:
    """Hatched ground for idle time, measured bars by kind, thin simulated ones by kind."""
    rows = range(len(shown_ranks(num_ranks)))
    place = {"orientation": "h", "xaxis": "x5", "yaxis": "y5"}
    idle = go.Bar(
        name="idle",
        x=np.zeros(len(rows)),
        y=np.array([measured_y(row) for row in rows]),
        base=0,
        width=figure_layout.MEASURED / figure_layout.ROW,
        marker=_hatched(colours) | {"line": {"width": 0}},
        hoverinfo="skip",
        **place,
    )
    nothing: dict[str, Any] = {"x": np.zeros(0), "y": np.zeros(0), "base": np.zeros(0), **place}
    measured = [
        go.Bar(
            name=f"{kind}, measured",
            width=figure_layout.MEASURED / figure_layout.ROW,
            marker={"color": getattr(colours, kind), "line": {"color": colours.background, "width": 0.5}},
            hovertemplate="%{customdata}<extra></extra>",
            **nothing,
            **_inside("#10181f"),
        )
        for kind in KINDS
    ]
    simulated = [
        go.Bar(
            name=f"{kind}, simulated",
            width=figure_layout.SIMULATED / figure_layout.ROW,
            opacity=0.6,
            marker={"color": getattr(colours, kind), "line": {"width": 0}},
            hovertemplate="%{customdata}<extra></extra>",
            **nothing,
        )
        for kind in KINDS
    ]
    return [idle, *measured, *simulated]
