"""The live figure's widget between the page's thread and the one that draws."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from workbench.ui.live import figure as live_figure
from workbench.ui.live.widget import LiveWidget


def test_what_is_drawn_while_the_page_speaks_reaches_the_page(monkeypatch: pytest.MonkeyPatch):
    figure = LiveWidget(live_figure.live_figure(1, 10), lambda: None)
    sent: list[Any] = []
    figure.observe(lambda change: sent.append(change["new"]), "_py2js_update")
    is_setting, is_drawn = threading.Event(), threading.Event()
    set_trait = LiveWidget.set_trait

    def set_slowly(widget: LiveWidget, name: str, value: Any) -> None:
        is_setting.set()
        is_drawn.wait(0.2)
        set_trait(widget, name, value)

    monkeypatch.setattr(LiveWidget, "set_trait", set_slowly)
    said = {"_js2py_traceDeltas": {"trace_deltas": [], "trace_edit_id": 0}}
    page = threading.Thread(target=figure.set_state, args=(said,))
    page.start()
    assert is_setting.wait(5)
    with figure.batch_update():
        live_figure.show_one_device(figure, [2.0, 1.0])
    is_drawn.set()
    page.join(5)
    assert any(update and [1, 2] in [list(x) for x in update["style_data"]["x"]] for update in sent)


def test_the_page_is_told_of_it_when_all_of_it_is_there(monkeypatch: pytest.MonkeyPatch):
    told: list[Any] = []
    opened = LiveWidget.__mro__[1].open
    monkeypatch.setattr(LiveWidget.__mro__[1], "open", lambda widget: (told.append(widget.get_state()), opened(widget)))
    figure = live_figure.live_figure(2, 10)
    widget = LiveWidget(figure, lambda: None)
    assert widget.comm is not None
    [state] = told
    assert [trace["name"] for trace in state["_widget_data"]] == [trace.name for trace in figure.data]
    assert state["_widget_layout"]["annotations"] and not state["_config"]["displaylogo"] and state["_esm"]


def report_of(figure: LiveWidget, hidden: Any = ()) -> dict[str, Any]:
    """What a page says after the newest update; plotly hides traces that are empty there."""
    deltas = [{"uid": trace.uid, "visible": trace.name not in hidden} for trace in figure.data]
    return {"_js2py_traceDeltas": {"trace_deltas": deltas, "trace_edit_id": figure._last_trace_edit_id}}


class TestWhatAPageShows:
    @pytest.fixture
    def drawn(self) -> list[str]:
        return []

    @pytest.fixture
    def figure(self, drawn: list[str]) -> LiveWidget:
        """A figure with the losses of one device, which a page has drawn."""
        figure = LiveWidget(live_figure.live_figure(1, 10), lambda: drawn.append("anew"))
        with figure.batch_update():
            live_figure.show_one_device(figure, [2.0, 1.0])
        figure.set_state(report_of(figure, [trace.name for trace in figure.data]))
        assert drawn == ["anew"], "what was sent before the page had the figure's script is lost"
        drawn.clear()
        return figure

    def test_a_page_that_shows_all_points_is_left_alone(self, figure: LiveWidget, drawn: list[str]):
        figure.set_state(report_of(figure, ["throughput", "this run"]))  # which are empty in Python, too
        assert drawn == []

    def test_a_view_that_comes_later_and_is_empty_gets_all_of_it(self, figure: LiveWidget, drawn: list[str]):
        figure.set_state(report_of(figure, ["1 device"]))
        assert drawn == ["anew"]

    def test_a_report_on_an_update_that_is_not_the_newest_says_nothing(self, figure: LiveWidget, drawn: list[str]):
        said = report_of(figure, ["1 device"])
        with figure.batch_update():
            live_figure.show_one_device(figure, [3.0, 2.0, 1.0])
        figure.set_state(said)
        assert drawn == []

    def test_a_page_that_never_shows_it_is_not_told_for_ever(self, figure: LiveWidget, drawn: list[str]):
        for _ in range(10):
            figure.set_state(report_of(figure, ["1 device"]))
        assert drawn == ["anew"] * 2
        figure.set_state(report_of(figure))
        figure.set_state(report_of(figure, ["1 device"]))
        assert drawn == ["anew"] * 3
