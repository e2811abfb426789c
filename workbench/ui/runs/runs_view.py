"""``wb.draw.runs``: finished runs of one comparison or of many days."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ipywidgets as widgets

from workbench.core.metrics import RunRecord
from workbench.core.seeds import over_seeds
from workbench.session.comparison.compare import CompareResult
from workbench.session.comparison.saved_runs import SavedRuns
from workbench.theme import style_sheet
from workbench.ui.assets import asset, element
from workbench.ui.controls import display_widget, html
from workbench.ui.failures import Failures
from workbench.ui.grid.widget import PANEL_CLASS
from workbench.ui.runs.render_table import comparison_table_text
from workbench.ui.runs.table_widget import RunTable
from workbench.ui.static_copy import StaticCopy


class RunsView(widgets.VBox):
    """The table of runs with its scatter plot; ``table`` has its methods (sort, filter, hide, rename, export)."""

    def __init__(self, table: RunTable, failures: Failures) -> None:
        self.table, self.failures = table, failures
        style = html(f"<style>{style_sheet(f'.{PANEL_CLASS}')}{asset('panel.css')}{asset('runs.css')}</style>")
        super().__init__([style, failures.box, table.box])
        self.add_class(PANEL_CLASS)
        with failures.collecting():
            self._copy = StaticCopy(self._static_bundle)
        table.changed = self._copy.keep

    def _ipython_display_(self) -> None:
        """Display the widget and its static copy, which the style hides while the widget works."""
        display_widget(self)
        self._copy.display()

    def _static_bundle(self) -> dict[str, str]:
        text = comparison_table_text(over_seeds(self.table.runs), self.table.truth)
        return {"text/html": element("div", self.table.static_html(), css="wb-static"), "text/plain": text}


def show_runs(runs: CompareResult | Iterable[RunRecord], *, limit_bytes: float | None = None) -> RunsView:
    """Table and scatter plot of finished runs: sort, filter, hide, rename, compare with a baseline, export.

    Args:
        runs: a result of ``wb.compare``, ``wb.draw.SavedRuns()``, or any records.
        limit_bytes: memory of a rank, drawn as a line.

    ``wb.draw.runs(wb.draw.SavedRuns())`` shows all kept runs.
    """
    found: Any = runs
    failures = Failures()
    with failures.collecting():
        table = RunTable(saved=found if isinstance(found, SavedRuns) else None, limit_bytes=limit_bytes)
    if hasattr(found, "baselines"):
        table.add(found.runs, found.baselines)
    else:
        table.add(found)
    return RunsView(table, failures)
