"""A run whose strategy changed on the way: one record per strategy, each with what belongs to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.core.metrics import RunRecord, Segment
from workbench.core.segments import by_strategy
from workbench.core.verdict import UNKNOWN, Verdict

FAST = Segment(0, "data", "*: data", 800.0, (30, 20), ({"parameters": 8},) * 2, 64, 0.0, {"step_s": 0.01})
SLOW = Segment(40, "model", "*: model", 400.0, (15, 15), ({"parameters": 4},) * 2, 16, 0.5, {"step_s": 0.03})
RUN = RunRecord(
    "data", "*: data", 2, 8, tuple(range(100)), (0.01,) * 40 + (0.02,) * 60, 500.0, 2.0, (30, 20), (), 32,
    loss_difference=1e-7, equal=True, verdict=Verdict(equal=True), changes=((40, "*: model"),), run_id="7",
    layer_forward_s={"fc": 1.0}, predicted={"step_s": 0.01}, segments=(FAST, SLOW),
)  # fmt: skip


def test_each_strategy_has_its_own_steps_figures_and_prediction():
    before, after = by_strategy([RUN])
    assert (before.name, after.name) == ("data, steps 1-40", "data \u2192 model, steps 41-100")
    assert (before.strategy, after.strategy) == ("*: data", "*: model")
    assert before.losses == tuple(range(40)) and after.losses == tuple(range(40, 100)) and after.step_times_s[0] == 0.02
    parts = by_strategy([replace(RUN, samples=(8,) * 40 + (2,) * 60)])
    assert [(part.step_rates[0], len(part.step_rates)) for part in parts] == [(800.0, 40), (100.0, 60)]
    assert before.step_rates == (800.0,) * 40 and after.step_rates == (400.0,) * 60, "batches of one size"
    assert (before.samples_per_s, after.samples_per_s) == (800.0, 400.0)
    assert (before.speedup, after.speedup) == pytest.approx((3.2, 1.6)), "over the same one device"
    assert before.predicted["step_s"] == 0.01 and after.predicted["step_s"] == 0.03
    assert (before.boxed_bytes_per_step, after.boxed_bytes_per_step, after.bubble) == (64, 16, 0.5)
    assert before.layer_forward_s == {} and after.layer_forward_s == {"fc": 1.0}, "measured under the last strategy"
    assert len({before.run_id, after.run_id, RUN.run_id}) == 3 and not after.changes and not after.segments


def test_what_was_not_compared_with_one_device_says_so():
    before, after = by_strategy([RUN])
    assert before.equal is True and after.equal is None and after.verdict is UNKNOWN and after.loss_difference is None
    early = replace(RUN, segments=(FAST, replace(SLOW, first_step=4)))
    assert [part.equal for part in by_strategy([early])] == [True, True], "the compared steps are of both"
    early = replace(early, verdict=replace(RUN.verdict, num_steps=4))
    assert [part.equal for part in by_strategy([early])] == [True, None], "the change has ended the comparison"


def test_a_part_before_the_mistake_of_a_later_one_is_equal():
    wrong = Verdict(equal=False, largest=0.5, num_steps=20)
    right = Verdict(equal=True, largest=1e-7, num_steps=4)
    segments = replace(FAST, verdict=right), replace(SLOW, first_step=4)
    run = replace(RUN, equal=False, verdict=wrong, loss_difference=0.5, weight_difference=1e-6, segments=segments)
    before, after = by_strategy([run])
    assert (before.equal, before.verdict, before.loss_difference) == (True, right, 1e-7)
    assert (after.equal, after.verdict, after.loss_difference) == (False, wrong, 0.5)
    assert before.weight_difference == 1e-6, "weights are compared after two steps"
    at_once = replace(run, segments=(replace(FAST, verdict=replace(right, num_steps=1)), replace(SLOW, first_step=1)))
    assert by_strategy([at_once])[0].weight_difference is None
    assert RunRecord.from_dict(run.to_dict()) == run


def test_the_last_part_has_the_final_loss():
    parts = by_strategy([replace(RUN, settings={"steps": 100})])
    assert [part.final_loss for part in parts] == [None, 99]
    stopped = by_strategy([replace(RUN, settings={"steps": 101})])
    assert [part.final_loss for part in stopped] == [None, None]


def test_other_runs_stay_as_they_are_and_empty_parts_are_left_out():
    plain = replace(RUN, segments=(), changes=())
    assert by_strategy([plain, plain]) == [plain, plain]
    at_once = replace(RUN, segments=(replace(FAST), replace(SLOW, first_step=0)))
    assert [part.name for part in by_strategy([at_once])] == ["data \u2192 model, steps 1-100"]


def test_a_record_survives_json():
    assert RunRecord.from_dict(RUN.to_dict()) == RUN
