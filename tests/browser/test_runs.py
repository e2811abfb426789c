"""A run in a real JupyterLab: points arrive, another strategy, stop, a loop of one's own, a failure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.page import LabPage
from tests.browser.server import LabServer, write_notebook
from tests.browser.test_perfetto_button import PERFETTO

pytestmark = [pytest.mark.browser, pytest.mark.engines, pytest.mark.slow]
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
panel = wb.Panel(make_mlp, digits(), slow_loss, strategy="data", batch_size=128, steps=100_000)
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

wb.Panel(make_mlp, digits(), broken_loss, strategy="data", batch_size=128, steps=10)
---
%workbench profile
"""
CELLS = _SOURCE.split("---\n")
"""The panel's run goes on until it is stopped."""
RUN_BUTTON = ".wb-panel button.wb-primary"
LAST_STEP = "print(panel._runs_section.live.history.last_step)"


@pytest.fixture(scope="module")
def notebook(open_notebook: Any, lab: LabServer) -> Any:
    """A page with engines."""
    write_notebook(lab.folder / NOTEBOOK, CELLS)
    lab_page = open_notebook(NOTEBOOK)
    lab_page.run_cells(1)
    return lab_page


@pytest.fixture
def opened(notebook: Any) -> Iterator[LabPage]:
    """A panel without a run; whatever runs after the test is ended."""
    notebook.show(2, RUN_BUTTON)
    yield notebook
    notebook.ask_kernel("panel.stop() if panel.running else None\npanel.wait()")


def lines_at_changes(page: Any) -> int:
    return int(
        page.evaluate(
            "() => (document.querySelector('.wb-live-view .js-plotly-plot').layout.shapes ?? [])"
            ".filter(shape => shape.name === 'change').length"
        )
    )


def test_run_change_the_strategy_go_on_and_stop(opened: Any) -> None:
    from playwright.sync_api import expect

    page = opened.page
    expect(page.locator(".wb-panel .wb-status .widget-checkbox:visible")).to_have_count(2)  # for the first run, too
    opened.run_button.click()
    opened.wait_for_points("1 device", 1)
    opened.wait_for_step(4)
    opened.wait_for_points("throughput", 3)
    opened.wait_for_points("forward", 1)

    opened.button("Change strategy").click()
    opened.wait_for_state("paused")
    steps = {opened.ask_kernel(LAST_STEP) for _ in range(50)}
    assert len(steps) == 1, "nothing happens while it is paused"
    held = opened.drawn_step
    opened.button("model").click()
    opened.button("Apply").click()
    opened.wait_for_state("running")
    opened.wait_for_drawn_step(held + 3)
    assert lines_at_changes(page) == 2
    opened.wait_for_drawn_step(held + 30)

    opened.button("Pause").click()
    opened.wait_for_state("paused")
    opened.button("Go on").click()
    opened.wait_for_state("running")
    opened.button("Stop").click()
    page.wait_for_selector(".wb-panel .wb-comparison tr[data-key]", state="attached")
    opened.wait_for_state("done")
    rows = opened.rows.all_inner_texts()
    assert len(rows) == 3, f"one device, and a row for each of the two strategies: {rows}"


def test_a_profile_and_a_script_by_the_keyboard(opened: Any, tmp_path: Path) -> None:
    page = opened.page
    page.context.route(
        "https://ui.perfetto.dev/**", lambda route: route.fulfill(body=PERFETTO, content_type="text/html")
    )
    press(opened.button("Script"))
    page.locator(".wb-panel pre.wb-script", has_text="wb.parallelize(model_fn(), STRATEGY)").wait_for()
    with page.expect_download() as download:
        press(opened.button("Download"))
    assert download.value.suggested_filename == "script.py"
    assert "BATCH_SIZE = 128" in Path(download.value.path()).read_text(encoding="utf-8")

    press(opened.run_button)
    opened.wait_for_step(1)
    press(opened.button("Profile"))
    page.locator(".wb-panel .wb-profile table").wait_for()
    opened.wait_for_state("running")
    assert "3 steps on 2 ranks" in page.locator(".wb-panel .wb-profile").inner_text()
    press(opened.button("Stop"))
    opened.wait_for_state("done")
    show_in_perfetto(page, page.locator(".wb-panel .wb-profile"))

    opened.show(6, ".jp-OutputArea-output table:has-text('overlapped')")
    show_in_perfetto(page, page.locator(".jp-OutputArea-output:not(.wb-panel *)", has_text="open in Perfetto").last)


def press(button: Any) -> None:
    """Reach a button with the keyboard, and press it."""
    button.focus()
    button.press("Enter")


def show_in_perfetto(page: Any, profile: Any) -> None:
    """A profile's button hands its file to a page of Perfetto."""
    with page.context.expect_page() as shown:
        press(profile.get_by_role("button", name="open in Perfetto"))
    perfetto = shown.value
    perfetto.wait_for_function("window.received !== undefined")
    assert perfetto.evaluate("received.title").startswith("profile-")
    assert perfetto.evaluate("Array.from(new Uint8Array(received.buffer).slice(0, 2))") == [0x1F, 0x8B], "gzip"
    perfetto.close()


def test_own_loops_are_followed(opened: Any) -> None:
    page = opened.page
    # While the loop's cell runs, the kernel does not hear the page.
    opened.show(3, ".wb-panel .wb-quiet:has-text('waits for wb.log')")
    opened.run_cell(4)
    page.wait_for_function(
        "() => [...document.querySelectorAll('.wb-live-view')].some(view => view.innerText.includes('own loop 1'))",
    )
    page.wait_for_function(
        "() => [...document.querySelectorAll('.wb-state')].some(state => state.innerText.includes('ended'))",
    )
    assert page.locator(".wb-live-view", has_text="own loop 1").count() >= 1


def test_a_run_that_fails_says_why_and_another_can_be_started(opened: Any) -> None:
    from playwright.sync_api import expect

    opened.run_cell(5)
    panel = opened.page.locator(".wb-panel", has_text="broken_loss").last
    run = panel.locator("button.wb-primary", has_text="Run")
    for _ in range(2):
        expect(run).to_be_enabled()
        run.click()
        expect(panel.locator(".wb-state.failed")).to_have_count(1)
        expect(panel.locator(".wb-failure")).to_contain_text("this loss is broken")
    expect(run).to_be_enabled()
    assert panel.locator(".wb-failure").count() == 1
