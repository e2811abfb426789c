"""The live view on four engines in a page of 1280 px: points arrive, and every text can be read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.page import SECONDS, LabPage
from tests.browser.server import LabServer, write_notebook
from tests.browser.test_runs import CELLS

pytestmark = [pytest.mark.browser, pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600)]
NOTEBOOK = "live-page.ipynb"
START = "%load_ext workbench\n%workbench start --engines 4"
MACHINE = "import workbench as wb\nmachine = wb.calibrate(current())"
PANEL = """
panel = wb.Panel(current(), make_mlp, digits(), slow_loss, hardware=machine, batch_size=128, steps=1000,
                 strategy="fc1: data; fc2: data; fc3: model@1; head: model@1 | 2x1x2 mb=4 1f1b")
panel
"""


@pytest.fixture(scope="module")
def opened(open_notebook: Any, lab: LabServer) -> LabPage:
    """A panel on its engines, which knows the machine."""
    write_notebook(lab.folder / NOTEBOOK, [START, CELLS[1], MACHINE, PANEL, ""])
    lab_page = open_notebook(NOTEBOOK)
    lab_page.page.set_viewport_size({"width": 1280, "height": 1400})
    lab_page.run_cells(3)
    lab_page.wait_for_output(".wb-panel button.wb-primary", timeout_s=240)
    return lab_page  # type: ignore[no-any-return]


def test_a_run_can_be_read_while_it_goes_on(opened: LabPage) -> None:
    opened.run_button.click()
    opened.wait_for_state("running")
    opened.wait_for_points("this run", 10)
    opened.wait_for_points("forward, measured", 3)
    while_it_runs = opened.page.evaluate(UNREADABLE)
    opened.button("Pause").click()
    opened.wait_for_state("paused")
    opened.screenshot("live-1280.png", opened.page.locator(".wb-live-view").first)
    assert opened.page.evaluate(LIMIT) == 1
    assert while_it_runs == []
    assert opened.page.evaluate(UNREADABLE) == []
    opened.button("Stop").click()
    opened.page.wait_for_selector(".wb-panel .wb-comparison tr[data-key]", timeout=150 * SECONDS)
    opened.wait_for_state("done")
    assert opened.page.evaluate(UNREADABLE) == []


LIMIT = """() => document.querySelector('.wb-live-view .js-plotly-plot').layout.annotations
    .filter(note => note.name === 'limit' && note.text.startsWith('limit ')).length"""
UNREADABLE = """() => {
    const view = document.querySelector('.wb-live-view');
    const frame = view.closest('.wb-panel').getBoundingClientRect();
    const problems = [];
    const shown = [];
    const parts = '.js-plotly-plot svg text, .wb-bar button, .wb-bar .wb-state, .wb-bar .wb-title, .wb-bar .wb-quiet';
    for (const element of view.querySelectorAll(parts)) {
        const words = element.textContent.trim();
        const box = element.getBoundingClientRect();
        if (!words || !box.width || getComputedStyle(element).visibility === 'hidden') continue;
        if (element.closest('.hoverlayer, .modebar')) continue;
        if (box.left < frame.left - 1 || box.right > frame.right + 1) problems.push(`${words} is cut`);
        shown.push([words, box]);
    }
    shown.forEach(([one, a], i) => shown.slice(i + 1).forEach(([two, b]) => {
        const over = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const under = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (over > 2 && under > 2) problems.push(`${one} over ${two}`);
    }));
    return problems;
}"""
