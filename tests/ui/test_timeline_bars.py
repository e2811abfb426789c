"""A measured step as bars, what was expected below it, and the same for trace viewers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.ui.reports import spans
from workbench.core.trace_events import chrome_trace
from workbench.pipeline.schedules import make_table
from workbench.pipeline.simulate import simulate
from workbench.ui.live.timeline_bars import simulated_from, timeline_bars

RANKS = [spans(0), spans(1)]


def test_bars_lie_where_actions_ran_with_boxing_at_their_end():
    bars = timeline_bars(RANKS)
    forward = bars.measured["forward"]
    assert (forward.rows, forward.start_s, forward.length_s) == ([0, 1], [0.0, 1.0], [0.75, 0.75])
    assert forward.labels == ["F0", "F0"]
    assert bars.measured["boxing"].start_s[:2] == [0.75, 5.5] and bars.measured["boxing"].length_s[1] == 0.5
    assert bars.measured["optimizer_step"].start_s == [6.0, 6.0]
    assert bars.measured_s == 6.5


def test_tips_say_what_was_measured_expected_and_moved():
    tip = timeline_bars(RANKS).measured["backward"].tips[1]
    for words in ("rank 1", "B0", "backward, micro-batch 0", "2.00 s measured", "1.50 s simulated", "500 ms of it"):
        assert words in tip
    assert "2 exchanges, 1.00 kB sent" in tip


def test_without_a_prediction_the_measured_work_is_put_together_anew():
    simulated = simulated_from(RANKS)
    assert simulated.makespan_s == pytest.approx(0.75 + 0.75 + 1.5 + 1.5), "nobody waits for more than its inputs"
    thin = timeline_bars(RANKS).simulated
    assert thin["forward"].start_s == [0.0, 0.75] and thin["backward"].start_s == pytest.approx([3.0, 1.5])


def test_a_prediction_is_drawn_on_every_rank_of_its_stage():
    expected = simulate(make_table("1f1b", 2, 1), 2, lambda action: 1.0)
    ranks = [spans(0), spans(1, stage=0), spans(2, stage=1), spans(3, stage=1)]
    bars = timeline_bars(ranks, expected)
    assert bars.simulated["forward"].rows == [0, 1, 2, 3]
    assert bars.simulated["forward"].start_s == [0.0, 0.0, 1.0, 1.0] and bars.simulated_s == 4.0


def test_of_many_ranks_those_are_drawn_that_have_rows():
    ranks = [replace(spans(rank, stage=rank % 2), rank=rank) for rank in range(32)]
    bars = timeline_bars(ranks)
    tips = dict(zip(bars.measured["forward"].rows, bars.measured["forward"].tips, strict=True))
    assert sorted(tips) == list(range(16)) == sorted(set(bars.measured["boxing"].rows))
    assert all(f"rank {2 * row} \u00b7" in tip for row, tip in tips.items())
    assert sorted(set(bars.simulated["forward"].rows)) == list(range(16))
    assert bars.measured_s == timeline_bars(RANKS).measured_s, "the time of all ranks"


def test_the_summary_compares_both():
    bars = timeline_bars(RANKS, simulate(make_table("1f1b", 2, 1), 2, lambda action: 1.7))
    assert bars.summary().startswith("measured 6.50 s, simulated 6.80 s (+5 %)")
    assert "bubble 60 % measured, 50 % simulated" in bars.summary()
    assert bars.summary(width_px=400) == "6.50 s, simulated 6.80 s \u00b7 bubble 60 %, simulated 50 %"
    one = timeline_bars([replace(spans(0), spans=spans(0).spans[:1])])
    assert "bubble" not in one.summary(), "with one stage there is none"


def test_ranks_that_do_different_things_in_one_stage_are_not_simulated():
    odd = replace(spans(1, stage=0), spans=spans(1, stage=0).spans[1:])
    assert simulated_from([spans(0), odd]) is None
    assert timeline_bars([spans(0), odd]).simulated_s is None


def test_a_trace_has_an_event_per_action_in_microseconds():
    trace = json.loads(json.dumps(chrome_trace([*RANKS, spans(0, step=1), spans(1, step=1)])))
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert names == ["rank 0", "rank 1"]
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 12 and {event["args"]["step"] for event in events} == {0, 1}
    backward = next(event for event in events if event["name"] == "B0" and event["pid"] == 1)
    assert (backward["ts"], backward["dur"], backward["args"]["sent_bytes"]) == (2e6, 2e6, 1000)


def test_backwards_without_forwards_are_not_simulated():
    """A loop of a user's own, whose forward is no call of a parallelized module."""
    ranks = [replace(rank, spans=rank.spans[1:]) for rank in RANKS]
    assert simulated_from(ranks) is None and timeline_bars(ranks).measured["backward"].rows


def test_actions_that_follow_what_no_rank_did_are_not_simulated():
    """A loop with a second model on the first stage: nothing follows its forward."""
    more = [replace(span, micro_batch=1) for span in RANKS[0].spans[:2]]
    ranks = [replace(RANKS[0], spans=(*RANKS[0].spans[:2], *more)), RANKS[1]]
    assert simulated_from(ranks) is None and timeline_bars(ranks).simulated_s is None
