"""What a plan is remembered under: calls that differ in anything a rule looks at must not share one."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import workbench as wb
from workbench.testing import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


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


def test_factors_that_change_in_each_step_make_no_new_plans():
    """An average of weights whose decay warms up, or an optimizer of one's own with a schedule."""

    def step(mean, value, rate):
        mean.lerp_(value, rate).lerp_(value, weight=rate).mul_(1 - rate).add_(value, alpha=rate)
        return torch.sub(mean, value, alpha=rate).clamp(min=-rate, max=rate) * mean.clone().fill_(rate)

    def program(placement):
        mean, value = (wb.full((4, 6), float(i), placement=placement, sbp="S(0)") for i in range(2))
        found = [(step(mean, value, 0.5 / (i + 1)).full_tensor(), len(mean._spec.plans)) for i in range(10)]
        terms = wb.ones(3, placement=placement, sbp="P")
        sums = [torch.add(terms, terms, alpha=factor).full_tensor()[0].item() for factor in (0.5, float("inf"), 0.0)]
        return found, mean.full_tensor(), sums

    exact_mean, value = torch.zeros(4, 6), torch.ones(4, 6)
    exact = [step(exact_mean, value, 0.5 / (i + 1)) for i in range(10)]
    for found, mean, sums in on_two_ranks(program):
        assert found[-1][1] == found[0][1] and sums == [1.5, float("inf"), 1.0]
        torch.testing.assert_close([each for each, _ in found], exact)
        torch.testing.assert_close(mean, exact_mean)


def test_calls_that_never_repeat_are_forgotten(monkeypatch):
    monkeypatch.setattr("workbench.tensors.dispatch.dispatcher._MAX_PLANS", 20)

    def program(placement):
        x = wb.ones(4, 6, placement=placement, sbp="S(0)")
        for i in range(100):
            torch.clamp_min(x, float("nan")), x.pow(i)
        return len(x._spec.plans)

    assert on_two_ranks(program)[0] < 100


def test_ranks_outside_the_placement_follow_the_default_type():
    def program(_):
        x = wb.ones(3, placement=wb.placement("cpu", ranks=[0]), sbp="B", dtype=torch.int64)
        halves = wb.local_map(lambda x: x / 2, "B", "B")
        found = []
        for dtype in (torch.float32, torch.float64):
            wb.barrier()  # the default belongs to the process
            torch.set_default_dtype(dtype)
            found += [(x / 2).dtype, halves(x).dtype]
        return found

    try:
        assert on_two_ranks(program) == [[torch.float32] * 2 + [torch.float64] * 2] * 2
    finally:
        torch.set_default_dtype(torch.float32)


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


def _frequencies(signals):
    return torch.stft(signals, 4, window=torch.ones(4), return_complex=True)


SHAPED_BY_DTYPE = {
    "view": lambda x: x.view(torch.int16),
    "view by keyword": lambda x: x.view(dtype=torch.int16),
    "stft": lambda x: torch.view_as_real(_frequencies(x if x.dtype == torch.float32 else x.cfloat())),
}


@pytest.mark.parametrize("name", SHAPED_BY_DTYPE)
def test_shapes_that_depend_on_the_type_of_numbers(name):
    values = torch.arange(32.0).reshape(4, 8)
    function, types = SHAPED_BY_DTYPE[name], (torch.float32, torch.float16, torch.float32)

    def program(placement):
        rows = wb.to_global(values.clone(), placement=placement, sbp="B").to_global(sbp="S(0)")
        return [function(rows.to(dtype)).full_tensor() for dtype in types]

    for results in on_two_ranks(program):
        for found, dtype in zip(results, types, strict=True):
            torch.testing.assert_close(found, function(values.to(dtype)))


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


