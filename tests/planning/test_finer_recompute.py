"""Recomputation that a plan chooses: as little as the memory allows."""

from __future__ import annotations

import pytest

import workbench as wb
from workbench.errors import StrategyError

QUESTION = ("gpt2", "a100-80g-selene", 8, 256)
SETTLED = {"precision": "bf16", "pipeline": 1, "model": 1, "micro_batches": 1, "zero": 1}


def test_a_plan_recomputes_as_little_as_fits() -> None:
    """Between the bytes of no recomputation and of all, the step is between them, too."""
    none, full = (wb.planner.plan(*QUESTION, **SETTLED, recompute=how) for how in (False, True))
    most, least = none.estimate.peak_bytes, full.estimate.peak_bytes
    steps = []
    for share in (0.15, 0.5, 0.9):
        plan = wb.planner.plan(*QUESTION, **SETTLED, memory_bytes=least + share * (most - least))
        assert plan.strategy.options.recompute not in ("", "full")
        assert plan.estimate.peak_bytes <= plan.problem.memory_bytes
        assert plan.why_not(str(plan.strategy).replace(f"={plan.strategy.options.recompute}", "")).reason == "slower"
        steps.append(plan.estimate.step_s)
    assert full.estimate.step_s > steps[0] > steps[1] > steps[2] > none.estimate.step_s


def test_constraints_name_a_kind_or_a_number_of_blocks() -> None:
    found = [wb.planner.plan(*QUESTION, **SETTLED, recompute=how) for how in (True, "attention", "cheap", 3, False)]
    assert [plan.strategy.options.recompute for plan in found] == ["full", "attention", "cheap", "3", ""]
    peaks = [plan.estimate.peak_bytes for plan in found]
    assert peaks[0] < peaks[1] < peaks[2] < peaks[4] and peaks[0] < peaks[3] < peaks[4]
    seconds = [plan.estimate.step_s for plan in found]
    assert seconds[0] > seconds[1] > seconds[2] > seconds[4] and seconds[0] > seconds[3] > seconds[4]
    with pytest.raises(StrategyError, match="recompute='some': it is one of"):
        wb.planner.plan(*QUESTION, **SETTLED, recompute="some")


def test_no_plan_recomputes_more_blocks_than_the_model_has() -> None:
    with pytest.raises(StrategyError, match=r"recompute=99, but the model has 12 blocks.*use recompute=12 or less"):
        wb.planner.plan(*QUESTION, **SETTLED, recompute=99)
    plan = wb.planner.plan(*QUESTION, **SETTLED, recompute=12)
    refused = plan.why_not("*: data | 1x8x1 bf16 recompute=13")
    assert refused.reason == "cannot run" and "recompute=13, but the model has 12 blocks" in str(refused)
