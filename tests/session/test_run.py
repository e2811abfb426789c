"""How a run follows the messages of its ranks, without engines."""

import os
import signal
from threading import Timer
from typing import Any
from unittest.mock import Mock

import pytest

from tests.session.played_engines import PlayedEngines
from tests.timeouts import WAIT_TIMEOUT_S
from workbench.core.metrics import RunEvent
from workbench.errors import CellError
from workbench.session.adapter import Request
from workbench.session.cluster import Session
from workbench.session.engine_pool import EnginePool
from workbench.session.processes.folder import SessionFolder
from workbench.session.protocol import CellTag, Failure, RankStatus, SavedCheckpoint
from workbench.session.recovery import Losses
from workbench.session.run import NullListener, Run
from workbench.session.text_reports import describe

RUNS = RankStatus(0, True, run=7, is_handling=True)


@pytest.fixture(autouse=True)
def _interruptible():
    """A request that a test leaves behind holds no interrupt back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def played(*ranks: int) -> tuple[PlayedEngines, Request]:
    """Ranks that reply when they are interrupted, and a request to them."""
    engines = PlayedEngines(dict.fromkeys(ranks, RUNS))
    with Request.sending(ranks, 7) as request:
        pass

    def reply(asked: Any) -> None:
        for rank in asked:
            request.put("reply", rank, KeyboardInterrupt())
            request.put("idle", rank, None)

    engines.on_interrupt = reply
    return engines, request


def test_an_error_that_comes_late_on_a_busy_machine_is_not_lost():
    """Replies and output come on different sockets."""
    request, nobody = Request([0]), Any
    failure = Failure("ValueError", "planned", (), 0.0)
    request.put("reply", 0, ValueError("planned"))
    late = Timer(1.3, lambda: [request.put("data", 0, failure), request.put("idle", 0, None)])  # in their order
    late.start()
    outcome = Run(nobody, request, NullListener(), nobody).wait()
    assert outcome.failures == {0: failure}
    assert outcome.elapsed_s < 5, "the end of the output ends the run"


def test_a_checkpoint_of_engines_without_the_sessions_folder_is_in_it(tmp_path):
    """As on other hosts, where `recover` found none."""
    saved = [SavedCheckpoint(f"/shared/{number}", {"model": ["net"]}) for number in range(2)]
    pool = EnginePool(PlayedEngines({}), "cpu", SessionFolder(tmp_path))
    pool._engines = pool._processes
    request = Request([0])
    for each in saved:
        request.put("data", 0, each)
    request.put("reply", 0, None)
    request.put("idle", 0, None)
    assert pool.follow(request, NullListener()).ok and pool._folder.checkpoints() == saved


def test_a_cell_that_an_interrupt_ends_after_the_last_reply_has_ended_for_subscribers_too(tmp_path):
    """The live view of its loop lacked its last steps, and the log stayed open."""
    session, heard = Session.__new__(Session), []
    pool: Any = Mock(num_engines=1, tag=Mock(return_value=CellTag(1, True)), follow=Mock(side_effect=KeyboardInterrupt))
    session._use(pool, SessionFolder(tmp_path), keep=False)
    session.subscribe(lambda rank, event: heard.append((rank, event)))
    with pytest.raises(KeyboardInterrupt):
        session.run("1")
    session._forget()
    assert heard == [(-1, RunEvent("ended", 0, "the notebook broke the cell off"))]


def test_a_call_that_is_interrupted_while_it_waits_for_its_turn_ends(tmp_path):
    """It ended with what it waited for: never, where that was a run of a panel that the same notebook had paused."""
    session = Session.__new__(Session)
    pool: Any = Mock(num_engines=1, tag=Mock(return_value=CellTag(1, True, label="training run 'data'")))
    session._use(pool, SessionFolder(tmp_path), keep=False)
    with session._requests.exclusive():
        call = session.submit(len, "")
        call.end()
        assert len(session._requests) == 1
    session._forget()
    with pytest.raises(CellError, match="training run 'data' was cancelled while it waited for its turn"):
        call.result()
    assert not pool.send.called


def test_a_resize_to_the_present_number_ends_no_panel_and_no_view(tmp_path):
    session, heard = Session.__new__(Session), []
    pool: Any = Mock(num_engines=2, losses=Losses())
    session._use(pool, SessionFolder(tmp_path), keep=False)
    session.subscribe(lambda rank, event: heard.append(event))
    session.resize(2)
    assert heard == [] and not pool.resize.called
    pool.resize = Mock(side_effect=lambda number: setattr(pool, "num_engines", number) or 1 // 0)
    with pytest.raises(ZeroDivisionError):
        session.resize(3)
    session._forget()
    assert heard == [RunEvent("resized", 0)], "there are more, though they could not join"


@pytest.mark.parametrize("where", ["_finished", "_step", "_time_to_wait", "_decide", "stop"])
def test_an_interrupt_at_any_line_stops_the_ranks(monkeypatch, where):
    """Two of them: at the end of a loop's turn, or while the first was handled, it left ranks that nobody followed."""
    engines, request = played(0, 1)
    plain, calls = getattr(Run, where), []

    def interrupted(self: Run, *args: Any) -> Any:
        calls.append(where)
        if len(calls) < 3:
            signal.raise_signal(signal.SIGINT)
        return plain(self, *args)

    monkeypatch.setattr(Run, where, interrupted)
    signal.raise_signal(signal.SIGINT)
    outcome = Run(engines, request, NullListener(), engines).wait()
    request.release()
    assert outcome.stop_reason == "interrupt" and set(outcome.replies) == {0, 1} and engines.killed == []


