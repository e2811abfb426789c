"""The live figure's widget: what a page is sent, and what one that comes later finds."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from tests.timeouts import WAIT_TIMEOUT_S
from tests.ui.reports import block
from workbench.ui.live import live_figure
from workbench.ui.live.figure_widget import LiveFigureWidget
from workbench.ui.live.history import History


@pytest.fixture
def widget() -> LiveFigureWidget:
    return LiveFigureWidget(live_figure.empty_figure(1, 10))


@pytest.fixture
def sent(widget: LiveFigureWidget, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The states that pages are sent, message by message."""
    messages: list[dict[str, Any]] = []
    monkeypatch.setattr(widget, "_send", lambda message, buffers=None: messages.append(message["state"]))
    return messages


def names(widget: LiveFigureWidget, *traces: str) -> set[str]:
    return {f"trace_{index}" for index, trace in enumerate(widget.figure.data) if trace.name in traces}


def test_one_message_has_what_was_changed_and_nothing_else(widget: LiveFigureWidget, sent: list[dict[str, Any]]):
    with widget.drawing() as figure:
        live_figure.show_one_device(figure, [2.0, 1.0])
        live_figure.show_steps(figure, 30, 1000)
    [state] = sent
    assert set(state) == names(widget, "1 device") | {"outline"}
    [trace] = (state[name] for name in names(widget, "1 device"))
    assert trace["x"] == [1, 2] and trace["y"] == [2.0, 1.0] and state["outline"]["xaxis"]["range"] == [0, 30]


def test_what_stayed_as_it_was_is_not_sent(widget: LiveFigureWidget, sent: list[dict[str, Any]]):
    with widget.drawing():
        widget.figure = live_figure.empty_figure(1, 10)
    assert sent == []


def test_old_points_of_a_run_are_not_sent_again(widget: LiveFigureWidget, sent: list[dict[str, Any]]):
    history = History(1000, 1)
    for first_step, count in ((0, 150), (150, 5)):
        history.add([block(first_step, (1.0,) * count, time_s=(0.1,), boxing_s=(0.0,))])
        with widget.drawing() as figure:
            live_figure.show_curves(figure, history)
    _, last = sent
    assert len(trace_of(widget, *names(widget, "throughput")).x) == 150
    assert not names(widget, "throughput", "median", "this run") & set(last)
    [newest] = (last[name] for name in names(widget, "throughput, newest"))
    assert newest["x"] == [150, 151, 152, 153, 154, 155]


def test_drawings_inside_a_drawing_are_sent_with_it(widget: LiveFigureWidget, sent: list[dict[str, Any]]):
    with widget.drawing():
        for losses in ([2.0], [2.0, 1.0]):
            with widget.drawing() as figure:
                live_figure.show_one_device(figure, losses)
        assert sent == []
    [state] = sent
    assert set(state) == names(widget, "1 device") | {"outline"}  # its name comes into the legend


def test_a_drawing_that_fails_sends_nothing_and_the_next_one_everything(
    widget: LiveFigureWidget, sent: list[dict[str, Any]]
):
    with pytest.raises(StopIteration), widget.drawing() as figure:
        next(live_figure.show_one_device(figure, [2.0]) or iter(()))
    assert sent == []
    with widget.drawing():
        pass
    assert [set(state) for state in sent] == [names(widget, "1 device") | {"outline"}]


def test_gaps_are_sent_as_json_has_them():
    widget = LiveFigureWidget(go.Figure())
    assert json.dumps(widget.outline, allow_nan=False)
    values = np.array([1.0, np.nan, np.inf]), np.array([1, 2]), ["a", None]
    widget = LiveFigureWidget(go.Figure([go.Scatter(y=y) for y in values]))
    description = [getattr(widget, f"trace_{index}")["y"] for index in range(widget.num_traces)]
    assert json.dumps(description, allow_nan=False) == '[[1.0, null, null], [1, 2], ["a", null]]'


def test_a_page_that_comes_later_finds_everything(widget: LiveFigureWidget):
    with widget.drawing() as figure:
        live_figure.show_one_device(figure, [2.0, 1.0])
    state = widget.get_state()
    assert [state[f"trace_{index}"]["name"] for index in range(state["num_traces"])] == [t.name for t in figure.data]
    [trace] = (state[name] for name in names(widget, "1 device"))
    assert trace["y"] == [2.0, 1.0] and state["outline"]["annotations"] and len(state["plotly_script"]) > 1_000_000


def test_its_module_loads_at_once():
    assert len(LiveFigureWidget._esm) < 10_000, "a model whose module takes two seconds to load never hears of a change"


def test_threads_take_turns(widget: LiveFigureWidget, sent: list[dict[str, Any]]):
    def draw(length: int) -> None:
        for _ in range(20):
            with widget.drawing() as figure:
                live_figure.show_one_device(figure, [1.0] * length)
                live_figure.show_steps(figure, 20 * length, 1000)

    threads = [threading.Thread(target=draw, args=(length,)) for length in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_TIMEOUT_S)
    [name] = names(widget, "1 device")
    shown: dict[str, Any] = {}
    ends = {1: 20, 2: 50, 3: 70}
    for state in sent:
        shown |= state
        if name in shown and "outline" in shown:
            assert shown["outline"]["xaxis"]["range"][1] == ends[len(shown[name]["y"])]
    assert len(shown[name]["y"]) == len(trace_of(widget, name).y)


def trace_of(widget: LiveFigureWidget, name: str) -> Any:
    return widget.figure.data[int(name.removeprefix("trace_"))]
