"""The first notebook in a real JupyterLab: toggle a layer, press Run, see the plot move, read the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser.page import ROOT
from tests.browser.server import LabServer
from workbench.core.verdict import CHECKED_STEPS

pytestmark = [pytest.mark.browser, pytest.mark.engines]
NOTEBOOK = "01-compare-strategies.ipynb"


def panel_cell() -> int:
    """Number of the cell that makes the panel."""
    cells = json.loads((ROOT / "notebooks" / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    return next(number for number, cell in enumerate(cells) if "wb.Panel(" in "".join(cell["source"]))


def layer(page: Any, name: str) -> Any:
    return page.locator(f".wb-row[data-row='{name}']")


def option(page: Any, name: str, label: str, group: str = "choice") -> Any:
    return layer(page, name).locator(f".wb-seg.{group} .wb-opt", has_text=label)


def text_field(page: Any) -> Any:
    return page.locator(".wb-panel .wb-text input")


def run_to_the_end(lab_page: Any, num_runs: int) -> None:
    """Press Run, wait until the table has the new row, see the run's points.

    It takes a second, and may be over before its view is scrolled to: tests of longer runs see points arrive.
    """
    from playwright.sync_api import expect

    lab_page.run_button.click()
    expect(lab_page.rows).to_have_count(num_runs + 1)
    lab_page.wait_for_state("done")
    lab_page.wait_for_points("throughput", 2)


NUM_STEPS = 30
_SHORTER = {
    "wb.planner.calibrate(session)": "'v100-dgx1'",
    "batch_size=128, steps=300": f"batch_size=16, steps={NUM_STEPS}",
}
"""Calibrating takes a quarter of a minute, and tests/notebooks run that cell as it is."""


def shorten(notebook: Path) -> None:
    """Write a notebook with less to wait for."""
    text = notebook.read_text(encoding="utf-8")
    for long, short in _SHORTER.items():
        assert text.count(long) == 1
        text = text.replace(long, short)
    notebook.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def opened(open_notebook: Any, lab: LabServer) -> Any:
    """The first notebook up to its panel, on its engines."""
    shorten(lab.folder / NOTEBOOK)
    lab_page = open_notebook(NOTEBOOK)
    lab_page.run_cells(panel_cell() - 1)
    return lab_page


@pytest.fixture
def lab_page(opened: Any) -> Any:
    """The panel with the strategy that the notebook chose, and no run."""
    opened.show(panel_cell(), ".wb-row[data-row='head']")
    opened.wait_for_text("conv1: data; conv2: data; fc: model; head: model | 1x1x2")
    return opened


@pytest.mark.slow
def test_a_mistake_is_shown_at_its_row_and_can_be_fixed(lab_page: Any) -> None:
    from playwright.sync_api import expect

    page = lab_page.page
    page.locator(".wb-panel button", has_text="pipeline").click()
    page.wait_for_selector(".wb-row[data-row='head'] .stage .on[data-value='1']")

    option(page, "head", "0", group="stage").click()
    page.wait_for_selector(".wb-error-line")
    assert "stages cannot go back" in page.locator(".wb-error-line").inner_text()
    assert layer(page, "head").get_attribute("aria-invalid") == "true"
    expect(lab_page.run_button).to_be_disabled()

    page.locator(".wb-error-line button.fix").click()
    page.wait_for_selector(".wb-error-line", state="detached")
    expect(lab_page.run_button).to_be_enabled()  # the line and the button are drawn one after the other


def test_toggle_run_and_compare(lab_page: Any) -> None:
    page = lab_page.page
    assert text_field(page).input_value() == "conv1: data; conv2: data; fc: model; head: model | 1x1x2"

    option(page, "conv2", "model").click()
    lab_page.wait_for_text("conv1: data; conv2: model; fc: model; head: model")
    page.wait_for_selector(".wb-row[data-row='conv2'] .wb-opt[data-value='model'][aria-checked='true']")
    page.locator(".wb-panel button", has_text="hybrid, edited").wait_for()
    page.keyboard.press("Control+z")
    lab_page.wait_for_text("conv1: data; conv2: data; fc: model; head: model | 1x1x2")

    run_to_the_end(lab_page, num_runs=1)
    assert lab_page.points("this run") == NUM_STEPS and lab_page.points("1 device") == CHECKED_STEPS
    lab_page.open_tab("strategy")
    option(page, "conv2", "model").click()
    lab_page.wait_for_text("conv1: data; conv2: model; fc: model; head: model")
    run_to_the_end(lab_page, num_runs=2)
    lab_page.open_tab("compare")
    rows = lab_page.rows.all_inner_texts()
    assert sum("\u2713" in row for row in rows) == 2, rows

    assert page.locator(".wb-static").is_hidden(), "the copy for readers without a kernel is not shown twice"
