"""Complex numbers: where a rank holds no row of a split dim, and assigned parts."""

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from workbench.testing import run_ranks

X = torch.randn(1, 8, 2, 2, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
FUNCTIONS = {
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2).abs(),
    "view_as_real": lambda x: torch.view_as_real(x).sum(-1),
    "view_as_real in place": lambda x: torch.view_as_real(x * 1).mul_(3).sum(-1),
    "constant_pad_nd": lambda x: torch.constant_pad_nd(x, (1, 2), 1 + 2j).abs().square(),
    "pad by zeros": lambda x: F.pad(x, (1, 2)).abs().square(),
}


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B"])
def test_real_and_imaginary_parts_are_assigned(sbp):
    def run(x):
        row = x[0]
        x.real += 1
        x.imag = x.real * 2
        x.real = torch.arange(2.0)
        return x, row

    def program():
        x = wb.tensor(X[0, :5, 0], placement=wb.placement.all(), sbp=sbp)
        return [each.full_tensor() for each in run(x)]

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, list(run(X[0, :5, 0].clone())))


@pytest.mark.parametrize("sbp", ["S(0)", "S(1)", "B", "P"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_those_of_one_device(name, sbp):
    def run(x):
        result = FUNCTIONS[name](x)
        return result, *torch.autograd.grad(result.sum(), x)

    def program():
        x = wb.tensor(X, placement=wb.placement.all(), sbp="B").to_global(sbp=sbp).requires_grad_()
        return [each.detach().full_tensor() for each in run(x)]

    expected = [each.detach() for each in run(X.clone().requires_grad_())]
    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, expected)
