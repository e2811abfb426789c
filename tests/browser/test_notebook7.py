"""The panel in Notebook 7: shown, toggled, run, stopped, compared."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.page import SECONDS, LabPage
from tests.browser.server import LabServer, write_notebook
from tests.browser.test_runs import CELLS

pytestmark = [pytest.mark.browser, pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600)]
NOTEBOOK = "seven.ipynb"


@pytest.fixture(scope="module")
def opened(open_notebook: Any, lab: LabServer) -> Any:
    """A panel on its engines, in Notebook 7."""
    write_notebook(lab.folder / NOTEBOOK, CELLS[:3])
    lab_page = open_notebook(NOTEBOOK, app="notebook")
    lab_page.page.wait_for_selector("body[data-notebook='notebooks']", state="attached")
    lab_page.run_cells(2)
    lab_page.wait_for_output(".wb-panel button.wb-primary", timeout_s=180)
    return lab_page


def test_toggle_run_stop_and_compare(opened: LabPage) -> None:
    from playwright.sync_api import expect

    opened.page.locator(".wb-row[data-row='fc2'] .wb-seg.choice .wb-opt", has_text="model").click()
    opened.wait_for_text("fc1: data; fc2: model; fc3: data; head: data")
    opened.page.keyboard.press("Control+z")
    opened.wait_for_text("*: data")
    for number, preset in enumerate(("data", "model"), start=2):
        opened.button(preset).click()
        opened.wait_for_text(f"*: {preset}")
        opened.run_button.click()
        opened.wait_for_state("running")
        opened.wait_for_step(5)
        opened.wait_for_points("throughput", 4)
        opened.wait_for_points("forward", 1)
        opened.button("Stop").click()
        expect(opened.rows).to_have_count(number, timeout=150 * SECONDS)
        opened.wait_for_state("done")
    opened.rows.first.locator("td.number").first.click()
    expect(opened.page.locator(".wb-panel .wb-comparison tr.selected")).to_have_count(1)


def test_the_theme_follows(opened: LabPage) -> None:
    script = "() => getComputedStyle(document.querySelector('.wb-panel')).getPropertyValue('--wb-boxing').trim()"
    opened.dark(True)
    dark = opened.page.evaluate(script)
    opened.dark(False)
    assert (dark, opened.page.evaluate(script)) == ("#a45cff", "#6a1b9a")
