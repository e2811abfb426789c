"""``wb.planner.plan`` from models, costs and names; nothing here starts an engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import workbench as wb
from tests.session.test_subject import Noisy
from workbench.errors import StrategyError
from workbench.session.planning import first_batch


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))


def test_a_model_is_traced_and_planned() -> None:
    plan = wb.planner.plan(perceptron, "a100-80g-selene", 2, 8, inputs=(2, 64))
    assert plan.is_exact
    assert plan.problem.costs.rows[0].own[0].flops == 2 * 64 * 256
    assert plan.strategy.resolve(plan.problem.costs.layers, 2)


def test_costs_may_be_given() -> None:
    costs = wb.planner.layer_costs(perceptron, (2, 64))
    assert (
        wb.planner.plan(costs, "a100-80g-selene", 2, 8).strategy
        == wb.planner.plan(perceptron(), "a100-80g-selene", 2, 8, inputs=(1, 64)).strategy
    )


def test_named_transformers_are_planned() -> None:
    plan = wb.planner.plan("gpt2", "a100-80g-selene", 2, 4, precision="bf16", micro_batches=1, recompute=False)
    assert plan.resolved.options.precision == "bf16"
    assert plan.estimate.step_s > 0


def test_what_is_missing_or_unknown_is_said() -> None:
    with pytest.raises(StrategyError, match="inputs is None"):
        wb.planner.plan(perceptron, "a100-80g-selene", 2, 8)
    with pytest.raises(StrategyError, match=r"plan\(zeros=\): no such constraint"):
        wb.planner.plan("gpt2", "a100-80g-selene", 2, 8, zeros=1)
    with pytest.raises(StrategyError, match="'gpt-2' is none of"):
        wb.planner.plan("gpt-2", "a100-80g-selene", 2, 8)


@pytest.mark.parametrize("dtype", ["float16", "fp8", torch.float64])
def test_costs_at_a_dtype_that_is_not_counted_are_refused(dtype: str | torch.dtype) -> None:
    with pytest.raises(StrategyError, match=rf"dtype={dtype!r}, but costs are counted as 'fp32' \(torch.float32\), "):
        wb.planner.layer_costs(perceptron, (2, 64), dtype=dtype)


def test_a_look_at_the_first_samples_draws_none_of_the_programs_random_numbers() -> None:
    """A panel that predicts only changed what the notebook drew next."""
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    assert first_batch(Noisy(torch.zeros(4, 3)), None).sample_shape == (3,)
    assert torch.rand(()) == expected
