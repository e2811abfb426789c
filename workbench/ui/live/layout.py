"""Where the parts of the live figure are, in pixels: four panes side by side, and the timeline below them."""

from __future__ import annotations

from typing import Any

from workbench.theme import Palette
from workbench.ui.traces import axis, base_layout

WIDTH = 1176
PANES_HEIGHT = 212
PANES = ((48, 278), (342, 572), (650, 866), (942, 1146))
"""Left and right edge of every pane's plot."""
TITLES_LEFT = (12, 306, 601, 896)
TOP, BOTTOM = 42, 50
"""Of the panes: from the figure's top to their plots, and from the plots to the panes' end."""
TITLES = ("Throughput", "Loss", "Memory", "Time split")
TIMELINE_LEFT, TIMELINE_RIGHT = 96, 1150
TIMELINE_TOP = PANES_HEIGHT + 40
ROW = 38
MEASURED, SIMULATED = 18, 6
"""Heights of bars in a timeline's row, and of the row."""
MAX_ROWS = 16
_LEAST_STEPS = 20
TIMELINE_TITLE = 4
"""Index of the timeline's title among the annotations; before it come the panes'."""
PLOT_HEIGHT = PANES_HEIGHT - TOP - BOTTOM


def height(num_rows: int) -> int:
    """Of the whole figure."""
    return TIMELINE_TOP + ROW * num_rows + 28


