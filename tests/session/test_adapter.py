"""The private parts of ipyparallel that adapter.py uses exist and behave as it needs. Red here: look there."""

import os

import ipyparallel as ipp
import pytest

from tests.timeouts import WAIT_TIMEOUT_S, wait_until
from workbench.session import engine, protocol
from workbench.session.adapter import Event

pytestmark = pytest.mark.engines


def collect(request, kind, count):
    """The first ``count`` events of a kind."""
    found: list[Event] = []
    while len(found) < count:
        event = request.events.get(timeout=WAIT_TIMEOUT_S)
        if event.kind == kind:
            found.append(event)
    return found


def tag():
    return protocol.CellTag(10**6, all_ranks=True, wants_values=True)


def test_each_rank_replies_and_becomes_idle(session):
    request = session._live().execute((0, 1), "pass", tag())
    events = [request.events.get(timeout=WAIT_TIMEOUT_S) for _ in range(4)]
    assert sorted((event.kind, event.rank) for event in events) == [
        ("idle", 0),
        ("idle", 1),
        ("reply", 0),
        ("reply", 1),
    ]


def test_streams_arrive_whole_and_the_client_keeps_none(session):
    count = 2000
    request = session._live().execute((0, 1), f"for i in range({count}): print(i)", tag())
    text = {0: "", 1: ""}
    idle: set[int] = set()
    while idle != {0, 1}:
        event = request.events.get(timeout=WAIT_TIMEOUT_S)
        if event.kind == "stream":
            text[event.rank] += event.content[1]
        elif event.kind == "idle":
            idle.add(event.rank)
    expected = "".join(f"{i}\n" for i in range(count))
    assert text == {0: expected, 1: expected}


def test_a_request_that_cannot_be_sent_lets_answers_through(session, monkeypatch):
    live = session._live()

    def refuse(*_, **__):
        raise OSError("no more memory")

    with monkeypatch.context() as patch:
        patch.setattr(ipp.DirectView, "execute", refuse)
        with pytest.raises(OSError, match="no more memory"):
            live.execute((0,), "5", tag())
    assert collect(live.execute((0,), "5", tag()), "result", 1)[0].content["data"] == {"text/plain": "5"}


def test_calls_return_and_raise(session):
    request = session._live().apply((1,), os.getpid, (), tag())
    assert collect(request, "reply", 1)[0].content == session.status()[1].pid
    request = session._live().apply((1,), engine.pull, ("no_such_name",), tag())
    assert collect(request, "reply", 1)[0].content.ename == "NameError"


def test_the_control_channel_answers_while_the_main_thread_is_busy(session, tmp_path):
    begun, answered = tmp_path / "begun", tmp_path / "answered"
    waits = f"while not Path({str(answered)!r}).exists(): time.sleep(0.01)"
    cell = f"import time\nfrom pathlib import Path\nPath({str(begun)!r}).touch()\n{waits}"
    request = session._live().execute((0,), cell, tag())
    wait_until(begun.exists, "the cell")
    assert session._live().control((0,), "status")[0].answer(WAIT_TIMEOUT_S).busy
    answered.touch()
    collect(request, "reply", 1)


def test_an_unknown_operation_gets_no_answer(session):
    assert session._live().control((0,), "no such operation")[0].answer(1.0) is None


def test_nothing_is_remembered_of_finished_requests(session):
    client = session._live().client
    unanswered = set(client._futures)  # what engines were asked that earlier tests ended
    for _ in range(20):
        session.run("print('x' * 1000); 'y' * 1000")
    wait_until(lambda: client._futures.keys() <= unanswered, "that nothing is remembered")
    assert client.history == []
    assert not client._output_futures
    assert not client.results
    assert len(client.metadata) <= 1  # ipyparallel keeps one stray entry, "submitted"
    assert all(view.history == [] for view in session._live()._views.values())
