"""The panel without a kernel: the last state as plain HTML and text, for saved, exported and mailed notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.core.metrics import RunRecord
from workbench.core.segments import by_strategy
from workbench.theme import style_sheet
from workbench.ui.assets import asset, element
from workbench.ui.grid.static_table import static_grid_html
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
    table = [comparison_table_text(by_strategy(runs), baseline)] if runs else []
    return "\n".join([f"Strategy: {text}", *filter(None, [check]), *table])


def check_text(num_steps: int) -> str:
    """Whether runs are compared with one device: ``"20 steps checked against one device"``."""
    return f"{num_steps} steps checked against one device" if num_steps else "not checked against one device"
