"""An interrupt of the notebook while a request is sent: all ranks get it, and the loop that follows it stops it."""

import os
import signal
import threading
import time

import pytest

from tests.timeouts import WAIT_TIMEOUT_S
from workbench.errors import CellError
from workbench.session.adapter import Engines, Request
from workbench.session.run import Run
from workbench.transport.held_interrupt import HeldInterrupt


def test_an_interrupt_is_held_until_it_may_come():
    reached = []

    def work():
        with HeldInterrupt():
            signal.raise_signal(signal.SIGINT)
            reached.append("after it")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["after it"]
    with pytest.raises(KeyboardInterrupt):  # the handler is the one of before
        signal.raise_signal(signal.SIGINT)


def test_without_an_interrupt_nothing_is_raised():
    before = signal.getsignal(signal.SIGINT)
    with HeldInterrupt() as held:
        assert signal.getsignal(signal.SIGINT) is not before
    held.release()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_of_the_context_passes_and_ends_the_holding():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="planned"), HeldInterrupt():
        raise ValueError("planned")
    with pytest.raises(ValueError, match="planned"), Request.sending([0]):
        raise ValueError("planned")
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_hold_nothing():
    before, seen = signal.getsignal(signal.SIGINT), []

    def hold():
        with HeldInterrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join(WAIT_TIMEOUT_S)
    assert seen == [before]


@pytest.mark.engines
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_interrupts_at_any_moment_of_a_join_leave_engines_with_their_variables(session, every):
    """A rank waited in C++ for one that had left, or under another number of the group, and was killed."""
    session.run("import time; kept = 7")
    for number in range(0, 20, every):
        session._pool._world_is_stale = True

        def interrupt(number=number):
            while not session.is_busy:
                time.sleep(0.001)
            time.sleep(0.004 * number)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            session.run("time.sleep(60)")
        thread.join(WAIT_TIMEOUT_S)
        assert session.run("kept").values == [7] * session.num_engines


@pytest.mark.engines
def test_a_join_that_is_interrupted_while_it_is_sent_reaches_all_ranks(session, monkeypatch):
    session.run("kept = 5")
    with pytest.raises(CellError):
        session.run("while True: pass", timeout=0.2)  # so that the next request joins a new world
    send, sent = Engines._send_call, []

    def interrupted(self, request, ranks, *rest):
        sent.append(ranks)
        if len(sent) == 1:
            signal.raise_signal(signal.SIGINT)
        return send(self, request, ranks, *rest)

    monkeypatch.setattr(Engines, "_send_call", interrupted)
    with pytest.raises((KeyboardInterrupt, CellError)):
        session.run("1")
    monkeypatch.undo()
    assert len(sent) >= session.num_engines
    assert session.run("kept", timeout=60).values == [5] * session.num_engines


@pytest.mark.engines
def test_an_interrupt_beside_a_reply_does_not_lose_it(session, monkeypatch):
    handle, replies = Run._handle_reply, []

    def interrupted(self, event):
        replies.append(event.rank)
        if len(replies) == 1:
            signal.raise_signal(signal.SIGINT)
        handle(self, event)

    monkeypatch.setattr(Run, "_handle_reply", interrupted)
    try:
        assert session.run("2", timeout=60).values == [2] * session.num_engines
    except (KeyboardInterrupt, CellError):
        assert sorted(set(replies)) == list(range(session.num_engines))
    monkeypatch.undo()
    assert session.run("3", timeout=60).values == [3] * session.num_engines
