"""What a run reports on its way into the figure: history, figure and pump, without a browser or engines."""

from __future__ import annotations

import threading
import time

import numpy as np
import plotly.graph_objects as go
import pytest

from tests.ui.conftest import make_record
from workbench.core.metrics import RunRecord, StepMetrics
from workbench.theme import DARK, LIGHT
from workbench.ui import live_figure
from workbench.ui.history import History
from workbench.ui.live_figure import legend_html
from workbench.ui.pump import Pump


def report(rank: int, step: int, time_s: float = 0.1, loss: float | None = None, **memory: int) -> StepMetrics:
    return StepMetrics(rank, step, 10, time_s, samples=100, loss=loss, memory_bytes=memory, boxing_s=0.02)


def trace(figure: go.Figure, name: str) -> object:
    return next(trace for trace in figure.data if trace.name == name)


def test_a_step_takes_as_long_as_its_slowest_rank():
    history = History(num_steps=10, num_ranks=2, batch_size=100)
    history.add([report(0, 0, time_s=0.1, loss=2.0), report(1, 0, time_s=0.2)])
    snapshot = history.snapshot()
    assert list(snapshot.rate_steps) == [1] and snapshot.samples_per_s[0] == pytest.approx(500)
    assert snapshot.latest_loss == 2.0 and snapshot.last_step == 1 and snapshot.num_steps == 10


def test_steps_that_were_not_reported_are_left_out():
    history = History(num_steps=10, num_ranks=1, batch_size=100)
    history.add([report(0, 0, loss=2.0), report(0, 7, loss=1.0)])
    snapshot = history.snapshot()
    assert list(snapshot.rate_steps) == [1, 8] and list(snapshot.losses) == [2.0, 1.0]


def test_memory_and_shares_are_the_latest_by_rank():
    history = History(num_steps=10, num_ranks=2, batch_size=100)
    history.add([report(0, 0, parameters=1), report(0, 1, parameters=2, peak=9), report(1, 1, parameters=5, buffers=1)])
    snapshot = history.snapshot()
    assert snapshot.peak_bytes == (9, 6), "without a measured peak, what is alive"
    assert snapshot.memory_by_kind[0]["parameters"] == 2
    assert snapshot.boxing_shares == pytest.approx((0.2, 0.2))


def test_before_the_first_step_there_is_nothing():
    snapshot = History(num_steps=10, num_ranks=2, batch_size=100).snapshot()
    assert snapshot.latest_rate is None and snapshot.latest_loss is None and snapshot.last_step == 0


def test_long_runs_are_decimated():
    history = History(num_steps=50_000, num_ranks=1, batch_size=100)
    history.add(StepMetrics(0, step, 50_000, 0.1, 100, loss=1.0) for step in range(50_000))
    snapshot = history.snapshot()
    assert len(snapshot.rate_steps) <= 1000 and len(snapshot.losses) <= 1000
    assert snapshot.rate_steps[-1] >= 49_900


@pytest.mark.parametrize("make", [go.Figure, go.FigureWidget], ids=["figure", "widget"])
def test_a_snapshot_is_put_into_the_figure(make: type):
    figure = make(live_figure.live_figure(2, 10))
    history = History(num_steps=10, num_ranks=2, batch_size=100)
    history.add([report(rank, 0, loss=2.0, parameters=2_000_000, peak=4_000_000) for rank in (0, 1)])
    live_figure.update(figure, history.snapshot())
    assert list(trace(figure, "throughput").y) == pytest.approx([1000])
    assert list(trace(figure, "this run").y) == [2.0]
    assert list(trace(figure, "parameters").x) == [2.0, 2.0]
    assert list(trace(figure, "peak of the process").text) == ["4.00 MB", "4.00 MB"]
    assert list(trace(figure, "boxing and waiting").x) == pytest.approx([20, 20])
    assert figure.layout.xaxis3.title.text == "MB"
    assert "1\u202f000 samples/s now" in figure.layout.annotations[0].text
    assert all(isinstance(trace.x, np.ndarray) for trace in figure.data), "lists cost two hundred times as much"


