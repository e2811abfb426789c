"""What a run has reported, kept small: curves, time split, timeline."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ui.reports import block, spans
from workbench.core.metrics import RunEvent
from workbench.ui.decimate import MAX_POINTS
from workbench.ui.live.history import TAIL_POINTS, TRACED_STEPS, Curve, History, Split, time_split


def test_a_step_takes_as_long_as_its_slowest_rank():
    history = History(10, 2)
    history.add([block(0, (2.0, 1.5))])
    x, y = history.rate.points
    assert list(x) == [1, 2] and list(y) == pytest.approx([500, 500])
    assert history.latest_rate == pytest.approx(500) and history.latest_loss == 1.5
    assert history.last_step == 2 and history.boxed_bytes == 1000


def test_steps_without_a_loss_leave_a_gap():
    history = History(10, 2)
    history.add([block(0, (2.0, None, 1.0)), block(3, (None,))])
    assert list(history.loss.points[0]) == [1, 3] and history.latest_loss == 1.0


def test_memory_is_the_latest_by_rank_and_peaks_where_measured():
    history = History(10, 2)
    history.add([block(memory=({"parameters": 1}, {"parameters": 1}))])
    history.add([block(1, memory=({"parameters": 2, "peak": 9}, {"parameters": 5, "buffers": 1}))])
    assert history.peak_bytes == [9, 6], "without a measured peak, what is alive"


def test_the_rank_that_comes_last_waits_for_nobody():
    shares = time_split([(1.0, 1.0), (1.0, 1.0)], [(0.5, 0.1), (0.1, 0.3)])
    assert [share.boxing for share in shares] == pytest.approx([0.1, 0.1])
    assert [share.waiting for share in shares] == pytest.approx([0.2, 0.1])
    assert all(s.compute + s.boxing + s.waiting == pytest.approx(1) for s in shares)
    assert time_split([], []) == []
    assert time_split([(0.0,)], [(1.0,)]) == [Split(0.0, 1.0, 0.0)], "never more than the step"


def test_only_the_last_twenty_steps_count_and_none_before_a_change():
    history = History(100, 2)
    history.add([block(0, (1.0,) * 30, boxing_s=(0.1, 0.1)), block(30, (1.0,) * 20, boxing_s=(0.0, 0.0))])
    assert history.split == [Split(1.0, 0.0, 0.0)] * 2
    history.add([RunEvent("strategy", 50, "*: model")])
    assert history.split == [] and history.latest_rate is None


def test_steps_of_which_a_rank_reports_no_spans_are_not_kept_for_ever():
    history = History(1000, 2)
    history.add([spans(0, step) for step in range(1000)])
    assert len(history._spans) < 100 and not history.timeline
    history.add([spans(1, 999)])
    assert [rank.step for rank in history.timeline] == [999, 999]


def test_a_timeline_is_shown_once_every_rank_has_reported_its_spans():
    history = History(10, 2)
    history.add([spans(0, 3)])
    assert history.timeline == ()
    history.add([spans(1, 3), spans(1, 9)])
    assert [part.rank for part in history.timeline] == [0, 1] and history.timeline[0].step == 3
    history.add([spans(0, 9)])
    assert history.timeline[1].step == 9


def test_the_trace_keeps_the_newest_steps_of_all_ranks():
    history = History(0, 2)
    for step in range(TRACED_STEPS + 50):
        history.add([spans(0, step), spans(1, step)])
    assert [(part.rank, part.step) for part in history.traced][:3] == [(0, 50), (1, 50), (0, 51)]
    assert len(history.traced) == 2 * TRACED_STEPS


def test_changes_have_the_names_of_both_strategies():
    history = History(10, 2, "data")
    history.change(4, "hybrid")
    history.change(7, "model")
    assert [(c.step, c.before, c.after) for c in history.changes] == [(5, "data", "hybrid"), (8, "hybrid", "model")]


def test_a_curve_stays_small_and_keeps_its_spikes():
    curve = Curve()
    rng = np.random.default_rng(0)
    for start in range(0, 50_000, 50):
        y = rng.random(50)
        if start == 2000:
            y[7] = 99.0
        curve.add(np.arange(start, start + 50), y)
    x, y = curve.points
    assert len(x) <= MAX_POINTS + TAIL_POINTS and y.max() == 99.0 and x[y.argmax()] == 2007
    assert (np.diff(x) > 0).all() and x[-1] == 49_999
    old, new = np.histogram(x, bins=2)[0]
    assert 0.5 < old / new < 2, "old stretches are as dense as new ones"


def test_only_a_full_tail_changes_what_is_settled():
    curve = Curve()
    curve.add(range(TAIL_POINTS), range(TAIL_POINTS))
    assert len(curve.settled[0]) == 0 and len(curve.tail[0]) == TAIL_POINTS
    curve.add([TAIL_POINTS], [1.0])
    assert len(curve.settled[0]) == TAIL_POINTS + 1
    assert len(curve.tail[0]) == 0, "there is nothing new"
    curve.add([200], [5.0])
    assert list(curve.tail[0]) == [TAIL_POINTS, 200], "the tail begins where the rest ends"


def test_a_peak_is_at_least_what_is_alive():
    history = History(10, 2)
    history.add([block(0, (2.0,), memory=({"parameters": 2_000, "peak": 0}, {"parameters": 2_000, "peak": 5_000}))])
    assert history.peak_bytes == [2_000, 5_000]
