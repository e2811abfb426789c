"""What stops a run on the control thread reaches this run, in whichever order messages come, and no later one."""

import signal
import threading
from types import SimpleNamespace

import pytest

from tests.timeouts import WAIT_TIMEOUT_S
from workbench.session.on_engine import control, current_request
from workbench.tensors import world


@pytest.fixture(autouse=True)
def signals(monkeypatch):
    """How many interrupts have come; the module is as in a new engine."""
    for name, value in (("_run", 0), ("_is_handling", False), ("_run_to_stop", 0)):
        monkeypatch.setattr(current_request, name, value)
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(1))
    yield came
    signal.signal(signal.SIGINT, before)


def begin(run):
    with current_request.beginning(run) as is_to_stop:
        return is_to_stop


def on_control_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join(WAIT_TIMEOUT_S)


def test_a_run_that_is_handled_is_interrupted(signals):
    begin(7)
    on_control_thread(current_request.stop, 7, ())
    assert signals == [1] and current_request.state() == (7, True)


def test_a_stop_that_comes_before_its_request_is_not_lost(signals):
    begin(6)
    current_request.end()
    on_control_thread(current_request.stop, 7, ())
    assert signals == []
    assert begin(7) and not begin(8)


def test_a_stop_that_comes_after_the_reply_reaches_no_later_request(signals):
    begin(7)
    current_request.end()
    on_control_thread(current_request.stop, 7, ())
    assert not begin(8)
    on_control_thread(current_request.stop, 7, ())
    assert signals == []


def test_what_is_left_of_an_earlier_request_is_interrupted_too(signals):
    begin(6)
    on_control_thread(current_request.stop, 7, ())
    assert signals == [1] and begin(7)


def test_requests_of_other_clients_are_never_stopped_in_advance():
    assert not begin(0)


def test_a_request_does_not_begin_while_an_earlier_one_is_stopped(signals):
    begin(7)
    entered, leave = threading.Event(), threading.Event()

    def slowly():
        with current_request.unless_later(7) as is_in_time:
            assert is_in_time
            entered.set()
            leave.wait(WAIT_TIMEOUT_S)

    thread = threading.Thread(target=slowly)
    thread.start()
    entered.wait(WAIT_TIMEOUT_S)
    threading.Timer(0.05, leave.set).start()
    assert not begin(8) and leave.is_set()
    thread.join()


def test_a_late_abort_leaves_the_next_world_alone(monkeypatch):
    aborted = []
    monkeypatch.setattr(control, "joined_world", lambda: SimpleNamespace(abort=aborted.append))
    monkeypatch.setattr(control.engine_waits, "abort", aborted.append)
    begin(7)
    control.abort(7, "first", (), (), False)
    begin(8)
    control.abort(7, "late", (), (), False)
    assert aborted == ["first", "first"]


def test_a_question_makes_no_world(monkeypatch):
    """While the only engine of a session joined anew, the control thread made a world of its own beside that."""
    monkeypatch.setattr(world, "_process_world", None)
    monkeypatch.setattr(world, "init", pytest.fail)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert control._OPERATIONS["activity"]().call == ""
