"""What a plan is remembered under: calls that differ in anything a rule looks at must not share one."""

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.testing import run_ranks


def on_two_ranks(program):
    return run_ranks(lambda: program(wb.placement.all("cpu")), 2)


def test_a_parameter_is_no_argument():
    def program(placement):
        x = wb.ones(4, 6, placement=placement, sbp="B")
        by_rows = x.sum(1)
        return by_rows.shape, nn.Parameter(x).sum().shape

    assert on_two_ranks(program)[0] == ((4,), ())


def test_a_flag_is_no_number():
    def program(placement):
        x = wb.randn(4, 6, placement=placement, sbp="S(0)")
        return torch.std(x, 1).shape, torch.std(x, True).shape

    assert on_two_ranks(program)[0] == ((4,), ())


def test_dividing_a_partial_sum_by_zero():
    def program(placement):
        x = wb.ones(2, 3, placement=placement, sbp="P")
        terms = x.sum(0)
        return (terms / 2.0).full_tensor(), (terms / 0.0).full_tensor()

    half, infinite = on_two_ranks(program)[0]
    assert half.tolist() == [1.0] * 3 and infinite.isinf().all()


def test_calls_that_never_repeat_are_forgotten(monkeypatch):
    monkeypatch.setattr("workbench.tensors.dispatch.dispatcher._MAX_PLANS", 20)

    def program(placement):
        x = wb.ones(4, 6, placement=placement, sbp="S(0)")
        for i in range(100):
            torch.clamp_min(x, float("nan")), x.pow(i)
        return len(x._spec.plans)

    assert on_two_ranks(program)[0] < 100


def test_a_plan_is_for_tensors_of_all_types():
    """Layouts and shapes are alike, the types of numbers are not: a model that changes its precision between steps."""

    def program(placement):
        found = []
        for dtype in (torch.bfloat16, torch.float64, torch.float32):
            x = wb.full((4, 6), 1 / 3, dtype=dtype, placement=placement, sbp="S(0)")
            exact = torch.full((4, 6), 1 / 3, dtype=dtype)
            pairs = [(x.mean(), exact.mean()), (torch.cat([x, x]), torch.cat([exact, exact]))]
            pairs += [(nn.functional.mse_loss(x, 2 * x), nn.functional.mse_loss(exact, 2 * exact))]
            found += [
                (ours.dtype == theirs.dtype, torch.allclose(ours.full_tensor(), theirs)) for ours, theirs in pairs
            ]
        return found

    assert on_two_ranks(program)[0] == [(True, True)] * 9


@pytest.mark.parametrize(
    "function",
    [lambda x: x.cumsum(1), lambda x: x * 2, lambda x: x + torch.arange(4), lambda x: x.sum(0), lambda x: x & x],
    ids=["cumsum", "mul", "add", "sum", "and"],
)
def test_terms_of_bools_are_no_terms_of_numbers(function):
    """A plan for terms of integers with the same layout is no plan for them."""
    values = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]])

    def program():
        terms = wb.to_global(values.clone(), placement=wb.placement.all("cpu"), sbp="B").to_global(sbp="P")
        both = wb.to_global(values.bool(), placement=wb.placement.all("cpu"), sbp="P")  # true on both ranks
        return function(terms).full_tensor(), function(both).full_tensor()

    for numbers, bools in run_ranks(program):
        assert torch.equal(numbers, function(values)) and torch.equal(bools, function(values.bool()))
