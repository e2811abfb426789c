"""The live figure alone, on a page that is slow, that is loaded again, and where the reader looks more closely."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.cells import FIGURE, open_cells, show
from tests.browser.page import LabPage
from tests.browser.server import LabServer, write_notebook

pytestmark = pytest.mark.browser
SLOW_NOTEBOOK = "live-figure.ipynb"
DRAW = """
for step in range(1, 8):
    with widget.drawing() as figure:
        show_one_device(figure, [1.0] * 10 * step)
        show_steps(figure, 10 * step, 1000)
"""
LOG_SCALE = """
from workbench.ui.live.live_figure import show_loss_scale
with widget.drawing() as figure:
    show_loss_scale(figure, True)
"""
PLOTLY_WAITS = """() => {
    delete globalThis.workbenchPlotly;
    const released = new Promise(resolve => { globalThis.releasePlotly = resolve; });
    globalThis.plotlyWaits = released.then(() => new Promise(resolve => setTimeout(resolve, 3000)));
    const make = URL.createObjectURL;
    URL.createObjectURL = blob => make(
        blob.size < 1e6 ? blob : new Blob(["await globalThis.plotlyWaits;\\n", blob], {type: blob.type}));
}"""
"""From now on a large module takes three seconds from ``releasePlotly()``: anywidget gives up one that takes two.
The page forgets the plotly that a test of another file may have loaded into it."""


@pytest.fixture(scope="module")
def notebook(open_notebook: Any) -> LabPage:
    return open_cells(open_notebook)


@pytest.fixture
def opened(notebook: LabPage) -> LabPage:
    """A new figure, in which 300 steps of one device are drawn."""
    show(notebook, FIGURE, PLOT_SELECTOR)
    notebook.ask_kernel(DRAW.replace("range(1, 8)", "range(1, 31)"))
    notebook.wait_for_points("1 device", 299)
    return notebook


@pytest.mark.slow
def test_a_slow_page_shows_what_was_drawn_while_it_loaded_plotly(open_notebook: Any, lab: LabServer) -> None:
    write_notebook(lab.folder / SLOW_NOTEBOOK, [FIGURE, DRAW])
    opened = open_notebook(SLOW_NOTEBOOK)
    opened.page.evaluate(PLOTLY_WAITS)
    opened.run_cells(1)
    opened.page.wait_for_selector(".wb-live-view", state="attached")
    opened.wait_for_kernel()
    assert opened.page.locator(PLOT_SELECTOR).count() == 0, "all is drawn, and nothing is shown"
    opened.page.evaluate("() => globalThis.releasePlotly()")
    opened.wait_for_points("1 device", 69)
    assert opened.points("1 device") == 70 and opened.errors == []


def test_what_the_reader_looks_at_more_closely_stays_while_points_arrive(opened: LabPage) -> None:
    all_of_it = opened.page.evaluate(AXIS)
    opened.page.evaluate(DRAG, [0.2, 0.6])
    opened.page.wait_for_function(f"old => ({AXIS})().join() !== old.join()", arg=all_of_it)
    near = opened.page.evaluate(AXIS)
    assert 45 < near[0] < 90 < near[1] < 200
    opened.ask_kernel(DRAW.replace("range(1, 8)", "range(31, 41)"))
    opened.wait_for_points("1 device", 399)
    assert opened.page.evaluate(AXIS) == near
    opened.page.evaluate(DOUBLE_CLICK)
    opened.page.wait_for_function(f"() => ({AXIS})().join() === '0,500'")


def test_a_range_of_losses_is_not_taken_for_exponents(opened: LabPage) -> None:
    opened.page.evaluate(DRAG, [0.2, 0.6, 0.1, 0.7])
    opened.page.wait_for_function(f"() => {PLOT}._fullLayout.yaxis2.range[0] > 0.1")
    near = opened.page.evaluate(AXIS)
    opened.ask_kernel(LOG_SCALE)
    opened.page.wait_for_function(f"() => {PLOT}._fullLayout.yaxis2.type === 'log'")
    low, high = opened.page.evaluate(f"() => {PLOT}._fullLayout.yaxis2.range")
    assert low < 0 < high, "all losses are 1"
    assert opened.page.evaluate(AXIS) == near


@pytest.mark.slow
def test_a_page_that_is_loaded_again_shows_all_of_it(opened: LabPage) -> None:
    opened.reload()
    opened.wait_for_points("1 device", 299)  # all of them, or this waits in vain
    assert opened.points("1 device") == 300


PLOT_SELECTOR = ".wb-live-view .js-plotly-plot"
PLOT = f"document.querySelector('{PLOT_SELECTOR}')"
AXIS = f"() => {PLOT}._fullLayout.xaxis2.range"
_MOUSE = f"""
    const pane = {PLOT}.querySelector('.draglayer .x2y2 .nsewdrag');
    const box = pane.getBoundingClientRect();
    const mouse = (type, across, target, down = 0.5) => target.dispatchEvent(new MouseEvent(type, {{
        bubbles: true, view: window, clientX: box.left + across * box.width,
        clientY: box.top + down * box.height}}));"""
DRAG = f"""([from, to, top = 0.5, bottom = 0.5]) => {{{_MOUSE}
    mouse('mousedown', from, pane, top);
    for (const part of [0, 0.5, 1])
        mouse('mousemove', from + part * (to - from), document, top + part * (bottom - top));
    mouse('mouseup', to, document, bottom);
}}"""
DOUBLE_CLICK = f"""() => {{{_MOUSE}
    for (const type of ['mousedown', 'mouseup', 'click', 'mousedown', 'mouseup', 'click']) mouse(type, 0.5, pane);
}}"""