OTHERS = [torch.tensor([[3, 200]], dtype=dtype) for dtype in (torch.uint8, torch.float32, torch.int64)]
OF_INTEGERS = {
    "a quotient": lambda x, others: x / 255,
    "a product": lambda x, others: x * 0.5,
    "a sum": lambda x, others: x.sum(),
    "running sums": lambda x, others: x.cumsum(1),
    "beside other types": lambda x, others: torch.cat([x + y for y in others]),
    "beside other types in lists": lambda x, others: torch.cat([torch.cat([y, x]) for y in others]),
    "by keyword": lambda x, others: torch.cat([torch.add(y, other=x) for y in others]),
    "in place": lambda x, others: others[2].clone().add_(x),
    "in place in fewer bits": lambda x, others: x.add_(others[2].long() * 300),
    "means of windows": lambda x, others: nn.functional.avg_pool1d(others[3], 2),
    "a larger image": lambda x, others: nn.functional.interpolate(x[None, None], size=(3, 3), mode="bilinear"),
    "nearest pixels": lambda x, others: nn.functional.interpolate(x[None, None], size=(3, 3)),
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_terms_of_integers_wrap_in_their_own_dtype_only(name):
    """One term of 7 is 12 and the other one is -5, which is 251 in a byte."""
    function, values = OF_INTEGERS[name], torch.tensor([[12, 200], [5, 6]], dtype=torch.uint8)

    def program(placement):
        image = wb.to_global(values.clone(), placement=placement, sbp="B").to_global(sbp="S(0)")
        terms, wide_terms = (x[torch.tensor([0])] - x[torch.tensor([1])] for x in (image, image.long()))
        assert str(terms.sbp) == str(wide_terms.sbp) == "(P,)"
        others = [wb.to_global(y.clone(), placement=placement, sbp="B") for y in OTHERS]
        return function(terms, [*others, wide_terms]).full_tensor()

    difference = values[:1] - values[1:]
    expected = function(difference, [*OTHERS[:2], OTHERS[2].clone(), difference.long()])
    for found in on_two_ranks(program):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_terms_of_integers_stay_terms_where_that_is_exact():
    def program(placement):
        terms = wb.to_global(torch.tensor([7, 8]), placement=placement, sbp="P")
        fewer = wb.zeros(2, dtype=torch.uint8, placement=placement, sbp="P")
        found = [terms + terms, terms * 3, -terms, terms.sum(), terms.long(), terms.reshape(2, 1), fewer.add_(terms)]
        return {str(each.sbp) for each in found}, fewer.full_tensor().tolist()

    assert on_two_ranks(program) == [({"(P,)"}, [14, 16])] * 2


EMPTY = {
    "max_pool2d": (lambda x: nn.functional.max_pool2d(x, 2), (1, 1, 4, 4), ()),
    "max_pool2d with indices": (lambda x: nn.functional.max_pool2d(x, 2, return_indices=True)[0], (1, 1, 4, 4), ()),
    "conv2d": (nn.functional.conv2d, (1, 2, 4, 4), ((3, 2, 3, 3), (3,))),
    "conv_transpose1d": (nn.functional.conv_transpose1d, (1, 2, 4), ((2, 3, 2), (3,))),
    "attention": (nn.functional.scaled_dot_product_attention, (1, 3, 2, 4), ((1, 3, 2, 4), (1, 3, 2, 4))),
    "interpolate": (lambda x: nn.functional.interpolate(x, scale_factor=2), (1, 2, 4), ()),
    "pixel_shuffle": (lambda x: nn.functional.pixel_shuffle(x, 2), (1, 4, 2, 2), ()),
}
"""Functions, the shape of the operand that is split, and those of the others."""


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("autocast", [False, True])
def test_empty_shards_have_the_dtype_of_each_call(name, autocast):
    """A batch of one sample on two ranks: the second has no row, and its zeros are of the dtype that others get."""
    function, shape, others = EMPTY[name]
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(size, generator=generator) for size in (shape, *others)]

    def call(operands, dtype):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype == torch.float64):
            return function(*(x.to(torch.float32 if autocast else dtype) for x in operands))

    def program(placement):
        is_weight = [name != "attention" and number > 0 for number in range(len(data))]
        operands = [
            wb.tensor(x, placement=placement, sbp="B" if weight else "S(0)")
            for x, weight in zip(data, is_weight, strict=True)
        ]
        return [call(operands, dtype).full_tensor() for dtype in (torch.float32, torch.float64, torch.float32)]

    for found in on_two_ranks(program):
        for ours, dtype in zip(found, (torch.float32, torch.float64, torch.float32), strict=True):
            torch.testing.assert_close(ours, call(data, dtype))


def test_a_table_that_changes_its_precision_while_some_rank_has_no_row():
    def program(placement):
        ids = wb.zeros(2, dtype=torch.int64, placement=placement, sbp="B")
        table = wb.ones(1, 4, placement=placement, sbp="S(0)")
        return [nn.functional.embedding(ids, table.to(dtype)).full_tensor().dtype for dtype in DTYPES]

    assert on_two_ranks(program)[1] == DTYPES


def test_a_recurrent_layer_that_changes_its_precision_while_some_rank_has_no_row():
    weights = nn.LSTM(3, 4, batch_first=True)

    def program(placement):
        layer = wb.parallelize(copy.deepcopy(weights), "*: data")
        x = wb.ones(1, 2, 3, placement=placement, sbp="S(0)")
        return [layer.to(dtype)(x.to(dtype))[0].full_tensor().dtype for dtype in DTYPES]

    assert on_two_ranks(program)[1] == DTYPES


@pytest.mark.parametrize("ranks", [[0, 1], [0]])
@pytest.mark.parametrize(
    "pair", [(2, np.float64(2.0)), (1, 1 + 0j), (np.int64(2), np.float32(2.0)), (1, np.bool_(True))]
)
def test_numbers_of_other_kinds_are_no_equal_numbers(pair, ranks):
    terms = torch.tensor([200, 100], dtype=torch.uint8)
    expected = [torch.tensor([300 % 256], dtype=torch.uint8) * number for number in pair]

    def program():
        placement = wb.placement(ranks=ranks)
        if len(ranks) == 1:
            x = wb.tensor(terms[:1] + terms[1:], placement=placement, sbp="B")
        else:
            x = wb.to_global(terms[wb.rank()].view(1), placement=placement, sbp="P")
        return [(x * number).full_tensor() for number in pair]

    for found in run_ranks(program, 2):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
