"""A page that is loaded again gets the state of all widgets, whatever threads and other pages do at that moment."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import ipywidgets as widgets
import pytest
from ipywidgets import comm
from ipywidgets.widgets import widget

from tests.timeouts import WAIT_TIMEOUT_S
from workbench.ui import page_restore
from workbench.ui.live.run_view import RunView
from workbench.ui.panel import Panel

REQUEST = {"content": {"data": {"method": "request_states"}}}
OPENING = {"metadata": {"version": "1.0.0"}}


class Channel:
    """A page's channel, with what was sent on it."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.ask: Any = None
        comm.get_comm_manager().targets["jupyter.widget.control"](self, OPENING)

    def on_msg(self, handler: Any) -> None:
        self.ask = handler

    def send(self, data: dict[str, Any], buffers: Any = None) -> None:
        self.sent.append(data)


@pytest.fixture(autouse=True)
def _answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(comm.get_comm_manager(), "targets", {})
    monkeypatch.setattr(widget, "_instances", {})  # else the answer has what every test before has made
    page_restore.install()
    yield
    widgets.Widget._control_comm = None


def test_each_page_is_answered_on_its_own_channel() -> None:
    """JupyterLab may open two, and asks on both then; ipywidgets answered twice on the second."""
    first, second = Channel(), Channel()
    first.ask(REQUEST)
    second.ask(REQUEST)
    assert [data["method"] for page in (first, second) for data in page.sent] == ["update_states"] * 2


class Growing(widgets.HTML):
    """While its state is read for the first time, a thread makes another widget."""

    child: Any = None

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> Any:
        if self.comm is not None and self.child is None:
            thread = threading.Thread(target=lambda: setattr(self, "child", widgets.HTML("new")))
            thread.start()
            thread.join(WAIT_TIMEOUT_S)
        return super().get_state(key, drop_defaults)


def test_a_widget_that_a_thread_makes_meanwhile_is_in_the_answer() -> None:
    growing, page = Growing("old"), Channel()
    page.ask(REQUEST)
    [data] = page.sent
    assert data["states"][growing.child.model_id]["state"]["value"] == "new"
    growing.child.close()
    growing.close()


def test_what_a_thread_sends_belongs_to_the_request_that_started_it() -> None:
    """In the name of another request a page took it for the answer to that."""
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request")
    begun, seen = threading.Event(), []
    request.set("click")

    def work() -> None:
        begun.wait(WAIT_TIMEOUT_S)
        seen.append(request.get())

    thread = threading.Thread(target=page_restore.as_request(work))
    thread.start()
    request.set("the page asks for a state")
    begun.set()
    thread.join(WAIT_TIMEOUT_S)
    assert seen == ["click"]


def sent_by(panel: Panel, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The last state that each widget has sent since now."""
    sent: dict[str, dict[str, Any]] = {}

    def send(self: widgets.Widget, message: dict[str, Any], buffers: Any = None) -> None:
        if self.comm is not None:
            sent[self.model_id] = message.get("state", {})

    monkeypatch.setattr(widgets.Widget, "_send", send)
    return sent


def see(panel: Panel, view: str) -> None:
    panel.tabs._receive(panel.tabs, {"event": "visible", "value": True, "view": view}, [])


def test_a_page_that_is_loaded_again_gets_what_has_changed_while_it_was_loading(
    panel: Panel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = sent_by(panel, monkeypatch)
    see(panel, "first page")
    assert sent == {}, "it has heard all from the beginning"
    live = panel._runs_section.live
    live.begin("data", "*: data", 3)
    live.status.show_state("done", "finished", "after 3 steps")
    sent.clear()
    Channel()  # a page is loaded again
    see(panel, "second page")
    assert sent[live.status.state.model_id]["value"] == live.status.state.value
    assert f"IPY_MODEL_{live.shown.model_id}" in sent[live.box.model_id]["children"]
    figure = sent[live.shown.model_id]
    assert "outline" in figure and "trace_0" in figure and "plotly_script" not in figure
    assert list(sent).index(live.shown.model_id) < list(sent).index(live.box.model_id)
    sent.clear()
    see(panel, "second page")
    assert sent == {}, "once for each view"


def test_a_change_while_a_state_is_sent_is_what_the_page_ends_with(monkeypatch: pytest.MonkeyPatch) -> None:
    text, values = widgets.HTML("old"), []
    send = widgets.HTML._send

    def send_late(self: widgets.HTML, message: dict[str, Any], buffers: Any = None) -> None:
        if message["state"]["value"] == "old":
            self.value = "new"  # by a thread, and sent before what is being sent here
        values.append(message["state"]["value"])
        send(self, message, buffers)

    monkeypatch.setattr(widgets.HTML, "_send", send_late)
    page_restore._send_again(text)
    assert values[:2] == ["new", "old"] and values[-1] == "new"


def test_a_run_that_begins_makes_no_widget_of_widgets_that_a_loading_page_may_not_have() -> None:
    view = RunView(2)
    view._make_figure()
    before = set(widget._instances)
    view.begin("data", "*: data", 3)
    assert set(widget._instances) == before
