"""The page is loaded again while the kernel lives: panel, live view and comparison are as they were, and go on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.page import LabPage
from tests.browser.server import LabServer, write_notebook
from tests.browser.test_runs import CELLS, opened

__all__ = ["opened"]

pytestmark = [pytest.mark.browser, pytest.mark.engines, pytest.mark.slow]
NOTEBOOK = "reload.ipynb"


@pytest.fixture(scope="module")
def notebook(open_notebook: Any, lab: LabServer) -> Any:
    """A page with engines."""
    write_notebook(lab.folder / NOTEBOOK, [*CELLS[:2], CELLS[2], ""])
    lab_page = open_notebook(NOTEBOOK)
    lab_page.run_cells(1)
    return lab_page


def shown(lab_page: LabPage) -> dict[str, Any]:
    """What stands in the panel: strategy, points of the live figure, its titles, and the comparison."""
    script = """() => {
        const plot = document.querySelector('.wb-live-view .js-plotly-plot');
        const text = selector => [...document.querySelectorAll(selector)].map(found => found.innerText);
        return {
            strategy: document.querySelector('.wb-panel .wb-text input').value,
            points: Object.fromEntries(plot.data.map(trace => [trace.name, trace.x?.length ?? 0])),
            titles: plot.layout.annotations.slice(0, 5).map(note => note.text),
            state: text('.wb-panel .wb-state'),
            log: text('.wb-live-view .wb-log'),
            rows: text('.wb-panel .wb-comparison tbody tr'),
        };
    }"""
    lab_page.page.wait_for_selector(".wb-live-view .js-plotly-plot .main-svg")
    return dict(lab_page.page.evaluate(script))


def test_finished_runs_are_there_after_a_reload(opened: LabPage) -> None:
    from playwright.sync_api import expect

    opened.run_button.click()
    opened.wait_for_state("running")
    opened.wait_for_points("forward, measured", 1)
    opened.button("Stop").click()
    expect(opened.rows).to_have_count(2)
    opened.wait_for_state("done")
    before = shown(opened)
    assert before["points"]["this run"] > 3 and before["points"]["forward, measured"] == 2
    opened.reload()
    expect(opened.rows).to_have_count(2)
    assert shown(opened) == before


def test_a_run_goes_on_and_is_followed_after_a_reload(opened: LabPage) -> None:
    from playwright.sync_api import expect

    opened.run_button.click()
    opened.wait_for_step(10)
    opened.wait_for_points("this run", 9)
    before = opened.drawn_step
    strategy = opened.strategy
    opened.reload()
    opened.wait_for_state("running")
    opened.wait_for_drawn_step(before - 1)
    opened.wait_for_drawn_step(opened.drawn_step + 10)
    opened.wait_for_points("forward, measured", 1)
    opened.wait_for_text(strategy)
    opened.button("Pause").click()
    opened.wait_for_state("paused")
    opened.button("Go on").click()
    opened.wait_for_state("running")
    opened.button("Stop").click()
    opened.wait_for_state("done")
    expect(opened.rows).to_have_count(2)
    assert opened.strategy == strategy


CHANGES_LATE = """
targets = get_ipython().kernel.comm_manager.targets
target = "jupyter.widget.control"
plain = targets[target]

def opened(channel, message):
    targets[target], send = plain, channel.send

    def send_late(*args, **kwargs):
        panel._editor.controls.copy.description = "Came late"
        send(*args, **kwargs)

    channel.send = send_late
    plain(channel, message)

targets[target] = opened
"""


def test_what_changes_while_the_page_is_loading_is_shown(opened: LabPage) -> None:
    """Between the look at the states and the answer: the page has no widget yet, and then gets the old state."""
    from playwright.sync_api import expect

    opened.ask_kernel(CHANGES_LATE)
    opened.reload()
    changed = opened.page.locator(".wb-panel button", has_text="Came late")
    changed.wait_for()
    expect(changed).to_have_count(1)
    assert changed.is_visible()
