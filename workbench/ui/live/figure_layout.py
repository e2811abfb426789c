"""The places of the live figure's parts, in pixels: four panes in one row or two, and the timeline below them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.theme import Palette
from workbench.ui.figure_parts import axis, base_layout, titled
from workbench.units import format_bytes

ONE_ROW, WIDEST, NARROWEST = 1176, 1680, 600
PANES_HEIGHT = 212
_MARGINS = ((48, 16), (48, 36), (62, 16), (60, 30))
"""Left and right of every pane's plot, within its column: numbers and labels. In a last column, half of the last step's
label lies to the right: plotly leaves one out that is cut."""
TOP, BOTTOM = 42, 50
"""Of the panes: from the figure's top to their plots, and from the plots to the panes' end."""
TITLES = ("Throughput", "Loss", "Memory", "Time split")
TIMELINE_LEFT = 96
ROW = 38
MEASURED, SIMULATED = 18, 6
"""Heights of bars in a timeline's row, and of the row."""
MAX_ROWS = 16
_LEAST_STEPS = 20
TIMELINE_TITLE = 4
"""Index of the timeline's title among the annotations; before it come the panes', after it their legends."""
RATE_LEGEND = TIMELINE_TITLE + 1
LOSS_LEGEND = RATE_LEGEND + 1
PLOT_HEIGHT = PANES_HEIGHT - TOP - BOTTOM


