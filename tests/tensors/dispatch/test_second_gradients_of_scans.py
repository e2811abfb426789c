"""Cumulative functions over a split dim, differentiated twice: no rank may lack a dependence that others have."""

from functools import partial

import pytest
import torch

import workbench as wb
from workbench.testing import run_ranks

SCANS = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "logcumsumexp": torch.logcumsumexp,
    "cummax": lambda x, dim: torch.cummax(x, dim).values,
    "cummin": lambda x, dim: torch.cummin(x, dim).values,
}
SHAPES = [((1,), 0), ((2,), 0), ((5,), 0), ((2, 6), 1), ((1, 1, 3), 2)]


def gradients(scan, dim, x, weight):
    y = scan(x, dim)
    (first,) = torch.autograd.grad((y * y * weight).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * first).sum(), x)
    return [y.detach(), first.detach(), second]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", SCANS)
def test_second_gradients_where_shards_are_empty_or_one_element(name, num_ranks):
    torch.manual_seed(0)
    given = [(shape, dim, torch.rand(shape) - 0.5, torch.rand(shape)) for shape, dim in SHAPES]

    def program():
        place, found = partial(wb.tensor, placement=wb.placement.all()), []
        for _, dim, x, weight in given:
            x, weight = (place(t, sbp=f"S({dim})") for t in (x, weight))
            found += gradients(SCANS[name], dim, x.requires_grad_(), weight)
        return [t.full_tensor() for t in found]

    expected = [
        t for _, dim, x, weight in given for t in gradients(SCANS[name], dim, x.clone().requires_grad_(), weight)
    ]
    for found in run_ranks(program, num_ranks):
        torch.testing.assert_close(found, expected)
