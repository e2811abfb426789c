"""Complex numbers where a rank holds no row of a split dim."""

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
