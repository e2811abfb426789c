"""The panel without a kernel: the last state as plain HTML and text, for saved, exported and mailed notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from workbench.core.metrics import RunRecord
from workbench.theme import style_sheet
from workbench.ui.assets import asset, element
from workbench.ui.static_grid import static_grid_html
from workbench.ui.tables import comparison_table_html, comparison_table_text


def static_html(
    text: str,
    view: dict[str, Any],
    runs: Sequence[RunRecord],
    baseline: RunRecord | None,
    latest: str | None = None,
    predictions: str = "",
) -> str:
    """Strategy, layers, predictions and finished runs as one HTML fragment without controls.

    The class ``wb-static`` lets the live panel hide it where both are on one page.
    """
    strategy = element("p", element("b", text="Strategy "), element("code", text=text))
    table = comparison_table_html(runs, baseline, latest) if runs else ""
    style = element("style", style_sheet(".wb-static"), asset("predictions.css")) if predictions else ""
    return element("div", style, strategy, static_grid_html(view), predictions, table, css="wb-static")


def static_text(text: str, runs: Sequence[RunRecord], baseline: RunRecord | None) -> str:
    """The strategy and the table of runs in 80 columns."""
    return "\n".join([f"Strategy: {text}", *([comparison_table_text(runs, baseline)] if runs else [])])


def static_figure(figure: go.Figure) -> dict[str, Any]:
    """A figure as a display bundle: drawn by JupyterLab itself, and by a script from the web where there is none."""
    plain = go.Figure(figure)
    return {
        "application/vnd.plotly.v1+json": plain.to_plotly_json() | {"config": {"displaylogo": False}},
        "text/html": plain.to_html(full_html=False, include_plotlyjs="cdn", config={"displaylogo": False}),
        "text/plain": "Figure: throughput, loss, memory per rank and time split of the last run",
    }