def test_a_wait_for_messages_ends_with_an_interrupt():
    engines, request = played(0)
    Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    outcome = Run(engines, request, NullListener(), engines).wait()
    request.release()
    assert outcome.stop_reason == "interrupt" and outcome.elapsed_s < 0.9


def test_an_interrupt_after_the_last_reply_is_not_lost():
    """The output may take seconds more; the interrupt was forgotten, and the next cell ran."""
    engines, request = played(0)
    pool = EnginePool(engines, "cpu", Any)
    pool._engines = engines
    request.put("reply", 0, "value")
    signal.raise_signal(signal.SIGINT)
    Timer(0.05, request.put, ("wake", 0, None)).start()
    with pytest.raises(KeyboardInterrupt):
        pool.follow(request, NullListener())
    assert engines.sent == [] and not pool.active
    with pytest.raises(KeyboardInterrupt):  # the handler is the one of before
        signal.raise_signal(signal.SIGINT)


def test_an_engine_that_cannot_leave_its_world_does_not_hold_up_the_end(monkeypatch):
    """It may hang in C code, where no interrupt reaches it: the session of a profile waited for it without end."""
    monkeypatch.setattr("workbench.session.engine_pool._LEAVE_TIMEOUT_S", 0.05)
    engines, request = played(0, 1)
    engines.registered, engines.apply, engines.on_interrupt = lambda: [0, 1], lambda *sent: request, lambda ranks: None
    engines.num_ranks = 2
    pool = EnginePool(engines, "cpu", Any)
    pool._engines = engines
    request.put("reply", 0, None)
    pool._try_to_leave_world()
    assert engines.killed == [] and request.events.empty()
    with pytest.raises(KeyboardInterrupt):  # the handler is the one of before
        signal.raise_signal(signal.SIGINT)


def test_the_status_says_that_a_rank_has_died():
    engines, _ = played(0)
    engines.num_ranks, engines.ended = 3, {1}
    pool = EnginePool(engines, "cpu", Any)
    pool._engines = engines
    assert [describe(each) for each in pool.status()][1:] == [
        "rank 1  died (killed); the next cell or run starts it again",
        "rank 2  does not answer",
    ]


def test_an_interrupt_beside_a_failure_does_not_hide_it():
    engines, request = played(0)
    pool = EnginePool(engines, "cpu", Any)
    pool._engines = engines
    failure = Failure("ValueError", "planned", (), 0.0)
    request.put("data", 0, failure)
    request.put("reply", 0, ValueError("planned"))
    Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert pool.follow(request, NullListener()).failures == {0: failure}


def test_a_stop_of_another_thread_while_ranks_are_asked_is_not_lost():
    """It comes after the run has looked for one."""
    engines, request = played(0)
    run, plain = Run(engines, request, NullListener(), engines, num_ranks=1), engines.control
    asked: list[str] = []

    def control(ranks: Any, operation: str, **arguments: Any) -> Any:
        if operation != "activity":
            return plain(ranks, operation, **arguments)
        asked.append(operation)
        if len(asked) == 1:
            run.stop()
        return {}

    engines.control = control
    late = Timer(WAIT_TIMEOUT_S, run.abandon, ("the stop was lost",))
    late.start()
    outcome = run.wait()
    late.cancel()
    request.release()
    assert outcome.stop_reason == "interrupt" and isinstance(outcome.replies[0], KeyboardInterrupt)


def test_a_flood_of_output_does_not_hold_up_a_stop():
    engines, request = played(0)

    class Flood(NullListener):
        def on_event(self, event: Any) -> None:
            request.put("stream", 0, ("stdout", "more"))

    request.put("stream", 0, ("stdout", "first"))
    run = Run(engines, request, Flood(), engines)
    run.stop()
    assert run.wait().stop_reason == "interrupt"
    request.release()
