"""The live view of a run: throughput, loss, memory per rank and time split side by side in ONE figure.

One figure, because every plotly widget carries 5 MB of script. ``live_figure`` builds it, ``update`` puts a snapshot
into it; both work on a plain Figure and on a FigureWidget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.core.metrics import MEMORY_KINDS, RunRecord
from workbench.theme import LIGHT, PALETTES, Palette
from workbench.ui.assets import element
from workbench.ui.decimate import decimate
from workbench.ui.history import Snapshot
from workbench.ui.numbers import grouped
from workbench.ui.traces import (
    BAR_WIDTH,
    SHORT_MEMORY_LABELS,
    axis,
    base_layout,
    byte_scale,
    memory_traces,
    peak_trace,
    split_traces,
)
from workbench.units import format_bytes

WIDTH, HEIGHT = 1176, 214
_PANES = ((62, 284), (346, 578), (664, 838), (946, 1150))
_TITLE_LEFT = (12, 312, 608, 890)
_TOP, _BOTTOM = 42, 46
_BAR_PX = 22
_THROUGHPUT = 0
_TITLES = ("Throughput", "Loss", "Memory per rank", "Time split")


def live_figure(num_ranks: int, num_steps: int, colours: Palette = LIGHT) -> go.Figure:
    """The figure before the first step: axes over ``num_steps``, titles, and empty traces."""
    labels = [f"rank {rank}" for rank in range(num_ranks)]
    empty = np.full(num_ranks, np.nan)
    width = min(BAR_WIDTH, _BAR_PX * num_ranks / (HEIGHT - _TOP - _BOTTOM))
    figure = go.Figure(layout=_layout(colours, num_steps))
    figure.add_traces(_curves(colours))
    for trace in memory_traces(labels, [{}] * num_ranks, 1, "B", colours, width):
        figure.add_trace(trace.update(xaxis="x3", yaxis="y3"))
    figure.add_trace(peak_trace(labels, np.zeros(num_ranks), 1, "B", colours, xaxis="x3", yaxis="y3"))
    figure.data[-1].update(x=empty, text=[""] * num_ranks)
    for trace in split_traces(labels, np.zeros(num_ranks), colours, width):
        figure.add_trace(trace.update(x=np.zeros(num_ranks), xaxis="x4", yaxis="y4"))
    return figure


def legend_html() -> str:
    """What the colours mean, one group under each pane. HTML, because plotly's legends would share one place."""
    curves = (("ink line", "this run"), ("idle line", "1 device"))
    memory = tuple((f"memory-{kind}", SHORT_MEMORY_LABELS[kind]) for kind in MEMORY_KINDS)
    split = (("compute", "compute"), ("boxing", "boxing and waiting"))
    groups = ((("ink line", "batch / step time"),), curves, memory, split)
    return element("div", *(element("div", *(_key(*entry) for entry in group)) for group in groups), css="wb-legend")


def _key(colour: str, text: str) -> str:
    name, _, shape = colour.partition(" ")
    swatch = element("i", css=shape, style=f"background:var(--wb-{name})")
    return element("span", swatch, element("span", text=text))


def update(figure: go.Figure, snapshot: Snapshot, colours: Palette = LIGHT) -> None:
    """Put ``snapshot`` into the figure, in one message when it is a widget."""
    with figure.batch_update():
        _set_curve(figure, "throughput", snapshot.rate_steps, snapshot.samples_per_s)
        _set_curve(figure, "this run", snapshot.loss_steps, snapshot.losses)
        unit = _set_memory(figure, snapshot)
        _set_split(figure, snapshot)
        figure.layout.xaxis3.title.text = unit
        for index, detail in enumerate(_details(snapshot)):
            figure.layout.annotations[index].text = _title(index, detail, colours)


