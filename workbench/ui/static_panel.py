"""The panel without a kernel: the last state as plain HTML and text, for saved, exported and mailed notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from workbench.core.metrics import RunRecord
from workbench.core.seeds import over_seeds
from workbench.core.segments import by_strategy
from workbench.theme import style_sheet
from workbench.ui.assets import asset, element
from workbench.ui.pictures import panel_svg
from workbench.ui.runs.render_table import comparison_table_text

_SHEETS = ("static_grid.css", "predictions.css", "plan.css")


def static_html(text: str, view: dict[str, Any], predictions: str = "", runs: str = "", check: str = "") -> str:
    """Strategy, whether it is checked, layers, predictions (with the plan) and runs: one HTML fragment, no controls.

    The class ``wb-static`` lets the live panel hide it where both are on one page.
    """
    strategy = element(
        "p",
        element("b", text="Strategy "),
        element("code", text=text),
        element("span", text=f" \u00b7 {check}" if check else ""),
    )
    style = element("style", style_sheet(".wb-static"), *map(asset, _SHEETS))
    return element("div", style, strategy, static_grid_html(view), predictions, runs, css="wb-static")


def static_text(text: str, runs: Sequence[RunRecord], baseline: RunRecord | None, check: str = "") -> str:
    """The strategy, whether it is checked, and the table of runs in 80 columns."""
    table = [comparison_table_text(over_seeds(by_strategy(runs)), baseline)] if runs else []
    return "\n".join([f"Strategy: {text}", *filter(None, [check]), *table])


def check_text(num_steps: int) -> str:
    """Whether runs are compared with one device: ``"20 steps checked against one device"``."""
    return f"{num_steps} steps checked against one device" if num_steps else "not checked against one device"


_BEFORE = ("layer", "weight", "params", "choice", "sbp", "stage")
_BEHIND = ("activation", "boxing before it")
_HEIGHT, _GAP, _NOTE = 26.0, 4.0, 34.0


def static_grid_html(view: dict[str, Any]) -> str:
    """The rows of ``grid_view`` as a table; mistakes follow their rows."""
    ranks = element("th", _column_names(view), css="ranks")
    head = element("tr", *map(_title, _BEFORE), ranks, *map(_title, _BEHIND))
    body = "".join(_row(row, view) for row in view["rows"])
    total, parts = view["total"]
    foot = element("p", text=f"boxed per step {total} = {parts} \u00b7 {view['note']}", css="wb-quiet")
    return element("table", element("thead", head), element("tbody", body), css="wb-static-grid") + foot


def _title(text: str) -> str:
    return element("th", text=text)


def _row(row: dict[str, Any], view: dict[str, Any]) -> str:
    boxing = row["boxings"]["boxing"]
    mixed = row["choice_text"] == "mixed" and row["parallel"]
    before = (
        "\u2003" * row["depth"] + row["label"],
        row["weight"],
        row["params"],
        ", ".join(filter(None, (row["parallel"] if mixed else row["choice_text"], row["hint"]))),
        row["sbp"],
        row["stages_text"],
    )
    description = " ".join(filter(None, (boxing["change"], boxing["kind"], boxing["bytes"]))) if boxing else ""
    cells = element(
        "tr",
        *(element("td", text=text) for text in before),
        element("td", _pictures(row, view), css="ranks"),
        element("td", text=row["boxings"]["layout"]),
        element("td", element("b", text=description) if description else ""),
    )
    width = str(len(before) + 3)
    mistakes = "".join(
        element("tr", element("td", text=mistake["message"], colspan=width)) for mistake in row["mistakes"]
    )
    return cells + mistakes


# ---- who holds what --------------------------------------------------------------------------------------------------


def _column_names(view: dict[str, Any]) -> str:
    parts = [panel_svg.text(column["centre"], 13, column["label"], "middle") for column in view["columns"]]
    return panel_svg.svg(view["ranks_width"], 16, "ranks", *parts)


def _pictures(row: dict[str, Any], view: dict[str, Any]) -> str:
    """A picture for each column: the outline of the weight, and the part on the column's ranks."""
    columns = view["columns"]
    width = columns[1]["centre"] - columns[0]["centre"] if len(columns) > 1 else 2 * columns[0]["centre"]
    parts = []
    for index, column in enumerate(columns):
        held = [(picture["size"], picture["slices"][index]) for picture in row["pictures"] if picture["slices"][index]]
        parts += _column(held, column, width)
    words = [
        f"{column['label']}: {(row['pictures'][0]['slices'][index] or {}).get('text', 'nothing')}"
        for index, column in enumerate(columns)
        if row["pictures"]
    ]
    return panel_svg.svg(view["ranks_width"], _HEIGHT, "; ".join(words) or "shown in the rows below", *parts)


def _column(held: list[tuple[Any, Any]], column: dict[str, Any], width: float) -> list[str]:
    if not held:
        return [panel_svg.text(column["centre"], _HEIGHT / 2 + 4, "\u2013", "quiet middle")]
    note = held[0][1]["note"]
    natural = sum(size[0] + _GAP for size, _ in held) - _GAP
    scale = min(1.0, (width - (_NOTE if note else 8)) / natural)
    left = column["centre"] - natural * scale / 2 - (14 if note else 0)
    parts = []
    for size, held_part in held:
        parts += _slice(held_part, column["stage"], size[0] * scale, size[1] * sqrt(scale), left)
        left += (size[0] + _GAP) * scale
    if note:
        parts.append(panel_svg.text(column["centre"] + width / 2 - 4, _HEIGHT / 2 + 4, note, "quiet end"))
    return parts


def _slice(held: dict[str, Any], stage: int, width: float, height: float, left: float) -> list[str]:
    top = (_HEIGHT - height) / 2
    filled = [
        panel_svg.bar(
            left + part["x"] * width,
            top + part["y"] * height,
            max(part["w"] * width, 1),
            max(part["h"] * height, 1),
            f"var(--wb-stage-{stage % 4}{'-second' if part['shade'] % 2 else ''})",
        )
        for part in held["parts"]
    ]
    return [*filled, panel_svg.bar(left, top, width, height, "none", css="outline")]
