"""A GPT of a newcomer in a real JupyterLab: positions without a batch dim, a loss that fails, a restart."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.page import ROOT
from tests.browser.server import LabServer, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.engines, pytest.mark.slow]
NOTEBOOK = "failures.ipynb"
_SOURCE = f"""import sys
sys.path.insert(0, {str(ROOT)!r})
%load_ext workbench
%workbench start --engines 2
---
import workbench as wb
from torch.nn.functional import cross_entropy
from tests.ui.odd_activations import Positions, batches
from workbench.ui import strategy_editor

whole = strategy_editor.grid_view
def loss_fn(output, target):
    if len(target) > 2 and target[0, 0] == -1:
        raise ValueError("this loss is <broken>")
    return cross_entropy(output, target)
---
strategy_editor.grid_view = whole
panel = wb.Panel(Positions, batches(), loss_fn, batch_size=16, steps=30, keep=False)
panel
---
def broken(*args):
    raise ValueError("drawing is <broken>")
strategy_editor.grid_view = broken
---
strategy_editor.grid_view = whole
---
def make_broken():
    import torch
    class Broken(Positions):
        def between(self, x):
            if x.shape[0] > 2 and torch.is_grad_enabled() and type(x).__name__ == "GlobalTensor":
                raise ValueError("this model is <broken>")
            return super().between(x)
    return Broken()
wb.Panel(make_broken, batches(), loss_fn, batch_size=16, steps=30, keep=False)
---
%workbench restart
"""
PANEL, BREAK, MEND, BROKEN_PANEL, RESTART = range(2, 7)
"""Numbers of the cells."""


@pytest.fixture(scope="module")
def opened(open_notebook: Any, lab: LabServer) -> Any:
    """The engines have started."""
    write_notebook(lab.folder / NOTEBOOK, _SOURCE.split("---\n"))
    lab_page = open_notebook(NOTEBOOK)
    lab_page.run_cells(PANEL - 1)
    return lab_page


@pytest.fixture
def lab_page(opened: Any) -> Any:
    """A panel that nobody has touched, with drawing as it should be."""
    opened.show(PANEL, ".wb-row[data-row='pos']")
    return opened


def run_cell(lab_page: Any, number: int) -> None:
    """Run it to its end."""
    script = "n => window.jupyterapp.shell.currentWidget.content.widgets[n].model.executionCount"
    before = lab_page.page.evaluate(script, number)
    lab_page.run_cell(number)
    lab_page.page.wait_for_function(f"before => ({script})({number}) > (before ?? 0)", arg=before)


def press(lab_page: Any, name: str, which: int = 0) -> None:
    lab_page.page.locator(".wb-panel").nth(which).locator("button", has_text=name).first.click()


def run_to_the_end(lab_page: Any, num_rows: int) -> None:
    """Run the first panel's strategy until its comparison has so many rows, one device's among them."""
    lab_page.run_button.click()
    lab_page.page.wait_for_function(
        "n => document.querySelector('.wb-panel').querySelectorAll('.wb-comparison tbody tr').length == n", arg=num_rows
    )


def failure(lab_page: Any) -> Any:
    return lab_page.page.locator(".wb-panel").first.locator(".wb-failures .wb-failure")


def test_header_and_rows_stay_together(lab_page: Any) -> None:
    press(lab_page, "model")
    lab_page.wait_for_text("*: model")
    lab_page.page.wait_for_function(
        "() => document.querySelector('.wb-row[data-row=head] .wb-seg.choice .on')?.innerText.startsWith('model')"
    )
    assert failure(lab_page).count() == 0
    run_to_the_end(lab_page, num_rows=2)
    lab_page.open_tab("compare")
    assert "\u2713" in lab_page.rows.first.inner_text() + lab_page.rows.last.inner_text()


def test_a_click_that_fails_is_shown_and_not_done(lab_page: Any) -> None:
    press(lab_page, "model")
    lab_page.wait_for_text("*: model")
    run_cell(lab_page, BREAK)
    press(lab_page, "data")
    failure(lab_page).wait_for()
    assert "ValueError: drawing is <broken>" in failure(lab_page).inner_text()
    assert lab_page.strategy == "*: model", "header and rows as they were"
    fold = failure(lab_page).locator("details pre")
    assert not fold.is_visible()
    failure(lab_page).locator("summary").click()
    assert "in broken" in fold.inner_text()
    run_cell(lab_page, MEND)
    press(lab_page, "data")
    lab_page.wait_for_text("*: data")
    assert not failure(lab_page).is_visible()


def test_a_run_that_fails_is_shown_at_its_place_and_can_be_run_again(lab_page: Any) -> None:
    from playwright.sync_api import expect

    lab_page.show(BROKEN_PANEL, ".wb-row[data-row='pos']")
    panel = lab_page.page.locator(".wb-panel").nth(1)
    run = panel.locator("button.wb-primary", has_text="Run").first
    run.wait_for()
    for _ in range(2):
        run.click()
        panel.locator(".wb-state.running").wait_for()
        panel.locator(".wb-state.failed").wait_for()
        lab_page.open_tab("live", panel)
        shown = panel.locator(".wb-live-view .wb-failure")
        shown.wait_for()
        assert "this model is <broken>" in shown.inner_text() and shown.locator("details").count() == 1
        expect(run).to_be_enabled()


def test_after_a_restart_the_panel_runs_as_before(lab_page: Any) -> None:
    first = lab_page.page.locator(".wb-panel").first
    run_to_the_end(lab_page, num_rows=2)
    run_cell(lab_page, RESTART)
    run_to_the_end(lab_page, num_rows=3)
    assert first.locator(".wb-live-view .wb-failure").count() == 0