def set_one_device(figure: go.Figure, losses: Sequence[float]) -> None:
    """Put the one-device losses behind the run's."""
    values = np.asarray(losses, dtype=float)
    with figure.batch_update():
        _set_curve(figure, "1 device", *decimate(np.arange(1, len(values) + 1), values))


def begin(figure: go.Figure, num_steps: int, colours: Palette = LIGHT) -> None:
    """Empty the figure for a new run of ``num_steps``."""
    num_ranks = len(_trace(figure, "compute").y)
    fresh = live_figure(num_ranks, num_steps, colours)
    with figure.batch_update():
        for trace, new in zip(figure.data, fresh.data, strict=True):
            trace.x = new.x
            if new.type == "scatter" and new.mode == "lines":
                trace.y = new.y
            elif new.type == "scatter":
                trace.text = new.text
        figure.layout.xaxis.range = figure.layout.xaxis2.range = [0, num_steps]
        for annotation, new in zip(figure.layout.annotations, fresh.layout.annotations, strict=True):
            annotation.text = new.text


def show_record(figure: go.Figure, record: RunRecord, colours: Palette = LIGHT) -> None:
    """Put a finished run's curves in place of the points that were reported while it ran."""
    steps = np.arange(1, len(record.losses) + 1)
    times_s = np.array(record.step_times_s, dtype=float)
    rates = record.batch_size / np.where(times_s > 0, times_s, np.nan)
    with figure.batch_update():
        _set_curve(figure, "throughput", *decimate(np.arange(1, len(rates) + 1), rates))
        _set_curve(figure, "this run", *decimate(steps, np.array(record.losses, dtype=float)))
        figure.layout.annotations[_THROUGHPUT].text = _title(
            _THROUGHPUT, f"{grouped(record.samples_per_s)} samples/s, median", colours
        )


def restyle(figure: go.Figure, colours: Palette) -> None:
    """The same figure in the colours of another theme."""
    num_ranks = len(_trace(figure, "compute").y)
    fresh = live_figure(num_ranks, 1, colours)
    with figure.batch_update():
        for trace, new in zip(figure.data, fresh.data, strict=True):
            for part in ("line", "marker", "textfont"):
                if part in new:
                    trace[part].update(new[part].to_plotly_json())
        figure.layout.font.color = colours.ink
        figure.layout.hoverlabel = fresh.layout.hoverlabel
        for annotation in figure.layout.annotations:
            annotation.font.color = colours.ink
            annotation.text = _recoloured(annotation.text, colours)
        for name in (f"{letter}axis{number}" for letter in "xy" for number in ("", 2, 3, 4)):
            for part in ("gridcolor", "linecolor", "tickfont"):
                figure.layout[name][part] = fresh.layout[name][part]
            figure.layout[name].title.font = fresh.layout[name].title.font


def _recoloured(title: str, colours: Palette) -> str:
    """A title whose quiet part is muted as in ``colours``."""
    for palette in PALETTES.values():
        title = title.replace(palette.muted, colours.muted)
    return title


def _curves(colours: Palette) -> list[go.Scatter]:
    line, pale = {"color": colours.ink, "width": 1.5}, {"color": colours.idle, "width": 6}
    nothing: dict[str, Any] = {"x": np.zeros(0), "y": np.zeros(0), "mode": "lines"}
    rate_hover = "step %{x}: %{y:.4g} samples/s<extra></extra>"
    loss_hover = "%{fullData.name}, step %{x}: %{y:.6g}<extra></extra>"
    on_loss = {"xaxis": "x2", "yaxis": "y2", "hovertemplate": loss_hover}
    return [
        go.Scatter(name="throughput", line=line, hovertemplate=rate_hover, **nothing),
        go.Scatter(name="1 device", line=pale, **nothing, **on_loss),
        go.Scatter(name="this run", line=line, **nothing, **on_loss),
    ]


