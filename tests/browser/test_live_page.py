"""The live view on four engines in pages of 1280 and 800 px: points arrive, and every text can be read."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.page import WIDE, LabPage
from tests.browser.server import LabServer, write_notebook
from tests.browser.test_runs import CELLS

pytestmark = [pytest.mark.browser, pytest.mark.engines, pytest.mark.slow]
NOTEBOOK = "live-page.ipynb"
START = "%load_ext workbench\n%workbench start --engines 4"
MACHINE = "import workbench as wb\nmachine = wb.planner.calibrate(wb.Session.current())"
PANEL = """
panel = wb.Panel(make_mlp, digits(), cross_entropy, hardware=machine, batch_size=128,
                 steps=100_000, strategy="hybrid")
panel
"""
"""Its run goes on until it is stopped."""


@pytest.fixture(scope="module")
def opened(open_notebook: Any, lab: LabServer) -> LabPage:
    """A panel on its engines, which knows the machine."""
    write_notebook(lab.folder / NOTEBOOK, [START, CELLS[1], MACHINE, PANEL, ""])
    lab_page = open_notebook(NOTEBOOK)
    lab_page.page.set_viewport_size({"width": 1280, "height": 1400})
    lab_page.run_cells(3)
    lab_page.wait_for_output(".wb-panel button.wb-primary")
    return lab_page  # type: ignore[no-any-return]


def test_a_run_can_be_read_while_it_goes_on(opened: LabPage) -> None:
    opened.run_button.click()
    opened.wait_for_state("running")
    opened.wait_for_step(10)
    opened.wait_for_points("this run", 10)
    opened.wait_for_points("forward, measured", 3)
    assert opened.unreadable() == []
    assert opened.page.evaluate(LIMIT) == 1
    opened.button("Change strategy").click()
    opened.wait_for_state("paused")
    opened.open_tab("live")
    assert opened.unreadable() == []
    opened.open_tab("strategy")
    held = opened.drawn_step
    opened.button("pipeline").click()
    opened.button("Apply").click()
    opened.wait_for_state("running")
    opened.wait_for_drawn_step(held + 30)
    assert opened.unreadable() == []
    opened.page.set_viewport_size({"width": 800, "height": 1400})
    opened.page.wait_for_function(AS_WIDE_AS_ITS_VIEW)
    opened.wait_for_points("forward, measured", 3)
    assert opened.unreadable() == []
    take_pictures(opened)
    opened.button("Stop").click()
    opened.page.wait_for_selector(".wb-panel .wb-comparison tr[data-key]", state="attached")
    opened.wait_for_state("done")
    assert opened.unreadable() == []


def take_pictures(opened: LabPage) -> None:
    """In both themes, as wide as the panel may be, with a timeline that is newer than the change."""
    view = opened.page.locator(".wb-panel").first
    opened.page.set_viewport_size(WIDE)
    opened.page.wait_for_function(AS_WIDE_AS_ITS_VIEW)
    opened.screenshot("live.png", view)
    opened.dark(True)
    opened.screenshot("live-dark.png", view)
    opened.dark(False)
    opened.page.set_viewport_size({"width": 1280, "height": 1400})
    opened.wait_for_state("running")


AS_WIDE_AS_ITS_VIEW = """() => {
    const plot = document.querySelector('.wb-live-view .js-plotly-plot');
    const elements = [plot.querySelector('.main-svg'), plot.closest('.wb-live-view')];
    const [drawn, free] = elements.map(element => element.getBoundingClientRect());
    return free.right <= innerWidth && Math.abs(drawn.width - free.width) < 40;
}"""
LIMIT = """() => document.querySelector('.wb-live-view .js-plotly-plot').layout.annotations
    .filter(note => note.name === 'limit' && /GB/.test(note.text)).length"""
