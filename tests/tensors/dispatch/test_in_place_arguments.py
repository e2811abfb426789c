"""``inplace`` of activations and dropouts, by position and by keyword, on every layout: the numbers of one device."""

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from workbench.testing import run_ranks

FUNCTIONS = {
    F.relu: (), F.relu6: (), F.silu: (), F.mish: (), F.selu: (), F.elu: (1.3,), F.celu: (1.1,), F.leaky_relu: (0.1,),
    F.hardtanh: (-0.5, 0.5), F.hardswish: (), F.hardsigmoid: (), F.threshold: (0.1, 0.2), F.rrelu: (0.1, 0.3, False),
    F.dropout: (1.0, True), F.dropout1d: (0.5, False), F.alpha_dropout: (0.5, False),
}  # fmt: skip
X = torch.linspace(-2, 2, 30, dtype=torch.float64).reshape(5, 6)


def run(function, x, *options, **named):
    """What was returned, and what has become of the argument."""
    y = x * 1
    return function(y, *FUNCTIONS[function], *options, **named) + 2 * y


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_in_place_by_position_and_keyword(function, sbp):
    def forms(x):
        results = [run(function, x, True), run(function, x, False), run(function, x, inplace=True)]
        return [(result, torch.autograd.grad(result.sin().sum(), x)[0]) for result in results]

    expected = forms(X.clone().requires_grad_())

    def program():
        x = wb.to_global(X.clone(), placement=wb.placement("cpu", ranks=[0, 2]), sbp="B").to_global(sbp=sbp)
        return [[part.detach().full_tensor() for part in pair] for pair in forms(x.detach().requires_grad_())]

    for found in run_ranks(program, 3):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, [part.detach() for part in theirs])


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
def test_unit_vectors_are_written_to_out(sbp):
    def program():
        x = wb.to_global(X.clone(), placement=wb.placement("cpu", ranks=[0, 2]), sbp="B").to_global(sbp=sbp)
        for dim in (0, 1):
            F.normalize(x, dim=dim, out=x)
        return x.full_tensor()

    for found in run_ranks(program, 3):
        torch.testing.assert_close(found, F.normalize(F.normalize(X, dim=0), dim=1))


@pytest.mark.parametrize("target", [["S(0)", "B"], ["B", "S(1)"], ["S(1)", "S(0)"]])
def test_on_a_grid_a_tensor_keeps_its_layout_and_boxes_what_it_takes(target):
    def program():
        grid = wb.placement("cpu", ranks=[[0, 1], [2, 3]])
        whole = wb.to_global(X.clone(), placement=grid, sbp=["B", "B"])
        x, y = whole.to_global(sbp=target), whole.to_global(sbp=["S(0)", "S(1)"])
        x += y
        return [str(entry) for entry in x.sbp], x.full_tensor()

    for sbp, value in run_ranks(program, 4):
        assert sbp == target
        torch.testing.assert_close(value, 2 * X)
