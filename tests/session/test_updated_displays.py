"""Displays that a cell updates, and output that it clears, as a notebook shows them. Messages are played."""

from __future__ import annotations

import time
from typing import Any

import ipyparallel as ipp
import pytest

from workbench.session import magic
from workbench.session.adapter import Event, Request
from workbench.session.output.listeners import OutputListener
from workbench.session.output.merging import MERGE_WAIT_S, Block


class Notebook:
    """The output of one cell as a page shows it, of two ranks' messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, in_notebook: bool = True) -> None:
        self.outputs: list[tuple[str, str]] = []  # (place, text)
        self._waits, self._now = False, 0.0
        monkeypatch.setattr(magic, "display", self._display)
        monkeypatch.setattr(magic, "clear_output", self._clear)
        monkeypatch.setattr(magic, "print", lambda text, file=None: self._put("", text), raising=False)
        self.listener = OutputListener((0, 1), 2, magic.OutputDisplay(2, in_notebook).show)

    def _put(self, place: str, text: str) -> None:
        if self._waits:
            self.outputs.clear()
        self._waits = False
        self.outputs.append((place, text))

    def _display(self, data: Any, metadata: Any, raw: bool, display_id: str = "", update: bool = False) -> None:
        text = data.get("text/html") or data["text/plain"]
        if update:
            self.outputs = [(place, text if place == display_id else shown) for place, shown in self.outputs]
        else:
            self._put(display_id, text)

    def _clear(self, wait: bool) -> None:
        self._waits = wait
        if not wait:
            self.outputs.clear()

    def say(self, rank: int, kind: str, content: Any) -> None:
        self.listener.on_event(Event(kind, rank, content, self._now))

    def later(self) -> list[str]:
        """What is shown when nothing waits for another rank any more."""
        self._now += 2 * MERGE_WAIT_S
        self.listener.on_idle(self._now)
        return [text for _, text in self.outputs]


@pytest.fixture
def notebook(monkeypatch):
    return Notebook(monkeypatch)


def text(content: str, place: str = "") -> dict[str, Any]:
    return {"data": {"text/plain": content}, "metadata": {}, "transient": {"display_id": place} if place else {}}


def picture(content: str, place: str = "") -> dict[str, Any]:
    bundle = text("a figure", place)
    return {**bundle, "data": {**bundle["data"], "text/html": content}}


WAIT, AT_ONCE = {"wait": True}, {"wait": False}


def test_messages_become_events():
    request, kept = Request((0,)), {"outputs": [], "data": {}}
    for kind, content in (("update_display_data", text("1 %", "a")), ("clear_output", WAIT)):
        request._on_message(0, kept, {"header": {"msg_type": kind}, "content": content})
    events = [request.take(0.0) for _ in range(2)]
    assert [(event.kind, event.content) for event in events if event] == [("update", text("1 %", "a")), ("clear", WAIT)]


def test_a_display_is_updated_in_its_place(notebook):
    notebook.say(0, "display", text("0 %", "a"))
    notebook.say(0, "stream", ("stdout", "a line\n"))
    assert notebook.later() == ["[0] 0 %", "[0] a line"]
    for percent in range(1, 100):
        notebook.say(0, "update", text(f"{percent} %", "a"))
    assert notebook.later() == ["[0] 99 %", "[0] a line"]
    notebook.say(0, "update", text("100 %", "a"))
    assert notebook.later() == ["[0] 100 %", "[0] a line"]
    assert notebook.listener.text == "[0] 100 %\n[0] a line"


def test_ranks_update_displays_of_their_own(notebook):
    """They may have the same name, and the same content at first."""
    for rank in (0, 1):
        notebook.say(rank, "display", picture("0 %", "same"))
    assert notebook.later() == ["[0]", "0 %", "[1]", "0 %"]
    notebook.say(1, "update", picture("50 %", "same"))
    assert notebook.later() == ["[0]", "0 %", "[1]", "50 %"]


def test_a_cleared_output_makes_room_for_the_next_one(notebook):
    """``clear_output(wait=True); plt.plot(losses); plt.show()`` in a loop."""
    for step in range(5):
        notebook.say(0, "stream", ("stdout", f"step {step}\n"))
        notebook.say(0, "display", picture(f"figure {step}"))
        assert notebook.later() == [f"[0] step {step}", "[0]", f"figure {step}"]
        notebook.say(0, "clear", WAIT)
        assert notebook.later() == [f"[0] step {step}", "[0]", f"figure {step}"]
    notebook.say(0, "clear", AT_ONCE)
    assert notebook.later() == []
    assert "step 0" in notebook.listener.text  # the collected text is whole


def test_lines_of_both_streams_go_also_unfinished_ones(notebook):
    """A warning waits for an equal one of the other rank; it was shown behind the clear that came after it."""
    for step in range(3):
        notebook.say(0, "stream", ("stdout", f"loss {step}"))
        notebook.say(0, "stream", ("stderr", f"a warning in step {step}\na line without end"))
        notebook.say(1, "stream", ("stderr", f"a warning in step {step}\n"))
        notebook.say(0, "clear", WAIT)
        notebook.say(0, "stream", ("stdout", "then\n"))
        notebook.say(0, "stream", ("stderr", "and a warning\n"))
        others = [f"[1] a warning in step {each}" for each in range(step + 1)]
        assert sorted(notebook.later()) == sorted(["[0] then", "[0] and a warning", *others])
    lines = notebook.listener.text.split("\n")  # it keeps all output
    assert lines.count("[0] a line without end") == 3 and "[0] loss 2" in lines and "[0] a warning in step 0" in lines


def test_ranks_that_clear_together_leave_nothing(notebook):
    for step in range(3):
        for rank in (0, 1):
            notebook.say(rank, "clear", WAIT)
            notebook.say(rank, "stream", ("stdout", f"step {step}\n"))
            notebook.say(rank, "display", picture(f"figure {step} of {rank}"))
        assert notebook.later() == [f"[all] step {step}", "[0]", f"figure {step} of 0", "[1]", f"figure {step} of 1"]


def test_a_rank_clears_its_own_output_only(notebook):
    for rank in (0, 1):
        notebook.say(rank, "stream", ("stdout", "of both\n"))
    notebook.say(1, "display", picture("0 %", "a"))
    notebook.say(0, "stream", ("stdout", "of rank 0\n"))
    notebook.say(1, "update", picture("10 %", "a"))
    assert notebook.later() == ["[all] of both", "[0] of rank 0", "[1]", "10 %"]
    notebook.say(0, "clear", AT_ONCE)
    assert notebook.later() == ["[1] of both", "[1]", "10 %"]
    notebook.say(1, "update", picture("20 %", "a"))
    notebook.say(0, "stream", ("stdout", "again\n"))
    assert notebook.later() == ["[1] of both", "[1]", "20 %", "[0] again"]
    notebook.say(1, "clear", WAIT)
    assert len(notebook.later()) == 4
    notebook.say(0, "stream", ("stdout", "and again\n"))
    assert notebook.later() == ["[0] again", "[0] and again"]


def test_updates_in_a_flood_of_lines_leave_it_folded(notebook):
    notebook.say(0, "display", text("0", "a"))
    for number in range(2000):
        notebook.say(0, "stream", ("stdout", f"line {number}\n"))
        if number % 100 == 0:
            notebook.say(0, "update", text(str(number), "a"))
    shown = notebook.later()
    assert shown[0] == "[0] 1900" and len(shown) < 250


def test_a_terminal_keeps_all_output(monkeypatch):
    terminal = Notebook(monkeypatch, in_notebook=False)
    terminal.say(0, "display", text("0 %", "a"))
    terminal.say(0, "clear", AT_ONCE)
    terminal.say(0, "update", text("1 %", "a"))
    assert terminal.later() == ["[0] 0 %", "[0] 1 %"]


@pytest.mark.engines
@pytest.mark.parametrize("wait_s", [0.0, 0.5], ids=["at once", "late, as on a busy machine"])
def test_engines_update_and_clear_in_order_whenever_the_session_listens(session, monkeypatch, wait_s):
    execute = ipp.DirectView.execute

    def execute_and_wait(*args: Any, **options: Any) -> Any:
        sent = execute(*args, **options)
        time.sleep(wait_s)
        return sent

    monkeypatch.setattr(ipp.DirectView, "execute", execute_and_wait)
    shown: list[Block] = []
    session.run_cell(
        "from IPython.display import clear_output, display\n"
        "print('begin')\nh = display('0 %', display_id=True)\nh.update('50 %')\nclear_output(wait=True)\nprint('end')",
        ranks=[0],
        show=lambda stream, block: shown.append(block),
    )
    assert [block.kind for block in shown] == ["line", "display", "update", "clear", "line"]
    assert shown[2].content["data"]["text/plain"] == "'50 %'" and shown[3].content["wait"] is True
