"""The live view in pages of any width."""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.ui.reports import block, spans
from workbench.core.metrics import RunEvent
from workbench.ui.live.figure_layout import Frame
from workbench.ui.live.live_figure import empty_figure, show_expected
from workbench.ui.live.live_view import LiveView
from workbench.ui.live.run_view import RunView
from workbench.ui.page_link import PageLink

MEMORY = ({"parameters": 2_000_000, "peak": 4_000_000},) * 2


@pytest.mark.parametrize("width", [600, 840, 1080, 1176, 1680])
def test_panes_share_what_width_there_is(width: int):
    layout = empty_figure(4, 10, frame=Frame.within(width)).layout
    assert layout.width == width and layout.height == Frame(width).height(4)
    panes = [(layout[f"xaxis{n}"].domain, layout[f"yaxis{n}"].domain) for n in ("", 2, 3, 4, 5)]
    for (x1, y1), (x2, y2) in combinations(panes, 2):
        assert x1[1] < x2[0] or x2[1] < x1[0] or y1[1] < y2[0] or y2[1] < y1[0]
    assert all(0 <= low < high <= 1 for pane in panes for low, high in pane)
    assert (1 - layout.xaxis2.domain[1]) * width > 34 or width >= 1176, "half of 'step 100000', which plotly leaves out"
    assert (layout.yaxis.domain[1] > layout.yaxis3.domain[1]) == (width < 1176), "two rows where four do not fit"


def test_frames_fit_and_are_neither_too_wide_nor_too_narrow():
    assert [Frame.within(pixels).width for pixels in (100, 847, 1000.5, 1178, 3000)] == [600, 840, 984, 1176, 1680]


def test_a_narrow_page_gets_two_rows_of_panes_and_loses_nothing():
    view = RunView(2)

    def marks() -> list[str]:
        layout = view.shown.figure.layout
        return sorted(str(each.name) for kind in ("shapes", "annotations") for each in layout[kind])

    view.begin("data", "*: data", 10)
    view.add([block(0, (2.0, 1.0), memory=MEMORY), spans(0), spans(1), RunEvent("strategy", 1, "*: model")])
    show_expected(view.shown.figure, 10, 500.0)
    view.expect(None, places=((0, 0), (0, 1)), limit=(5e6, ""))
    view.draw(everything=True)
    before, marks_before = {trace.name: len(trace.x) for trace in view.shown.figure.data}, marks()
    view.link._receive(None, {"event": "width", "value": 847}, None)
    assert view.shown.figure.layout.width == 840 and "wb-narrow" in view.box._dom_classes
    assert {trace.name: len(trace.x) for trace in view.shown.figure.data} == before and before["predicted"] == 2
    assert marks() == marks_before
    view.link._receive(None, {"event": "width", "value": 1300}, None)
    assert view.shown.figure.layout.width == 1296 and "wb-narrow" not in view.box._dom_classes
    view.fit(700)
    view.begin("model", "*: model", 10)
    assert view.shown.figure.layout.width == 696, "the next run, too"


def test_a_view_of_own_loops_knows_the_width_before_a_loop_begins():
    class Session:
        num_engines = 2

        def subscribe(self, hear):
            return lambda: None

    view = LiveView(Session())
    next(child for child in view.children if isinstance(child, PageLink))._receive(
        None, {"event": "width", "value": 847}, None
    )
    view.on_message(0, block(0, (2.0,), num_steps=0))
    assert view.live.shown.figure.layout.width == 840
