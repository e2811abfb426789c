"""A run in a real JupyterLab: points arrive, another strategy, stop, a loop of one's own, a failure."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.page import SECONDS
from tests.browser.server import LabServer, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]
NOTEBOOK = "runs.ipynb"
_SOURCE = """%load_ext workbench
%workbench start --engines 2
---
import time
import workbench as wb
from workbench.cli.demo import digits, make_mlp
from torch.nn.functional import cross_entropy

def slow_loss(output, target):
    time.sleep(0.01)
    return cross_entropy(output, target)
---
panel = wb.Panel(wb.current(), make_mlp, digits(), slow_loss, strategy="data", batch_size=128, steps=1000)
panel
---
wb.LiveView()
---
%%global
import time
for step in range(300):
    wb.log(loss=1.0 / (step + 1), samples=64)
    time.sleep(0.01)
---
def broken_loss(output, target):
    if len(target) > 2:
        raise ValueError("this loss is broken")
    return cross_entropy(output, target)

wb.Panel(wb.current(), make_mlp, digits(), broken_loss, strategy="data", batch_size=128, steps=10)
"""
CELLS = _SOURCE.split("---\n")


@pytest.fixture(scope="module")
def opened(open_notebook: Any, lab: LabServer) -> Any:
    write_notebook(lab.folder / NOTEBOOK, CELLS)
    lab_page = open_notebook(NOTEBOOK)
    lab_page.page.set_default_timeout(120 * SECONDS)
    lab_page.run_cells(2)
    lab_page.wait_for_output(".wb-panel button.wb-primary", timeout_s=180)
    return lab_page


def lines_at_changes(page: Any) -> int:
    return int(
        page.evaluate(
            "() => (document.querySelector('.wb-live-view .js-plotly-plot').layout.shapes ?? [])"
            ".filter(shape => shape.name === 'change').length"
        )
    )


def test_run_change_the_strategy_go_on_and_stop(opened: Any) -> None:
    page = opened.page
    opened.run_button.click()
    page.wait_for_selector(".wb-panel .wb-state.first", timeout=150 * SECONDS)
    opened.wait_for_points("1 device", 1)
    opened.wait_for_step(4)
    opened.wait_for_points("throughput", 3)
    opened.wait_for_points("forward", 1)

    opened.button("Change strategy").click()
    opened.wait_for_state("paused")
    held = opened.points("this run")
    page.wait_for_timeout(1000)
    assert opened.points("this run") == held, "nothing happens while it is paused"
    opened.button("model").click()
    opened.button("Apply").click()
    opened.wait_for_state("running")
    opened.wait_for_points("this run", held + 3)
    assert lines_at_changes(page) == 2
    opened.wait_for_points("this run", held + 30)

    opened.button("Pause").click()
    opened.wait_for_state("paused")
    opened.button("Go on").click()
    opened.wait_for_state("running")
    opened.button("Stop").click()
    page.wait_for_selector(".wb-panel .wb-comparison tr[data-key]", timeout=150 * SECONDS)
    opened.wait_for_state("done")
    assert opened.rows.count() == 2


def test_own_loops_are_followed(opened: Any) -> None:
    page = opened.page
    for number in (3, 4):
        opened.run_cell(number)
        page.wait_for_timeout(2 * SECONDS)
    page.wait_for_function(
        "() => [...document.querySelectorAll('.wb-live-view')].some(view => view.innerText.includes('own loop 1'))",
        timeout=60 * SECONDS,
    )
    page.wait_for_function(
        "() => [...document.querySelectorAll('.wb-state')].some(state => state.innerText.includes('ended'))",
        timeout=60 * SECONDS,
    )
    assert page.locator(".wb-live-view", has_text="own loop 1").count() >= 1


def test_a_run_that_fails_says_why_and_another_can_be_started(opened: Any) -> None:
    from playwright.sync_api import expect

    opened.run_cell(5)
    panel = opened.page.locator(".wb-panel", has_text="broken_loss").last
    run = panel.locator("button.wb-primary", has_text="Run")
    for _ in range(2):
        expect(run).to_be_enabled(timeout=60 * SECONDS)
        run.click()
        expect(panel.locator(".wb-state.failed")).to_have_count(1, timeout=60 * SECONDS)
        expect(panel.locator(".wb-failure")).to_contain_text("this loss is broken")
    expect(run).to_be_enabled()
    assert panel.locator(".wb-failure").count() == 1