def test_a_new_run_starts_from_an_empty_figure():
    figure = live_figure.live_figure(2, 10)
    live_figure.show_record(figure, make_record("data"))
    live_figure.set_one_device(figure, [2.0, 1.0])
    assert len(trace(figure, "throughput").x) == 3 and len(trace(figure, "1 device").x) == 2
    live_figure.begin(figure, 50)
    assert [len(trace(figure, name).x) for name in ("throughput", "this run", "1 device")] == [0, 0, 0]
    assert list(trace(figure, "compute").x) == [0, 0]
    assert list(figure.layout.xaxis.range) == list(figure.layout.xaxis2.range) == [0, 50]


def test_every_pane_has_units():
    layout = live_figure.live_figure(2, 10).layout
    titles = [layout[name].title.text for name in ("xaxis", "yaxis", "xaxis2", "yaxis2", "xaxis3", "xaxis4")]
    assert titles == ["step", "samples/s", "step", "loss", "B", "% of the step"]


def test_the_theme_changes_colours_and_nothing_else():
    figure = live_figure.live_figure(2, 10)
    live_figure.show_record(figure, make_record("data"))
    live_figure.restyle(figure, DARK)
    assert trace(figure, "throughput").line.color == DARK.ink
    assert trace(figure, "parameters").marker.color == DARK.memory["parameters"]
    assert DARK.muted in figure.layout.annotations[0].text and LIGHT.muted not in figure.layout.annotations[0].text
    assert len(trace(figure, "throughput").x) == 3
    live_figure.restyle(figure, LIGHT)
    assert figure.layout.font.color == LIGHT.ink


def test_the_legend_names_every_colour():
    text = legend_html()
    for word in ("this run", "1 device", "param.", "activ.", "boxing and waiting", "compute"):
        assert word in text


class FakeRun:
    """A run that reports one step per poll."""

    def __init__(self, num_steps: int, fails: bool = False) -> None:
        self.left = num_steps
        self.fails = fails
        self.stopped = False

    def poll(self) -> list[StepMetrics]:
        if self.left == 0:
            return []
        self.left -= 1
        return [report(0, self.left)]

    def done(self) -> bool:
        return self.left == 0

    def stop(self) -> None:
        self.left = 0

    def result(self) -> RunRecord:
        if self.fails:
            raise RuntimeError("rank 1 failed")
        return make_record("data")


def follow(run: FakeRun, on_metrics=lambda metrics: None) -> tuple[object, object, list[str]]:
    """Record, error and thread names of a run followed to its end."""
    ended: list[tuple[object, object]] = []
    threads: list[str] = []

    def note(metrics: list[StepMetrics]) -> None:
        threads.append(threading.current_thread().name)
        on_metrics(metrics)

    pump = Pump(run, note, lambda record, error: ended.append((record, error)))
    pump.start()
    assert pump.join(10)
    assert len(ended) == 1
    return (*ended[0], threads)


def test_the_pump_hands_on_everything_from_its_own_thread():
    record, error, threads = follow(FakeRun(3))
    assert record == make_record("data") and error is None
    assert threads == ["workbench-pump"] * 3


def test_an_error_of_the_run_is_handed_on():
    record, error, _ = follow(FakeRun(1, fails=True))
    assert record is None and str(error) == "rank 1 failed"


def test_a_broken_view_ends_the_pump_with_its_error():
    def broken(metrics: list[StepMetrics]) -> None:
        raise ZeroDivisionError("view")

    record, error, _ = follow(FakeRun(3), broken)
    assert record is None and isinstance(error, ZeroDivisionError)


def test_the_pump_asks_at_most_ten_times_a_second():
    started = time.monotonic()
    pump = Pump(FakeRun(4), lambda metrics: None, lambda record, error: None, interval_s=0.001)
    pump.start()
    assert pump.join(10)
    assert time.monotonic() - started >= 0.3


def test_join_says_when_time_ran_out():
    pump = Pump(FakeRun(20), lambda metrics: None, lambda record, error: None)
    pump.start()
    assert not pump.join(0.05)
    pump.run.stop()
    assert pump.join(10)
