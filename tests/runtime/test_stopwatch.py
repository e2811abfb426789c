"""Times of own work and of exchanges, on clocks that the test moves."""

from __future__ import annotations

import pytest

from workbench.runtime import stopwatch
from workbench.runtime.stopwatch import Stopwatch
from workbench.runtime.world import current
from workbench.testing import run_ranks


class Clocks:
    """Stands for the module ``time``: the wall's clock, and that of a thread that has the core for a part of it."""

    def __init__(self, share: float = 1.0) -> None:
        self.share, self.wall_s, self.own_s = share, 0.0, 0.0

    def work(self, seconds: float) -> None:
        self.own_s += seconds
        self.wall_s += seconds / self.share

    def wait(self, seconds: float) -> None:
        self.wall_s += seconds

    def perf_counter(self) -> float:
        return self.wall_s

    def thread_time(self) -> float:
        return self.own_s


@pytest.fixture(params=[1.0, 0.5])
def clocks(request, monkeypatch):
    monkeypatch.setattr(stopwatch, "time", found := Clocks(request.param))
    monkeypatch.setattr(stopwatch.torch, "get_num_threads", lambda: 1)
    return found


def on_one_rank(body):
    return run_ranks(lambda: body(Stopwatch(current())), 1)[0]


def test_own_work_is_timed_without_those_who_have_the_core_meanwhile(clocks):
    assert on_one_rank(lambda watch: watch.own_s(lambda: clocks.work(2e-3))) == pytest.approx(2e-3)


def test_the_slowdown_is_over_all_that_was_timed(clocks):
    def body(watch):
        assert watch.slowdown == 1.0
        for seconds in (1e-3, 5e-2):
            watch.own_s(lambda seconds=seconds: clocks.work(seconds))
        return watch.slowdown

    assert on_one_rank(body) == pytest.approx(1 / clocks.share)


def test_an_exchange_is_what_it_adds_to_work(clocks):
    def body(watch):
        work = lambda: clocks.work(1e-3)  # noqa: E731
        work_s = watch.own_s(work)
        return watch.together_s(lambda: clocks.wait(4e-3), work, work_s)

    assert on_one_rank(body) == pytest.approx(4e-3)


def test_an_exchange_takes_some_time(clocks):
    assert on_one_rank(lambda watch: watch.together_s(lambda: None, lambda: None, 1.0)) > 0


def test_several_threads_have_the_walls_clock(clocks, monkeypatch):
    monkeypatch.setattr(stopwatch.torch, "get_num_threads", lambda: 2)

    def body(watch):
        return watch.own_s(lambda: clocks.work(2e-3)), watch.slowdown

    assert on_one_rank(body) == pytest.approx((2e-3 / clocks.share, 1.0))
