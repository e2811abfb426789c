"""A run in a real JupyterLab: points arrive, another strategy, stop, compare, export, a loop of one's own."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]
NOTEBOOK = "runs.ipynb"
SECONDS = 1000
_SOURCE = """%load_ext workbench
%workbench start --engines 2
---
import time
import workbench as wb
from workbench.cli.demo import digits, make_mlp
from workbench.session import current
from torch.nn.functional import cross_entropy

def slow_loss(output, target):
    time.sleep(0.01)
    return cross_entropy(output, target)
---
panel = wb.Panel(current(), make_mlp, digits(), slow_loss, strategy="data", batch_size=128, steps=1000)
panel
---
wb.LiveView()
---
%%global
import time
for step in range(300):
    wb.log(loss=1.0 / (step + 1), samples=64)
    time.sleep(0.01)
"""
CELLS = _SOURCE.split("---\n")


@pytest.fixture(scope="module")
def opened(open_notebook: Any, lab: Any) -> Any:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, lab.folder / NOTEBOOK)
    lab_page = open_notebook(NOTEBOOK)
    lab_page.page.set_default_timeout(120 * SECONDS)
    lab_page.run_cells(2)
    lab_page.wait_for_output(".wb-panel button.wb-primary", timeout_s=180)
    return lab_page


def run_cell(page: Any, number: int) -> None:
    page.evaluate(
        """number => {
            window.jupyterapp.shell.currentWidget.content.activeCellIndex = number;
            window.jupyterapp.commands.execute('notebook:run-cell');
            return 1;
        }""",
        number,
    )


def button(page: Any, text: str) -> Any:
    return page.locator(".wb-panel button", has_text=text).first


def points(page: Any, name: str) -> int:
    script = """name => {
        const plots = [...document.querySelectorAll('.wb-live-view .js-plotly-plot')];
        const traces = plots.flatMap(plot => plot.data ?? []).filter(trace => trace.name?.startsWith(name));
        return traces.reduce((sum, trace) => sum + (trace.x?.length ?? 0), 0);
    }"""
    return int(page.evaluate(script, name))


def wait_for_points(page: Any, name: str, more_than: int = 0) -> None:
    for _ in range(1800):
        if points(page, name) > more_than:
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"{name}: {points(page, name)} points")


def state(page: Any, word: str) -> None:
    """Wait for a state of the run, with the view in sight: what nobody sees is not drawn."""
    page.locator(".wb-live-view").first.scroll_into_view_if_needed()
    page.wait_for_selector(f".wb-live-view .wb-state.{word}", timeout=150 * SECONDS)


def lines_at_changes(page: Any) -> int:
    return int(
        page.evaluate(
            "() => (document.querySelector('.wb-live-view .js-plotly-plot').layout.shapes ?? [])"
            ".filter(shape => shape.name === 'change').length"
        )
    )


def test_run_change_the_strategy_go_on_and_stop(opened: Any, lab: Any) -> None:
    page = opened.page
    page.locator(".wb-panel button.wb-primary", has_text="Run").first.click()
    state(page, "running")
    wait_for_points(page, "throughput", 3)
    wait_for_points(page, "forward", 1)

    button(page, "Change strategy").click()
    state(page, "paused")
    held = points(page, "this run")
    page.wait_for_timeout(1000)
    assert points(page, "this run") == held, "nothing happens while it is paused"
    button(page, "model").click()
    button(page, "Apply").click()
    state(page, "running")
    wait_for_points(page, "this run", held + 3)
    assert lines_at_changes(page) == 2
    opened.screenshot("live.png", page.locator(".wb-panel").first)
    opened.dark(True)
    opened.screenshot("live-dark.png", page.locator(".wb-panel").first)
    opened.dark(False)

    button(page, "Pause").click()
    state(page, "paused")
    button(page, "Go on").click()
    state(page, "running")
    button(page, "Stop").click()
    page.wait_for_selector(".wb-panel .wb-comparison tr[data-key]", timeout=150 * SECONDS)
    state(page, "done")
    assert page.locator(".wb-panel .wb-comparison tbody tr").count() == 2


def test_compare_and_export(opened: Any) -> None:
    page = opened.page
    button(page, "model").click()
    page.locator(".wb-panel button.wb-primary", has_text="Run").first.click()
    state(page, "running")
    wait_for_points(page, "throughput", 3)
    button(page, "Stop").click()
    state(page, "done")
    page.wait_for_function("() => document.querySelectorAll('.wb-panel .wb-comparison tbody tr').length === 3")

    page.locator(".wb-panel .wb-comparison th[data-sort='peak_bytes'] button").click()
    page.wait_for_selector(".wb-panel .wb-comparison th[data-sort='peak_bytes'][aria-sort='ascending']")
    row = page.locator(".wb-panel .wb-comparison tbody tr:not(.selected)").first
    key = row.get_attribute("data-key")
    row.locator("td.number").first.click()
    page.wait_for_selector(f".wb-panel .wb-comparison tr.selected[data-key='{key}']")
    assert page.locator(".wb-panel .wb-scatter .wb-ring").count() == 1
    opened.screenshot("compare.png", page.locator(".wb-panel .wb-comparison").first)

    with page.expect_download() as download:
        button(page, "CSV").click()
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8"))))
    assert len(rows) == 3 and {"name", "samples_per_s", "peak_bytes"} <= set(rows[0])
    with page.expect_download() as download:
        button(page, "JSON").click()
    assert len(json.loads(Path(download.value.path()).read_text(encoding="utf-8"))["runs"]) == 2


def test_own_loops_are_followed(opened: Any) -> None:
    page = opened.page
    for number in (3, 4):
        run_cell(page, number)
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
