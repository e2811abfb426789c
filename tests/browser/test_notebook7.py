"""The panel in a real Notebook 7, which takes keys before they get to the panel where it may."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.cells import PANEL, SETUP
from tests.browser.page import LabPage
from tests.browser.server import LabServer, running_lab, write_notebook
from tests.browser.test_runs import CELLS
from tests.ui.models import GPT_HYBRID

pytestmark = [pytest.mark.browser, pytest.mark.slow]
NOTEBOOK = "notebook-7.ipynb"


@pytest.fixture(scope="module")
def lab(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """A server of its own: Notebook 7 complains about what JupyterLab has left for itself on the others' server."""
    with running_lab(tmp_path_factory.mktemp("notebook-7")) as server:
        yield server


@pytest.fixture(scope="module")
def notebook(open_notebook: Any, lab: LabServer) -> LabPage:
    pytest.importorskip("notebook", reason="Notebook 7 is not installed: pip install workbench[test]")
    write_notebook(lab.folder / NOTEBOOK, [SETUP, PANEL, "", *CELLS[:3]])
    lab_page = open_notebook(NOTEBOOK, "notebook")
    lab_page.run_cell(0)
    return lab_page  # type: ignore[no-any-return]


@pytest.fixture
def opened(notebook: LabPage) -> LabPage:
    """A panel that nobody has touched."""
    notebook.show(1, ".wb-row[data-row='lm_head']")
    return notebook


def cells(lab_page: LabPage) -> list[str]:
    """Kinds of the notebook's cells."""
    script = "() => window.jupyterapp.shell.currentWidget.content.widgets.map(cell => cell.model.type)"
    return list(lab_page.page.evaluate(script))


def test_a_click_changes_the_strategy_and_buttons_undo_it(opened: LabPage) -> None:
    from playwright.sync_api import expect

    page = opened.page
    opened.write_strategy(GPT_HYBRID)
    choice = page.locator(".wb-row[data-row='tok_emb'] .choice")
    choice.locator(".wb-opt", has_text="model").click()
    opened.wait_for_text(GPT_HYBRID.replace(" |", "; tok_emb: model |"))
    expect(choice.locator("[aria-checked='true']")).to_have_text("model")
    page.locator(".wb-panel button[title^='Undo']").first.click()
    opened.wait_for_text(GPT_HYBRID)
    expect(choice.locator("[aria-checked='true']")).to_have_text("data")
    assert choice.locator("[aria-checked='true']").count() == 1


def test_keys_of_the_grid_reach_the_grid_and_not_the_notebook(opened: LabPage) -> None:
    page = opened.page
    opened.write_strategy(GPT_HYBRID)
    before = cells(opened)
    page.locator(".wb-row[data-row='tok_emb'] .label").click()
    for key in ("ArrowDown", "ArrowDown", "m", "d", "d"):  # M makes text of a cell, D D deletes it
        page.keyboard.press(key)
    data = GPT_HYBRID.replace("blocks.[0-3]: model", "blocks.[0-3]: data")
    opened.wait_for_text(data)
    page.keyboard.press("Control+z")
    opened.wait_for_text(GPT_HYBRID)
    page.keyboard.press("Control+Shift+Z")
    opened.wait_for_text(data)
    assert cells(opened) == before == ["code"] * 6


@pytest.mark.engines
@pytest.mark.slow
def test_a_run_is_followed_and_stopped(opened: LabPage) -> None:
    opened.show(3, ".wb-panel button.wb-primary:not([disabled]):visible", last=5)
    panel = opened.page.locator(".wb-panel").nth(1)
    panel.locator("button.wb-primary", has_text="Run").click()
    opened.wait_for_step(10)
    opened.page.locator(".wb-live-view .js-plotly-plot").scroll_into_view_if_needed()
    opened.wait_for_points("this run", 10)
    opened.wait_for_points("forward, measured", 1)
    assert opened.unreadable() == []
    panel.locator(".wb-stays button", has_text="Stop").click()
    opened.page.wait_for_selector(".wb-panel .wb-comparison tr[data-key]", state="attached")