def shown_ranks(num_ranks: int) -> list[int]:
    """All ranks, or as many as there are rows for, evenly over all of them: neighbours do alike."""
    if num_ranks <= MAX_ROWS:
        return list(range(num_ranks))
    return [rank * num_ranks // MAX_ROWS for rank in range(MAX_ROWS)]


def steps_shown(last_step: int, num_steps: int) -> int:
    """Up to which step the curves' axes go: a round number that the run has not reached, or all of its steps.

    >>> [steps_shown(step, 1000) for step in (0, 30, 222, 640, 990)]
    [20, 30, 300, 700, 1000]
    """
    ends = (int(10**power * part) for power in range(1, 12) for part in (1, 1.5, 2, 3, 5, 7))
    end = next(end for end in ends if end >= max(last_step, _LEAST_STEPS))
    return min(end, num_steps) if num_steps else end


def layout(num_ranks: int, num_steps: int, colours: Palette) -> dict[str, Any]:
    """The figure's layout: every part at a fixed place, so that a number that grows never moves its neighbour."""
    num_rows = len(shown_ranks(num_ranks))
    full = height(num_rows)
    made = base_layout(colours, "", width=WIDTH, height=full, barmode="overlay", margin=dict.fromkeys("lrtb", 0))
    made["modebar"] = {"orientation": "h", "bgcolor": "rgba(0,0,0,0)", "color": colours.muted}
    made |= {"showlegend": False, "dragmode": "zoom", "bargap": 0, "annotations": notes(full, colours)}
    by_step = axis(colours, "", showgrid=False, automargin=False, range=[0, steps_shown(0, num_steps)], nticks=5)
    by_step |= {"tickprefix": "step ", "showtickprefix": "last"}
    upward = axis(colours, "", rangemode="tozero", automargin=False, nticks=6)
    by_rank = axis(colours, "", autorange="reversed", showgrid=False, automargin=False)
    if num_rows > 8:
        by_rank |= {"nticks": 8}
    unit_last = {"showticksuffix": "last"}
    panes = (
        (by_step, upward),
        (by_step, upward),
        (axis(colours, "", rangemode="tozero", automargin=False, nticks=5) | unit_last, by_rank),
        (axis(colours, "", range=[0, 100], automargin=False, dtick=25, ticksuffix=" %") | unit_last, by_rank),
    )
    bottom = (full - PANES_HEIGHT + BOTTOM) / full, (full - TOP) / full
    for index, (x_axis, y_axis) in enumerate(panes):
        suffix = str(index + 1) if index else ""
        left, right = PANES[index]
        made[f"xaxis{suffix}"] = x_axis | {"domain": [left / WIDTH, right / WIDTH], "anchor": f"y{suffix}"}
        made[f"yaxis{suffix}"] = y_axis | {"domain": list(bottom), "anchor": f"x{suffix}"}
    made |= _timeline_axes(num_ranks, full, colours)
    return made


def _timeline_axes(num_ranks: int, full: int, colours: Palette) -> dict[str, Any]:
    ranks = shown_ranks(num_ranks)
    quiet = f'<span style="color:{colours.muted}">simulated</span>'
    positions = [place for row in range(len(ranks)) for place in (measured_y(row), simulated_y(row))]
    texts = [text for rank in ranks for text in (f"rank {rank}", quiet)]
    x_axis = axis(colours, "", showgrid=False, automargin=False, rangemode="tozero", nticks=12, ticks="outside")
    y_axis = axis(colours, "", showgrid=False, automargin=False, range=[len(ranks), 0], fixedrange=True)
    y_axis |= {"tickvals": positions, "ticktext": texts, "showline": False}
    y_axis["tickfont"] = {"size": 12, "color": colours.ink}
    top, bottom = (full - TIMELINE_TOP) / full, (full - TIMELINE_TOP - ROW * len(ranks)) / full
    return {
        "xaxis5": x_axis
        | {"domain": [TIMELINE_LEFT / WIDTH, TIMELINE_RIGHT / WIDTH], "anchor": "y5", "showticksuffix": "last"},
        "yaxis5": y_axis | {"domain": [bottom, top], "anchor": "x5"},
    }


def measured_y(row: int) -> float:
    """Where the middle of a row's measured bars is, in rows."""
    return row + (2 + MEASURED / 2) / ROW


def simulated_y(row: int) -> float:
    """Where the middle of a row's simulated bars is, in rows."""
    return row + (2 + MEASURED + 4 + SIMULATED / 2) / ROW


def notes(full: int, colours: Palette) -> list[dict[str, Any]]:
    """Titles of the panes and of the timeline, then legends under the panes and beside the timeline's title."""
    titles = [
        _note(left, 10, title(name, "", colours), full, colours, 13)
        for left, name in zip(TITLES_LEFT, TITLES, strict=True)
    ]
    titles.append(_note(TITLES_LEFT[0], PANES_HEIGHT + 10, title("Timeline", "", colours), full, colours, 13))
    legends = [
        _note(left, PANES_HEIGHT - 28, text, full, colours)
        for left, text in zip(TITLES_LEFT, _legends(colours), strict=True)
    ]
    return [
        *titles,
        *legends,
        _note(WIDTH - 12, PANES_HEIGHT + 11, _timeline_legend(colours), full, colours, right=True),
    ]


def title(name: str, detail: str, colours: Palette) -> str:
    """A bold name and a quiet detail."""
    return f"<b>{name}</b>" + (f' <span style="font-size:12px;color:{colours.muted}">{detail}</span>' if detail else "")


def _note(
    x: float, y: float, text: str, full: int, colours: Palette, size: int = 12, right: bool = False
) -> dict[str, Any]:
    return {
        "x": x / WIDTH,
        "y": 1 - y / full,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "right" if right else "left",
        "yanchor": "top",
        "text": text,
        "showarrow": False,
        "font": {"size": size, "color": colours.ink},
        "align": "left",
    }


def _legends(colours: Palette) -> tuple[str, ...]:
    memory = zip(("param.", "grad.", "optim.", "activ.", "boxing"), colours.memory.values(), strict=True)
    return (
        _key("\u2501", colours.ink, "median of 1 s")
        + _key("\u2501", colours.idle, "each step")
        + _key("\u2504", colours.muted, "predicted"),
        _key("\u2501", colours.ink, "this run") + _key("\u2501", colours.idle, "1 device"),
        "".join(_key("\u25a0", colour, name) for name, colour in memory),
        _key("\u25a0", colours.compute, "compute")
        + _key("\u25a0", colours.boxing, "boxing")
        + _key("\u25a8", colours.idle, "waiting (last 20 steps)"),
    )


def _timeline_legend(colours: Palette) -> str:
    kinds = (
        ("\u25a0", colours.forward, "F forward"),
        ("\u25a0", colours.backward, "B backward"),
        ("\u25a0", colours.boxing, "boxing"),
        ("\u25a0", colours.optimizer_step, "optimizer"),
        ("\u25a8", colours.idle, "idle"),
    )
    return "".join(_key(*kind) for kind in kinds)


def _key(sign: str, colour: str, name: str) -> str:
    return f'<span style="color:{colour}">{sign}</span>{name} '
