"""The planner, the sliders of the machine, names and focus of every control, and a page that is loaded again."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.cells import PANEL, open_cells, show
from tests.browser.page import LabPage
from tests.ui.models import GPT_HYBRID

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def notebook(open_notebook: Any) -> LabPage:
    return open_cells(open_notebook)


@pytest.fixture
def opened(notebook: LabPage) -> LabPage:
    """A panel that nobody has touched."""
    return show(notebook, PANEL, ".wb-row[data-row='lm_head']")


def wait_for(lab_page: LabPage, selector: str, words: str) -> None:
    lab_page.page.locator(selector, has_text=words).first.wait_for()


def plan(lab_page: LabPage) -> None:
    lab_page.button("planner's choice").click()
    lab_page.page.locator(".wb-plan").first.wait_for()


@pytest.fixture
def planned(opened: LabPage) -> LabPage:
    """The panel with a plan, and a strategy that is not the planner's choice."""
    plan(opened)
    opened.write_strategy(GPT_HYBRID)
    return opened


@pytest.mark.slow
def test_the_planner_says_why_and_why_not(opened: LabPage) -> None:
    page = opened.page
    plan(opened)
    wait_for(opened, ".wb-plan", "They are the planner's choice")
    assert page.locator(".wb-plan tr.chosen button").first.get_attribute("data-text") == opened.strategy

    opened.write_strategy(GPT_HYBRID)
    wait_for(opened, ".wb-plan", "It is slower by")
    page.locator(".wb-row[data-row='lm_head'] .label").click()
    wait_for(opened, ".wb-plan section:last-child", "in the planner's choice")
    page.mouse.move(5, 5)
    opened.screenshot("panel-planner.png", page.locator(".wb-panel").first)

    other = page.locator(".wb-plan tr:not(.chosen) button.wb-open").first
    wanted = other.get_attribute("data-text")
    other.click()
    opened.wait_for_text(wanted)
    opened.page.locator(".wb-panel button[title^='Undo']").click()
    opened.wait_for_text(GPT_HYBRID)


def test_sliders_ask_for_another_machine(planned: LabPage) -> None:
    from playwright.sync_api import expect

    page = planned.page
    handle = page.locator(".wb-machine [role='slider'][aria-label='links']")
    handle.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    wait_for(planned, ".wb-machine", "\u00d72")
    wait_for(planned, ".wb-predictions", "on the machine as it is")
    wait_for(planned, ".wb-plan", "Planned before the machine was changed")
    page.locator(".wb-machine [role='slider'][aria-label='ranks']").focus()
    page.keyboard.press("ArrowRight")
    planned.wait_for_text(GPT_HYBRID.replace("2x1x2", "2x2x2"))
    wait_for(planned, ".wb-plan-note", "The plan is for 4 ranks, and there are 8 now")
    page.locator(".wb-machine button", has_text="Reset").click()
    planned.wait_for_text(GPT_HYBRID)
    expect(page.locator(".wb-machine b")).to_have_count(0)  # what differs is written bold
    assert page.locator(".wb-machine [role='slider']").count() >= 2


def test_every_control_has_a_name_and_shows_its_focus(opened: LabPage) -> None:
    page = opened.page
    assert page.evaluate(NAMELESS) == []
    page.locator(".wb-panel button", has_text="data").first.focus()
    hidden = []
    for _ in range(40):
        page.keyboard.press("Tab")
        found = page.evaluate(FOCUS)
        if found is None:
            break
        hidden += [] if found[1] else [found[0]]
    assert hidden == []


@pytest.mark.slow
def test_undo_and_text_go_on_after_the_page_was_loaded_again(planned: LabPage) -> None:
    from playwright.sync_api import expect

    page = planned.page
    planned.write_strategy("*: model")
    planned.reload()
    page.locator(".wb-panel .wb-row[data-row='lm_head']").wait_for()
    planned.wait_for_text("*: model")
    wait_for(planned, ".wb-plan", "It is slower by")
    page.locator(".wb-panel button[title^='Undo']").click()
    planned.wait_for_text(GPT_HYBRID)
    page.locator(".wb-panel button[title^='Redo']").click()
    planned.wait_for_text("*: model")
    planned.write_strategy("*: data | 1x4x1 zero=1")
    page.locator(".wb-row[data-row='lm_head'] .choice .wb-opt[data-value='model']").click()
    text = page.locator(".wb-panel .wb-text input")
    expect(text).to_have_value(re.compile("lm_head: model"))
    assert text.input_value().endswith("| 1x4x1 zero=1")


NAMELESS = """() => {
    const named = (e) => e.getAttribute('aria-label') || e.textContent.trim() || e.title
        || [...(e.labels ?? [])].some((label) => label.offsetParent && label.textContent.trim());
    const controls = document.querySelector('.wb-panel').querySelectorAll('button, input, select, [role=slider]');
    return [...controls].filter((e) => e.offsetParent && !named(e)).map((e) => e.outerHTML.slice(0, 160));
}"""
FOCUS = """() => {
    const e = document.activeElement;
    if (!e?.closest('.wb-panel')) return null;
    const style = getComputedStyle(e);
    const outlined = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 1;
    return [e.outerHTML.slice(0, 160), outlined || style.boxShadow !== 'none'];
}"""
