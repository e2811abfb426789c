"""The live view of loops of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.ui.reports import block
from workbench.core.metrics import LastSteps, LossTerm, RunEvent
from workbench.errors import NotStartedError
from workbench.ui.live.live_view import LiveView


class FakeSession:
    num_engines = 2

    def __init__(self) -> None:
        self.listeners: list[Callable[[int, object], None]] = []

    def subscribe(self, hear: Callable[[int, object], None]) -> Callable[[], None]:
        self.listeners.append(hear)
        return lambda: self.listeners.remove(hear)


def test_loops_are_shown_one_after_the_other():
    session = FakeSession()
    view = LiveView(session)
    (hear,) = session.listeners
    hear(-1, RunEvent("ended", 0))
    hear(0, {"something": "else"})
    assert view.live.shown is None, "nothing to show yet"
    hear(0, block(0, (2.0, 1.5), num_steps=0))
    hear(0, block(2, (1.25,), num_steps=0))
    hear(-1, RunEvent("ended", 0))
    assert "own loop 1" in view.live.title.value and "ended <b>last report: step 3" in view.live.status.state.value
    view.live.link._receive(None, {"event": "visible", "value": True, "view": "page"}, [])
    assert "ended <b>last report: step 3" in view.live.status.state.value, "also for a page that looks later"
    hear(0, block(0, (2.0,), num_steps=0))
    assert "own loop 2" in view.live.title.value and view.live.history.last_step == 1
    view.close()
    assert session.listeners == []


def test_without_a_session_it_says_so():
    with pytest.raises(NotStartedError, match=r"No engines are running.*%workbench start"):
        LiveView()


def test_the_last_steps_of_all_ranks_are_shown_when_the_cell_ends():
    session = FakeSession()
    view = LiveView(session)
    (hear,) = session.listeners
    last = [LastSteps(rank, 2, 2, (64,), (LossTerm(0.5, 2),), (0.25,), (0.0,), (0,)) for rank in (0, 1)]
    hear(1, replace(last[1], first_step=0))  # of a cell that failed before rank 0 could report
    hear(-1, RunEvent("ended", 0, "rank 0: ValueError: no"))
    hear(1, last[1])  # before what rank 0 has to tell
    hear(0, block(0, (2.0, 1.5), num_steps=0))
    hear(0, last[0])
    assert view.live.history.last_step == 2
    hear(-1, RunEvent("ended", 0))
    assert (view.live.history.last_step, view.live.history.latest_loss) == (3, 0.5)
    hear(0, block(0, (2.0,), num_steps=0))
    hear(-1, RunEvent("ended", 0))
    assert view.live.history.last_step == 1, "of the loop before nothing is left"


@pytest.mark.parametrize(
    ("failure", "ending"), [("rank 1: ValueError: no", {"error": "rank 1: ValueError: no"}), ("", None)]
)
def test_the_log_of_a_loop_says_how_its_cell_failed(failure, ending, tmp_path):
    session = FakeSession()
    LiveView(session, log=f"jsonl:{tmp_path}/metrics.jsonl")
    (hear,) = session.listeners
    hear(0, block(0, (2.0,), num_steps=0))
    hear(-1, RunEvent("ended", 0, failure))
    *_, last = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert last == {"run": "own loop 1", **ending} if ending else last["step"] == 1


def test_the_log_of_a_loop_ends_with_its_session(tmp_path):
    session = FakeSession()
    LiveView(session, log=f"jsonl:{tmp_path}/metrics.jsonl")
    session.listeners[0](0, block(0, (2.0,), num_steps=0))
    session.listeners[0](-1, RunEvent("closed", 0))
    *_, last = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert last["run"] == "own loop 1" and "session of this view is closed" in last["error"]


def test_steps_are_written_once_after_the_cell_of_the_view_has_run_again(tmp_path):
    session, log = FakeSession(), f"jsonl:{tmp_path}/metrics.jsonl"
    views = [LiveView(session, log=log) for _ in range(2)]
    LiveView(FakeSession(), log=log)
    for hear in session.listeners:
        hear(0, block(0, (2.0,), num_steps=0))
        hear(-1, RunEvent("ended", 0))
    lines = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))
    assert [line["step"] for line in lines if "step" in line] == [1], views


def test_a_view_that_cannot_draw_says_so_and_the_cell_goes_on(monkeypatch: pytest.MonkeyPatch):
    session = FakeSession()
    view = LiveView(session)
    (hear,) = session.listeners
    with monkeypatch.context() as broken:
        broken.setattr(view.live, "begin", lambda *args: 1 / 0)
        hear(0, block(0, (2.0,), num_steps=0))
    assert isinstance(view.failures.error, ZeroDivisionError) and view.failures.box.layout.display == ""


def test_a_closed_session_is_said():
    session = FakeSession()
    view = LiveView(session)
    session.listeners[0](-1, RunEvent("closed", 0))
    assert "session of this view is closed" in view._hint.value and view._hint.layout.display == ""


def test_a_loop_that_failed_is_not_shown_as_ended():
    session = FakeSession()
    view = LiveView(session)
    (hear,) = session.listeners
    hear(0, block(0, (2.0, 1.5), num_steps=0))
    hear(-1, RunEvent("ended", 0, "rank 1: ValueError: no\nat all"))
    assert 'class="wb-state failed"' in view.live.status.state.value
    assert "failed <b>last report: step 2" in view.live.status.state.value
    assert "failed: rank 1: ValueError: no<" in view.live.log_section.lines.value
    assert "failed: rank 1: ValueError: no<" in view._static_bundle()["text/html"]
