"""The Strategy tab of the panel in a real JupyterLab: rows, keys, mistakes, themes and widths. No engines."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.cells import CONVOLUTIONS, DEEP, EXPERTS, PANEL, open_cells, show
from tests.ui.models import GPT_HYBRID

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def notebook(open_notebook: Any) -> Any:
    lab_page = open_cells(open_notebook)
    lab_page.close_sidebar()
    return lab_page


@pytest.fixture
def lab_page(notebook: Any) -> Any:
    """A panel that nobody has touched: 8 blocks on 4 ranks."""
    return show(notebook, PANEL, ".wb-row[data-row='blocks.[0-3]']")


@pytest.fixture
def both(lab_page: Any) -> Any:
    """That panel, and below it one of 24 blocks on 64 ranks."""
    return show(lab_page, DEEP, ".wb-row[data-row='blocks.[0-23]']")


def panel(lab_page: Any, number: int = 0) -> Any:
    return lab_page.page.locator(".wb-panel").nth(number)


def panel_with(lab_page: Any, pattern: str) -> Any:
    """The panel that has this row, which no other one has."""
    return lab_page.page.locator(f".wb-panel:has(.wb-row[data-row='{pattern}'])")


def row(lab_page: Any, pattern: str, number: int = 0) -> Any:
    return panel(lab_page, number).locator(f".wb-row[data-row='{pattern}']")


def focused(lab_page: Any) -> list[str]:
    """The row that has the focus, and what its control says."""
    script = "() => [document.activeElement.closest('.wb-row')?.dataset.row, document.activeElement.textContent]"
    return list(lab_page.page.evaluate(script))


def press(lab_page: Any, *keys: str) -> None:
    for key in keys:
        lab_page.page.keyboard.press(key)


def unfold(lab_page: Any, pattern: str, inside: str) -> None:
    row(lab_page, pattern).locator(".wb-fold").click()
    row(lab_page, inside).wait_for()


def test_a_click_draws_only_the_rows_that_it_changes(lab_page: Any) -> None:
    lab_page.page.evaluate("() => document.querySelectorAll('.wb-row').forEach(row => { row.wasThere = true; })")
    row(lab_page, "ln_f").locator(".wb-opt[data-value='model']").click()
    lab_page.wait_for_text(GPT_HYBRID.replace("ln_f: data@1", "ln_f: model@1"))
    anew = lab_page.page.evaluate(
        "() => [...document.querySelector('.wb-panel').querySelectorAll('.wb-row')].filter(row => !row.wasThere)"
        ".map(row => row.dataset.row)"
    )
    assert anew == ["ln_f", "lm_head"], "the row, and the one that takes its output"
    assert focused(lab_page) == ["ln_f", "model"]


def test_everything_can_be_done_with_keys(lab_page: Any) -> None:
    row(lab_page, "tok_emb").locator(".label").click()
    press(lab_page, "ArrowDown", "ArrowDown")
    assert focused(lab_page) == ["blocks.[0-3]", "model"]
    press(lab_page, "d")
    lab_page.wait_for_text(GPT_HYBRID.replace("blocks.[0-3]: model", "blocks.[0-3]: data"))
    press(lab_page, "Control+z")
    lab_page.wait_for_text(GPT_HYBRID)
    press(lab_page, "Enter")
    row(lab_page, "blocks.[0-3].attn.qkv").wait_for()
    press(lab_page, "ArrowDown", "ArrowDown", "Enter")
    lab_page.page.wait_for_selector(".wb-menu[role='menu']")
    press(lab_page, "ArrowDown", "Enter")
    lab_page.wait_for_text(GPT_HYBRID.replace(" |", "; blocks.[0-3].attn.qkv: model:row |"))
    assert focused(lab_page)[0] == "blocks.[0-3].attn.qkv", "the focus comes back to where it was"
    press(lab_page, "ArrowUp", "ArrowUp", "-")
    row(lab_page, "blocks.[0-3].attn.qkv").wait_for(state="detached")
    assert focused(lab_page)[0] == "blocks.[0-3]"


def test_a_mistake_stands_at_its_row_and_the_chip_leads_to_it(lab_page: Any) -> None:
    unfold(lab_page, "blocks.[4-7]", "blocks.[4-7].attn.qkv")
    row(lab_page, "ln_f").locator(".stage .wb-opt").first.click()
    line = panel(lab_page).locator(".wb-error-line")
    line.wait_for()
    assert "stages cannot go back" in line.inner_text()
    assert row(lab_page, "ln_f").get_attribute("aria-invalid") == "true"
    described = row(lab_page, "ln_f").get_attribute("aria-describedby")
    assert panel(lab_page).locator(f"#{described}").count() == 1
    assert panel(lab_page).locator(".wb-pieces .wrong").inner_text() == "ln_f: data@0"
    panel(lab_page).locator(".wb-predictions.old").wait_for()
    lab_page.page.mouse.move(5, 5)
    lab_page.screenshot("panel-mistake.png", panel(lab_page))
    row(lab_page, "tok_emb").locator(".label").click()
    panel(lab_page).locator(".wb-problem").click()
    assert focused(lab_page) == ["ln_f", "0"]
    line.locator("button.fix").click()
    line.wait_for(state="detached")
    lab_page.wait_for_text(GPT_HYBRID)


def test_a_mistake_is_mended_with_keys(lab_page: Any) -> None:
    row(lab_page, "ln_f").locator(".stage .wb-opt").first.click()
    line = panel(lab_page).locator(".wb-error-line")
    line.wait_for()
    press(lab_page, "e", "Tab")
    assert focused(lab_page) == [None, line.locator("button.fix").inner_text()]
    press(lab_page, "Enter")
    line.wait_for(state="detached")
    lab_page.wait_for_text(GPT_HYBRID)
    assert focused(lab_page)[0] == "ln_f"


@pytest.mark.slow
def test_a_toggle_shows_what_it_changes(lab_page: Any) -> None:
    unfold(lab_page, "blocks.[4-7]", "blocks.[4-7].attn.qkv")
    before = panel(lab_page).locator(".wb-predictions .time").inner_text()
    row(lab_page, "tok_emb").locator(".choice .wb-opt", has_text="model").click()
    lab_page.page.wait_for_function(
        "before => document.querySelector('.wb-predictions .time').innerText !== before", arg=before
    )
    assert "before the last change" in panel(lab_page).locator(".wb-predictions .time").inner_text()
    lab_page.page.mouse.move(5, 5)
    lab_page.screenshot("panel-toggle.png", panel(lab_page))


def the_tensors_of_a_row_can_be_seen(lab_page: Any) -> None:
    panel(lab_page).locator(".wb-tensor-link").click()
    row(lab_page, "lm_head").locator(".label").click()
    panel(lab_page).locator(".wb-tensors", has_text="lm_head.weight").wait_for()
    assert "4096" in panel(lab_page).locator(".wb-tensors").inner_text()
    lab_page.screenshot("panel-tensors.png", panel(lab_page))
    panel(lab_page).locator(".wb-tensor-link").click()
    panel(lab_page).locator(".wb-tensors").wait_for(state="detached")


def sixty_four_ranks_are_a_few_rows_and_a_layer_is_found(both: Any) -> None:
    deep = panel(both, 1)
    both.screenshot("panel-64.png", deep)
    assert deep.locator(".wb-row[data-row]").count() < 15, "144 layers in blocks are a few rows"
    deep.locator(".wb-find").fill("blocks.1?.mlp*")
    deep.locator(".wb-row[data-row='blocks.19.mlp.fc2']").wait_for()
    assert deep.locator(".wb-row[data-row]").count() == 20
    deep.locator(".wb-find").fill("")
    deep.locator(".wb-row[data-row='tok_emb']").wait_for()


CUT = """() => {
    const panel = document.querySelector('.wb-panel');
    const right = panel.getBoundingClientRect().right + 1;
    const parts = [...panel.querySelectorAll('.wb-bar button, .wb-field, .wb-field > *, .wb-row .boxing-cell > *')];
    const cut = parts.filter(one => one.getBoundingClientRect().right > right).map(one => one.textContent);
    const tabs = panel.querySelector('.wb-tabs').getBoundingClientRect();
    const crossed = [...panel.querySelectorAll('.wb-stays .wb-bar button')].filter(one => {
        const box = one.getBoundingClientRect();
        return one.role !== 'tab' && box.left < tabs.right && box.top < tabs.bottom && box.bottom > tabs.top;
    });
    return [panel.clientWidth < 400, cut, crossed.map(one => one.textContent)];
}"""
"""In a very narrow panel: controls and lines that end outside of it, and buttons that the tabs lie over."""


@pytest.mark.slow
def test_in_a_very_narrow_notebook_rows_of_controls_wrap(lab_page: Any) -> None:
    lab_page.page.set_viewport_size({"width": 480, "height": 1400})
    lab_page.settle()
    lab_page.screenshot("panel-480.png", panel(lab_page))
    assert lab_page.page.evaluate(CUT) == [True, [], []]


DEAD = """() => {
    const [panel] = document.querySelectorAll('.wb-panel');
    const widgets = [panel, ...panel.querySelectorAll('.jupyter-widgets')];
    for (const one of widgets) one.classList.add('jupyter-widgets-disconnected');
    const shown = widgets.map(one => getComputedStyle(one, '::before')).filter(style => style.display !== 'none');
    const run = panel.querySelector('.wb-run');
    return [shown.map(style => style.content), getComputedStyle(run).pointerEvents];
}"""
"""What Jupyter does in the page when a kernel ends: signs that are shown, and whether Run can be pressed."""


def test_without_its_kernel_the_panel_says_so_in_one_line(lab_page: Any) -> None:
    assert lab_page.page.evaluate(DEAD) == [['"The kernel of this panel has ended: run the cell again."'], "none"]
    lab_page.screenshot("panel-dead.png", panel(lab_page))


WIDTHS = (1920, 1680, 1280, 1000, 800)
NUMBERS = {"4096 \u00d7 256", "1.05 M", "S(0)", "524 + 524 kB"}
"""Of the last layer: weight, parameters and sbp in columns or in a line; the boxing with its bytes."""


def nothing_is_cut_or_alone_in_a_line_and_every_number_is_shown(both: Any) -> None:
    lab_page, seen = both, {}
    for width in WIDTHS:
        lab_page.page.set_viewport_size({"width": width, "height": 2200})
        lab_page.settle()
        if width in (800, 1280, 1920):
            lab_page.screenshot(f"panel-{width}.png", panel(lab_page))
        shown = row(lab_page, "lm_head").inner_text()
        missing = NUMBERS - set(re.split(r"\n|\t| \u00b7 | parameters|sbp ", shown))
        seen[width] = lab_page.page.evaluate(OVERLAPS), lab_page.page.evaluate(ALONE), missing
    assert seen == {width: ([], [], set()) for width in WIDTHS}


def test_a_deep_model_below_another_one_and_both_at_any_width(both: Any) -> None:
    sixty_four_ranks_are_a_few_rows_and_a_layer_is_found(both)
    nothing_is_cut_or_alone_in_a_line_and_every_number_is_shown(both)
    assert panel(both).count() == 1 and panel(both, 1).count() == 1, "all of it was done in these two panels"


@pytest.mark.slow
def test_shapes_of_convolutions_are_shown_beside_their_names(notebook: Any) -> None:
    show(notebook, CONVOLUTIONS, ".wb-row[data-row='out']")
    for width in (1920, 1200):
        notebook.page.set_viewport_size({"width": width, "height": 1400})
        notebook.settle()
        assert notebook.page.evaluate(OVERLAPS) == [], width
        shown = panel_with(notebook, "out").locator(".wb-row[data-row='out'] .weight").inner_text()
        assert shown == "128 \u00d7 128 \u00d7 3 \u00d7 3 \u00d7 3", width


def test_three_choices_have_room_beside_their_layouts(notebook: Any) -> None:
    show(notebook, EXPERTS, ".wb-row[data-row='experts']")
    shown = panel_with(notebook, "experts")
    shown.locator(".wb-fold").first.click()
    shown.locator(".wb-choice", has_text="expert:4").wait_for()
    for width in (1280, 800):
        notebook.page.set_viewport_size({"width": width, "height": 1400})
        notebook.settle()
        assert notebook.page.evaluate(OVERLAPS) == [], width
    assert shown.locator(".wb-row[data-row='experts'] .wb-opt").all_inner_texts()[:3] == ["data", "model", "expert"]


def the_legend_says_what_the_words_mean(lab_page: Any) -> None:
    question = panel(lab_page).locator(".wb-legend-button")
    question.focus()
    press(lab_page, "Enter")
    legend = panel(lab_page).locator(".wb-legend")
    legend.wait_for()
    for word in ("boxing", "S(0)", "sequence", "links", "products"):
        assert word in legend.inner_text()
    press(lab_page, "Escape")
    assert legend.count() == 0
    assert lab_page.page.evaluate("() => document.activeElement.classList.contains('wb-legend-button')")


def tabs_are_chosen_with_keys_and_stay_chosen(lab_page: Any) -> None:
    page = lab_page.page
    first = panel(lab_page)
    first.locator("[role='tab'][aria-selected='true']").focus()
    press(lab_page, "ArrowRight", "ArrowRight")
    first.locator(".wb-on-compare", has_text="No finished runs yet").wait_for()
    assert page.evaluate("() => document.activeElement.dataset.tab") == "compare"
    assert first.locator("[role='tab'][tabindex='0']").count() == 1
    assert not first.locator(".wb-grid").is_visible()
    press(lab_page, "Home")
    first.locator(".wb-grid").wait_for()


def the_dark_theme_reaches_everything(lab_page: Any) -> None:
    unfold(lab_page, "blocks.[4-7]", "blocks.[4-7].attn.qkv")
    lab_page.dark(True)
    lab_page.screenshot("panel-dark.png", panel(lab_page))
    script = "() => getComputedStyle(document.querySelector('.wb-panel')).getPropertyValue('--wb-boxing').trim()"
    dark = lab_page.page.evaluate(script)
    arrow = "() => getComputedStyle(document.querySelector('.wb-panel .wb-bar select')).backgroundImage"
    dark_arrow = lab_page.page.evaluate(arrow)
    lab_page.dark(False)
    assert (dark, lab_page.page.evaluate(script)) == ("#a45cff", "#6a1b9a")
    assert "rgb" in dark_arrow and dark_arrow != lab_page.page.evaluate(arrow), "arrows of lists can be seen"


def tips_come_on_hover_and_go_with_escape(lab_page: Any) -> None:
    row(lab_page, "lm_head").locator(".area").last.hover()
    tip = panel(lab_page).locator(".wb-tip:not([hidden])")
    tip.wait_for()
    assert "rank 3" in tip.inner_text() and "rows 2048-4095 of 4096" in tip.inner_text()
    lit = panel(lab_page).locator(".hot[data-ranks='3']")
    from playwright.sync_api import expect

    expect(lit.nth(1)).to_be_attached()  # column and memory bar light up together
    number = lit.count()
    panel(lab_page).evaluate(
        """panel => panel.querySelectorAll(".hot").forEach(element => {
            const anew = element.cloneNode(true)
            anew.classList.remove("hot")
            element.replaceWith(anew)
        })"""
    )
    expect(lit).to_have_count(number)


def the_bar_stays_in_sight_while_the_page_scrolls(lab_page: Any) -> None:
    page = lab_page.page
    page.set_viewport_size({"width": 1280, "height": 600})
    row(lab_page, "cross_entropy").or_(panel(lab_page).locator(".wb-predictions")).first.scroll_into_view_if_needed()
    tops = page.evaluate(TOPS)
    assert tops["panel"] < tops["page"] - 100, "it is scrolled"
    assert abs(tops["bar"] - tops["page"]) <= 1


def test_looking_at_the_panel(lab_page: Any) -> None:
    """What changes no strategy, one after the other in one panel: to show a panel anew takes seconds."""
    the_legend_says_what_the_words_mean(lab_page)
    tabs_are_chosen_with_keys_and_stay_chosen(lab_page)
    the_dark_theme_reaches_everything(lab_page)
    tips_come_on_hover_and_go_with_escape(lab_page)
    the_tensors_of_a_row_can_be_seen(lab_page)
    the_bar_stays_in_sight_while_the_page_scrolls(lab_page)
    assert panel(lab_page).count() == 1, "all of it was done in one panel"


TOPS = """() => {
    const top = (selector) => document.querySelector(selector).getBoundingClientRect().top;
    return { bar: top('.wb-stays'), panel: top('.wb-panel'), page: top('.jp-WindowedPanel-outer') };
}"""
ALONE = """() => {
    const alone = [];
    for (const bar of document.querySelectorAll('.wb-panel .wb-bar.wb-wrap')) {
        const lines = new Map();
        const controls = [...bar.querySelectorAll('button, input, select, .slider')].filter(each => each.offsetParent);
        for (const control of controls) {
            const box = control.getBoundingClientRect();
            const line = [...lines.keys()].find(top => Math.abs(top - (box.top + box.bottom) / 2) < 14);
            const key = line ?? (box.top + box.bottom) / 2;
            lines.set(key, [...(lines.get(key) ?? []), control]);
        }
        for (const found of lines.values()) {
            if (lines.size > 1 && found.length === 1) alone.push(found[0].outerHTML.slice(0, 120));
        }
    }
    return alone;
}"""
"""Controls that have wrapped into a line of their own."""

OVERLAPS = """() => {
    const problems = [];
    for (const panel of document.querySelectorAll('.wb-panel')) {
        const frame = panel.getBoundingClientRect();
        const boxes = [];
        const parts = '.wb-row :is(.num, .label), .badge b, .wb-seg, .wb-choice, .sbp, .act, .wb-bar button, .wb-field';
        for (const element of panel.querySelectorAll(parts)) {
            const text = new Range();
            text.selectNodeContents(element);
            const box = (element.matches('.num, .sbp') ? text : element).getBoundingClientRect();
            if (!box.width || !box.height || getComputedStyle(element).visibility === 'hidden') continue;
            const scroller = element.closest('.wb-rows');
            const canScroll = scroller && scroller.scrollWidth > scroller.clientWidth;
            if (box.right > frame.right + 1 && !canScroll) problems.push(`${element.textContent} ends at ${box.right}`);
            boxes.push([element, box]);
        }
        const rows = new Map();
        for (const [element, box] of boxes) {
            const row = element.closest('.wb-row, .wb-bar');
            if (element.matches('b')) continue; // on the boundary of two rows
            rows.set(row, [...(rows.get(row) ?? []), [element, box]]);
        }
        for (const items of rows.values()) {
            items.forEach(([one, a], i) => items.slice(i + 1).forEach(([two, b]) => {
                if (one.contains(two) || two.contains(one)) return;
                const over = Math.min(a.right, b.right) - Math.max(a.left, b.left);
                const under = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
                if (over > 1 && under > 1) problems.push(`${one.textContent} over ${two.textContent}`);
            }));
        }
        for (const title of panel.querySelectorAll('.wb-predictions svg text')) {
            const box = title.getBoundingClientRect();
            if (box.right > frame.right + 1) problems.push(`text ${title.textContent} is cut`);
        }
    }
    return problems;
}"""
