"""The panel without a kernel: the last state as plain HTML and text, for saved, exported and mailed notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.core.metrics import RunRecord
from workbench.core.segments import by_strategy
from workbench.theme import style_sheet
from workbench.ui.assets import asset, element
from workbench.ui.grid.static import static_grid_html
from workbench.ui.runs.tables import comparison_table_text

_SHEETS = ("static_grid.css", "predictions.css", "plan.css")


def static_html(text: str, view: dict[str, Any], predictions: str = "", runs: str = "") -> str:
    """Strategy, layers, predictions (with the plan) and runs as one HTML fragment without controls.

    The class ``wb-static`` lets the live panel hide it where both are on one page.
    """
    strategy = element("p", element("b", text="Strategy "), element("code", text=text))
    style = element("style", style_sheet(".wb-static"), *map(asset, _SHEETS))
    return element("div", style, strategy, static_grid_html(view), predictions, runs, css="wb-static")


def static_text(text: str, runs: Sequence[RunRecord], baseline: RunRecord | None) -> str:
    """The strategy and the table of runs in 80 columns."""
    return "\n".join([f"Strategy: {text}", *([comparison_table_text(by_strategy(runs), baseline)] if runs else [])])
