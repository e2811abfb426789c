"""Times of own work and of exchanges, on clocks that the test moves."""

from __future__ import annotations

import pytest

from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.costs import stopwatch
from workbench.training.costs.stopwatch import Stopwatch


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


@pytest.fixture
def clocks(monkeypatch):
    """A rank on half a core."""
    monkeypatch.setattr(stopwatch, "time", found := Clocks(share=0.5))
    monkeypatch.setattr(stopwatch.torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(stopwatch, "num_cores", lambda: 1)
    return found


def on_ranks(body, num_ranks=1, host="a"):
    return run_ranks(lambda: body(Stopwatch(current(), host)), num_ranks)


def test_own_work_is_timed_without_those_who_have_the_core_meanwhile(clocks):
    assert on_ranks(lambda watch: watch.own_s(lambda: clocks.work(2e-3)))[0] == pytest.approx(2e-3)


@pytest.mark.parametrize(("num_cores", "crowding"), [(1, 3.0), (2, 1.5), (3, 1.0), (8, 1.0)])
def test_ranks_share_the_cores_of_their_host(clocks, monkeypatch, num_cores, crowding):
    monkeypatch.setattr(stopwatch, "num_cores", lambda: num_cores)
    assert on_ranks(lambda watch: watch.crowding, 3) == [crowding] * 3


def test_cores_of_another_host_are_not_shared(clocks):
    found = run_ranks(lambda: Stopwatch(current(), "ab"[current().rank // 2]).crowding, 4)
    assert found == [2.0] * 4


def test_who_shares_a_core_needs_longer_on_the_wall(clocks, monkeypatch):
    monkeypatch.setattr(stopwatch, "_ranks_on", lambda host, world: 2)
    assert on_ranks(lambda watch: watch.own_s(lambda: clocks.work(2e-3)))[0] == pytest.approx(4e-3)


def test_an_exchange_is_what_it_adds_to_work_where_nothing_disturbs_it(clocks):
    clocks.share = 1.0
    late = iter([0.0] * 10 + [5e-3] * 3 + [0.0] * 100)
    work, exchange = (lambda: clocks.work(1e-3)), (lambda: clocks.wait(4e-3 + next(late)))
    assert on_ranks(lambda watch: watch.together_s(exchange, work))[0] == pytest.approx(4e-3)


def test_a_machine_that_slows_down_meanwhile_is_the_same_to_work_and_exchange(clocks):
    clocks.share, slower = 1.0, iter(range(1, 1000))
    work, exchange = (lambda: clocks.work(1e-3 * (1 + next(slower) // 16))), (lambda: clocks.wait(4e-3))
    assert on_ranks(lambda watch: watch.together_s(exchange, work))[0] == pytest.approx(4e-3, rel=0.3)


def test_an_exchange_takes_some_time(clocks):
    assert on_ranks(lambda watch: watch.together_s(lambda: None, lambda: None))[0] > 0


def test_several_threads_have_the_walls_clock_which_has_seen_the_others(clocks, monkeypatch):
    monkeypatch.setattr(stopwatch.torch, "get_num_threads", lambda: 2)
    found = on_ranks(lambda watch: (watch.own_s(lambda: clocks.work(2e-3)), watch.crowding))[0]
    assert found == pytest.approx((4e-3, 2.0))