def _layout(colours: Palette, num_steps: int) -> dict[str, Any]:
    """Four panes at fixed places, so that a number that grows never moves its neighbour."""
    layout = base_layout(colours, "", width=WIDTH, height=HEIGHT, barmode="stack", margin=dict.fromkeys("lrtb", 0))
    layout |= {"showlegend": False, "annotations": [_title_annotation(index, colours) for index in range(len(_PANES))]}
    by_step = axis(colours, "step", showgrid=False, automargin=False, range=[0, num_steps], nticks=5)
    by_rank = axis(colours, "", autorange="reversed", showgrid=False, automargin=False)
    upward = axis(colours, "loss", rangemode="tozero", automargin=False, nticks=5)
    panes = (
        (by_step, axis(colours, "samples/s", rangemode="tozero", automargin=False, nticks=5)),
        (by_step, upward),
        (axis(colours, "B", rangemode="tozero", automargin=False, nticks=4), by_rank),
        (axis(colours, "% of the step", range=[0, 100], automargin=False, dtick=25), by_rank),
    )
    for index, (x_axis, y_axis) in enumerate(panes):
        suffix = str(index + 1) if index else ""
        left, right = _PANES[index]
        layout[f"xaxis{suffix}"] = x_axis | {"domain": [left / WIDTH, right / WIDTH], "anchor": f"y{suffix}"}
        layout[f"yaxis{suffix}"] = y_axis | {"domain": [_BOTTOM / HEIGHT, 1 - _TOP / HEIGHT], "anchor": f"x{suffix}"}
    return layout


def _title_annotation(index: int, colours: Palette) -> dict[str, Any]:
    left = (12, 312, 608, 902)[index]
    place = {
        "x": left / WIDTH,
        "y": 1 - 8 / HEIGHT,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "top",
    }
    font = {"size": 13, "color": colours.ink}
    return place | {"text": _title(index, "", colours), "showarrow": False, "font": font, "align": "left"}


def _title(index: int, detail: str, colours: Palette) -> str:
    quiet = f' <span style="font-size:12px;color:{colours.muted}">{detail}</span>' if detail else ""
    return f"<b>{_TITLES[index]}</b>{quiet}"


def _details(snapshot: Snapshot) -> tuple[str, str, str, str]:
    rate, loss = snapshot.latest_rate, snapshot.latest_loss
    peak = max(snapshot.peak_bytes, default=0)
    return (
        f"{grouped(rate)} samples/s now" if rate is not None else "",
        f"{loss:.4g} at step {snapshot.last_step}" if loss is not None else "",
        f"tick: peak, {format_bytes(peak)}" if peak else "",
        "last 20 steps",
    )


def _trace(figure: go.Figure, name: str) -> Any:
    return next(trace for trace in figure.data if trace.name == name)


def _set_curve(figure: go.Figure, name: str, x: np.ndarray, y: np.ndarray) -> None:
    trace = _trace(figure, name)
    trace.x, trace.y = x, np.asarray(y, dtype=float)


def _set_memory(figure: go.Figure, snapshot: Snapshot) -> str:
    """Put bars and ticks in place; the unit that the axis now has."""
    divisor, unit = byte_scale(max(snapshot.peak_bytes, default=0))
    bars = [trace for trace in figure.data if trace.type == "bar" and trace.xaxis == "x3"]
    for kind, trace in zip(MEMORY_KINDS, bars, strict=True):
        trace.x = np.array([memory.get(kind, 0) for memory in snapshot.memory_by_kind], dtype=float) / divisor
    ticks = _trace(figure, "peak of the process")
    ticks.x = np.array(snapshot.peak_bytes, dtype=float) / divisor
    ticks.text = [format_bytes(peak) for peak in snapshot.peak_bytes]
    return unit


def _set_split(figure: go.Figure, snapshot: Snapshot) -> None:
    boxing = np.array(snapshot.boxing_shares, dtype=float) * 100
    _trace(figure, "compute").x = 100 - boxing
    _trace(figure, "boxing and waiting").x = boxing
