"""Six recorded runs of a GPT on two engines in a real JupyterLab, and what can be done with them in the table.

``python -m tests.browser.record_runs`` records them anew.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser.cells import RUNS, open_cells, show
from tests.browser.page import WIDE, LabPage, new_page

pytestmark = pytest.mark.browser
NUM_RUNS = 6
NAMES = {"*: data | 1x2x1 zero=3": "data, ZeRO 3", "*: data | 1x2x1 recompute": "data, recompute"}


@pytest.fixture(scope="module")
def notebook(open_notebook: Any) -> Any:
    return open_cells(open_notebook)


@pytest.fixture
def opened(notebook: Any) -> LabPage:
    """The table of six finished runs, as it is before anybody has touched it."""
    return show(notebook, RUNS, ".wb-panel .wb-comparison tbody tr")


def rows(page: Any) -> list[str]:
    """Names of the rows, from the top."""
    return [str(text) for text in page.locator(".wb-panel .wb-comparison tbody td.name b").all_inner_texts()]


def numbers(page: Any, column: int) -> list[float]:
    """The first number of every cell of a column that has one."""
    texts = page.locator(f".wb-panel .wb-comparison tbody td:nth-child({column}) span:first-child").all_inner_texts()
    scale = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "ms": 1e-3, "us": 1e-6}
    words = [text.replace("\u202f", "").replace("\u00d7", "").split() for text in texts]
    return [float(word[0]) * scale.get(word[-1], 1.0) for word in words if word and word[0][0].isdigit()]


def rename(page: Any, names: dict[str, str]) -> None:
    """Give runs other names, with the mouse and the keyboard."""
    for old, new in names.items():
        page.locator(".wb-panel .wb-comparison td.name", has_text=old).click()
        page.mouse.down(click_count=2)
        # the first click selects the row, which is drawn anew under the pressed mouse, unless the field is open
        page.wait_for_function(
            "name => document.querySelector('input.wb-rename') || "
            "document.querySelector('.wb-panel .wb-comparison tr.selected td.name')?.textContent.includes(name)",
            arg=old,
        )
        page.mouse.up(click_count=2)
        page.locator("input.wb-rename").fill(new)
        page.locator("input.wb-rename").press("Enter")
        page.locator(".wb-panel .wb-comparison tbody b", has_text=new).wait_for()


def select(page: Any, name: str) -> None:
    page.locator(".wb-panel .wb-comparison tr", has_text=name).locator("td.number").first.click()
    page.locator(".wb-panel .wb-comparison tr.selected").wait_for()


def wait_for_rows(page: Any, count: int) -> None:
    script = "rows => document.querySelectorAll('.wb-panel .wb-comparison tbody tr').length === rows"
    page.wait_for_function(script, arg=count)


def test_all_runs_equal_one_device_and_were_predicted(opened: LabPage) -> None:
    texts = opened.page.locator(".wb-panel .wb-comparison tbody tr").all_inner_texts()
    assert sum("\u2713" in text for text in texts) == NUM_RUNS, texts
    assert opened.page.locator(".wb-panel .wb-comparison .predicted circle.hollow").count() == NUM_RUNS
    assert opened.page.locator(".wb-panel .wb-comparison .layers .wb-layers").count() == 1


@pytest.mark.slow
def test_runs_are_renamed_and_the_picture_follows(opened: LabPage) -> None:
    page = opened.page
    rename(page, NAMES)
    assert set(NAMES.values()) < set(rows(page))
    select(page, "hybrid")
    assert page.locator(".wb-panel .wb-comparison .wb-ring").count() == 2
    page.set_viewport_size({**WIDE, "height": 2200})
    opened.screenshot("compare.png", comparison(page))
    opened.dark(True)
    opened.screenshot("compare-dark.png", comparison(page))
    opened.dark(False)
    page.set_viewport_size(WIDE)


def test_keys_keep_their_place_when_the_table_is_drawn_anew(opened: LabPage) -> None:
    page = opened.page
    header = page.locator(".wb-panel .wb-comparison th[data-sort='peak_bytes']")
    header.locator("button").focus()
    for order in ("ascending", "descending"):
        page.keyboard.press("Enter")
        page.locator(f".wb-panel .wb-comparison th[data-sort='peak_bytes'][aria-sort='{order}']").wait_for()
        assert page.evaluate("() => document.activeElement.closest('th')?.dataset.sort") == "peak_bytes"
    last = page.locator(".wb-panel .wb-comparison tbody tr").last
    last.focus()
    key = last.get_attribute("data-key")
    for answer, name in (("Enter", "another name"), ("Escape", "no name")):
        page.keyboard.press("F2")
        page.locator("input.wb-rename").fill(name)
        page.keyboard.press(answer)
        page.locator(".wb-panel .wb-comparison tbody b", has_text="another name").wait_for()
        assert page.evaluate("() => document.activeElement.dataset.key") == key
    page.keyboard.press("ArrowUp")
    assert page.evaluate("() => document.activeElement.tagName") == "TR"


def comparison(page: Any) -> Any:
    """Title, controls, table and pictures: the last box of the panel."""
    return page.locator(".wb-panel").first


@pytest.mark.slow
def test_every_column_sorts_both_ways(opened: LabPage) -> None:
    page = opened.page
    for place, key in ((2, "samples_per_s"), (4, "peak_bytes"), (5, "boxed_bytes"), (8, "step_s")):
        header = page.locator(f".wb-panel .wb-comparison th[data-sort='{key}'] button")
        for _ in range(2):
            before = page.locator(f".wb-panel .wb-comparison th[data-sort='{key}']").get_attribute("aria-sort")
            header.click()
            script = "([key, old]) => document.querySelector(`.wb-panel th[data-sort='${key}']`).ariaSort !== old"
            page.wait_for_function(script, arg=[key, before])
            order = page.locator(f".wb-panel .wb-comparison th[data-sort='{key}']").get_attribute("aria-sort")
            found = numbers(page, place)
            assert found == sorted(found, reverse=order == "descending"), key


@pytest.mark.slow
def test_filter_hide_and_baseline(opened: LabPage) -> None:
    page = opened.page
    filter_field = page.locator(".wb-panel input[placeholder^='e.g. memory']")
    filter_field.fill("recompute")
    filter_field.press("Enter")
    wait_for_rows(page, 1)
    filter_field.fill("memory < 0")
    filter_field.press("Enter")
    wait_for_rows(page, 0)
    filter_field.fill("")
    filter_field.press("Enter")
    wait_for_rows(page, NUM_RUNS + 1)

    select(page, "hybrid")
    opened.button("Hide").click()
    wait_for_rows(page, NUM_RUNS)
    opened.button("Show hidden").click()
    wait_for_rows(page, NUM_RUNS + 1)

    page.locator(".wb-panel select[aria-label='baseline']").select_option(label="model")
    page.locator(".wb-panel .wb-comparison tr.baseline .chip").wait_for()
    changes = page.locator(".wb-panel .wb-comparison td.number small").all_inner_texts()
    assert any(text.endswith("%") for text in changes)


def test_exports_stand_alone(opened: LabPage, tmp_path: Path) -> None:
    page = opened.page
    rename(page, NAMES)
    found = {}
    for kind in ("CSV", "JSON", "HTML"):
        with page.expect_download() as download:
            opened.button(kind).click()
        found[kind] = Path(download.value.path()).read_text(encoding="utf-8")
    lines = list(csv.DictReader(io.StringIO(found["CSV"])))
    assert len(lines) == NUM_RUNS + 1
    assert {line["equal"] for line in lines} == {"True", ""}
    assert len(json.loads(found["JSON"])["runs"]) == NUM_RUNS
    report = tmp_path / "comparison.html"
    report.write_text(found["HTML"], encoding="utf-8")
    errors: list[str] = []
    alone = new_page(page.context.browser, viewport={"width": 1280, "height": 1600}, offline=True)
    alone.on("pageerror", lambda error: errors.append(str(error)))
    alone.goto(report.as_uri())
    alone.wait_for_selector("svg.wb-scatter")
    assert alone.locator(".wb-comparison tbody tr").count() == NUM_RUNS + 1
    assert alone.locator("svg", has_text="data, ZeRO 3").count() > 0
    alone.close()
    assert errors == []