@dataclass(frozen=True, slots=True)
class Frame:
    """The places in a figure of ``width`` pixels. A narrow one has two rows of panes.

    >>> Frame(1176).pane(1), Frame(840).pane(1)
    ((342, 552, 42), (468, 804, 42))
    """

    width: int = ONE_ROW

    @classmethod
    def within(cls, width_px: float) -> Frame:
        """The widest frame that fits, in steps of 24 pixels."""
        return cls(int(min(max(width_px, NARROWEST), WIDEST)) // 24 * 24)

    @property
    def num_columns(self) -> int:
        """Number of panes in a row."""
        return 4 if self.width >= ONE_ROW else 2

    @property
    def panes_bottom(self) -> int:
        """The end of the last row of panes."""
        return PANES_HEIGHT * 4 // self.num_columns

    @property
    def timeline_top(self) -> int:
        """The top of the timeline's first row."""
        return self.panes_bottom + 40

    @property
    def timeline_right(self) -> int:
        """The right end of the timeline's longest bars."""
        return self.width - 26

    def corner(self, index: int) -> tuple[int, int]:
        """Left and top of a pane."""
        row, column = divmod(index, self.num_columns)
        return column * self.width // self.num_columns, row * PANES_HEIGHT

    def pane(self, index: int) -> tuple[int, int, int]:
        """Left, right and top of a pane's plot, which is ``PLOT_HEIGHT`` high."""
        left, top = self.corner(index)
        before, after = _MARGINS[index]
        return left + before, left + self.width // self.num_columns - after, top + TOP

    def height(self, num_rows: int) -> int:
        """The height of the figure with a timeline of ``num_rows`` rows. A narrow timeline has its legend below it."""
        return self.timeline_top + ROW * num_rows + (28 if self.num_columns == 4 else 52)


WIDE = Frame()


def shown_ranks(num_ranks: int) -> list[int]:
    """All ranks, or an even choice of as many as there are rows for; neighbours have similar times."""
    if num_ranks <= MAX_ROWS:
        return list(range(num_ranks))
    return [rank * num_ranks // MAX_ROWS for rank in range(MAX_ROWS)]


def steps_shown(last_step: int, num_steps: int) -> int:
    """The last step on the curves' axes: a round number that the run has not reached, or all its steps.

    >>> [steps_shown(step, 1000) for step in (0, 30, 222, 640, 990)]
    [20, 30, 300, 700, 1000]
    """
    ends = (int(10**power * part) for power in range(1, 12) for part in (1, 1.5, 2, 3, 5, 7))
    end = next(end for end in ends if end >= max(last_step, _LEAST_STEPS))
    return min(end, num_steps) if num_steps else end


def layout(num_ranks: int, num_steps: int, colours: Palette, frame: Frame = WIDE) -> dict[str, Any]:
    """The figure's layout. Every part has a fixed place, so that a growing number moves no neighbour."""
    num_rows = len(shown_ranks(num_ranks))
    full = frame.height(num_rows)
    flat: dict[str, Any] = {"barmode": "overlay", "margin": dict.fromkeys("lrtb", 0)}
    made = base_layout(colours, "", width=frame.width, height=full, **flat)
    made["modebar"] = {"orientation": "h", "bgcolor": "rgba(0,0,0,0)", "color": colours.muted}
    made |= {"showlegend": False, "dragmode": "zoom", "bargap": 0, "annotations": notes(frame, full, colours)}
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
    for index, (x_axis, y_axis) in enumerate(panes):
        suffix = str(index + 1) if index else ""
        left, right, top = frame.pane(index)
        across, upwards = (left, right), (full - top - PLOT_HEIGHT, full - top)
        made[f"xaxis{suffix}"] = x_axis | {"domain": [x / frame.width for x in across], "anchor": f"y{suffix}"}
        made[f"yaxis{suffix}"] = y_axis | {"domain": [y / full for y in upwards], "anchor": f"x{suffix}"}
    made |= _timeline_axes(num_ranks, frame, full, colours)
    return made


def _timeline_axes(num_ranks: int, frame: Frame, full: int, colours: Palette) -> dict[str, Any]:
    ranks = shown_ranks(num_ranks)
    quiet = f'<span style="color:{colours.muted}">simulated</span>'
    positions = [place for row in range(len(ranks)) for place in (measured_y(row), simulated_y(row))]
    texts = [text for rank in ranks for text in (f"rank {rank}", quiet)]
    x_axis = axis(colours, "", showgrid=False, automargin=False, rangemode="tozero", nticks=12, ticks="outside")
    y_axis = axis(colours, "", showgrid=False, automargin=False, range=[len(ranks), 0], fixedrange=True)
    y_axis |= {"tickvals": positions, "ticktext": texts, "showline": False}
    y_axis["tickfont"] = {"size": 12, "color": colours.ink}
    above = full - frame.timeline_top
    upwards = [(above - ROW * len(ranks)) / full, above / full]
    across = [TIMELINE_LEFT / frame.width, frame.timeline_right / frame.width]
    return {
        "xaxis5": x_axis | {"domain": across, "anchor": "y5", "showticksuffix": "last"},
        "yaxis5": y_axis | {"domain": upwards, "anchor": "x5"},
    }


def measured_y(row: int) -> float:
    """The middle of a row's measured bars, in rows."""
    return row + (2 + MEASURED / 2) / ROW


def simulated_y(row: int) -> float:
    """The middle of a row's simulated bars, in rows."""
    return row + (2 + MEASURED + 4 + SIMULATED / 2) / ROW


def notes(frame: Frame, full: int, colours: Palette) -> list[dict[str, Any]]:
    """Titles of the panes and of the timeline, then legends under the panes and beside the timeline's title."""

    def note(x: float, y: float, text: str, size: int = 12, right: bool = False) -> dict[str, Any]:
        return {
            "x": x / frame.width,
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

    corners = [frame.corner(index) for index in range(len(TITLES))]
    titles = [note(x + 12, y + 10, titled(name, "", colours), 13) for (x, y), name in zip(corners, TITLES, strict=True)]
    titles.append(note(12, frame.panes_bottom + 10, titled("Timeline", "", colours), 13))
    keys = zip(corners, _legends(colours), strict=True)
    legends = [note(x + 12, y + PANES_HEIGHT - 28, text) for (x, y), text in keys]
    beside = frame.panes_bottom + 11 if frame.num_columns == 4 else full - 22
    return [*titles, *legends, note(frame.width - 12, beside, _timeline_legend(colours), right=True)]


def rate_legend(colours: Palette, has_prediction: bool) -> str:
    """The legend of the throughput's lines."""
    keys = _key("\u2501", colours.ink, "median of 1 s") + _key("\u2501", colours.idle, "each step")
    return keys + (_key("\u2504", colours.muted, "predicted") if has_prediction else "")


def loss_legend(colours: Palette, has_one_device: bool) -> str:
    """The legend of the loss's lines."""
    return _key("\u2501", colours.ink, "this run") + (
        _key("\u2501", colours.idle, "1 device") if has_one_device else ""
    )


def _legends(colours: Palette) -> tuple[str, ...]:
    memory = zip(("param.", "grad.", "optim.", "activ.", "boxing"), colours.memory.values(), strict=True)
    return (
        rate_legend(colours, has_prediction=False),
        loss_legend(colours, has_one_device=False),
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
    return f'<span style="color:{colour}">{sign}</span>\u2009{name} '


def limit_text(limit_bytes: float, machine: str = "") -> str:
    """``h200: 141 GB``, and ``limit 141 GB`` of a machine without a name."""
    return f"{machine}: {format_bytes(limit_bytes)}" if machine else f"limit {format_bytes(limit_bytes)}"
