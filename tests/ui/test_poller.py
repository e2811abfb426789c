"""The poller: what brings a run's messages from the engines to a view, on a thread of its own."""

from __future__ import annotations

import threading
import time

from tests.timeouts import WAIT_TIMEOUT_S
from tests.ui.conftest import make_record
from tests.ui.reports import FakeRun, block
from workbench.ui.live.poller import Poller


class Polled(FakeRun):
    """Reports one block per poll."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.left = num_steps

    def poll(self) -> list[object]:
        if self.left == 0:
            return []
        self.left -= 1
        if not self.left:
            self.ended.set()
        return [block(self.left)]


def follow(run: FakeRun, on_metrics=lambda messages: None) -> tuple[object, object, list[str]]:
    """Record, error and thread names of a run followed to its end."""
    ended: list[tuple[object, object]] = []
    threads: list[str] = []

    def note(messages: list[object]) -> None:
        threads.append(threading.current_thread().name)
        on_metrics(messages)

    poller = Poller(run, note, lambda record, error: ended.append((record, error)))
    poller.start()
    assert poller.join(WAIT_TIMEOUT_S)
    assert len(ended) == 1
    return (*ended[0], threads)


def test_the_poller_hands_on_everything_from_its_own_thread():
    record, error, threads = follow(Polled(3))
    assert record == make_record("data", strategy="*: data") and error is None
    assert threads == ["workbench-poller"] * 3


def test_on_trained_is_called_before_the_result_is_fetched():
    calls: list[str] = []

    class Asked(Polled):
        def result(self):
            calls.append("result")
            return super().result()

    poller = Poller(
        Asked(1), lambda _: None, lambda *_: calls.append("end"), on_trained=lambda: calls.append("trained")
    )
    poller.start()
    assert poller.join(WAIT_TIMEOUT_S) and calls == ["trained", "result", "end"]


def test_an_error_of_the_run_is_handed_on():
    run = Polled(1)
    run.error = RuntimeError("rank 1 failed")
    record, error, _ = follow(run)
    assert record is None and str(error) == "rank 1 failed"


def test_a_broken_view_ends_the_poller_with_its_error():
    def broken(messages: list[object]) -> None:
        raise ZeroDivisionError("view")

    record, error, _ = follow(Polled(3), broken)
    assert record is None and isinstance(error, ZeroDivisionError)


def test_the_poller_asks_at_most_ten_times_a_second():
    started = time.monotonic()
    poller = Poller(Polled(4), lambda messages: None, lambda record, error: None)
    poller.start()
    assert poller.join(WAIT_TIMEOUT_S)
    assert time.monotonic() - started >= 0.25


def test_join_says_when_time_ran_out():
    poller = Poller(Polled(20), lambda messages: None, lambda record, error: None)
    poller.start()
    assert not poller.join(0.05)
    poller.run.stop()
    assert poller.join(WAIT_TIMEOUT_S)
