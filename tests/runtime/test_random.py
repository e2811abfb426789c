"""Random tensors do not depend on the layout, the number of ranks, or on being one device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.testing import run_ranks

MAKERS = {
    "randn": lambda p, s: wb.randn(5, 6, placement=p, sbp=s),
    "rand": lambda p, s: wb.rand(5, 6, placement=p, sbp=s),
    "randint": lambda p, s: wb.randint(0, 100, (5, 6), placement=p, sbp=s),
    "dropout": lambda p, s: F.dropout(wb.ones(5, 6, placement=p, sbp=s), 0.5),
    "rand_like": lambda p, s: torch.rand_like(wb.ones(5, 6, placement=p, sbp=s)),
    "normal_": lambda p, s: wb.zeros(5, 6, placement=p, sbp=s).normal_(1.0, 2.0),
    "uniform_": lambda p, s: nn.init.uniform_(wb.zeros(5, 6, placement=p, sbp=s), -1, 1),
    "bernoulli": lambda p, s: torch.bernoulli(wb.full((5, 6), 0.3, placement=p, sbp=s)),
    "kaiming": lambda p, s: nn.init.kaiming_uniform_(wb.zeros(5, 6, placement=p, sbp=s), a=5**0.5),
    "xavier": lambda p, s: nn.init.xavier_uniform_(wb.zeros(5, 6, placement=p, sbp=s)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_same_numbers_for_every_layout_and_world(name):
    def program(rank):
        world_size = wb.world_size()
        values = []
        for ranks in ([0], list(range(world_size)), list(range(world_size))[::-1]):
            for sbp in ("S(0)", "S(1)", "B", "P"):
                wb.manual_seed(7)
                x = MAKERS[name](wb.placement("cpu", ranks=ranks), sbp)
                everywhere = x.to_global(placement=wb.placement.all("cpu"), sbp="B")
                values.append(everywhere.to_local())
        return values

    reference = run_ranks(program, 1)[0][0]
    assert reference.float().std() > 0
    for num_ranks in (1, 2, 3):
        for values in run_ranks(program, num_ranks):
            assert all(torch.equal(value, reference) for value in values)


def test_two_draws_differ_and_a_seed_repeats_them():
    def program(rank):
        p = wb.placement.all("cpu")
        wb.manual_seed(1)
        first, second = (wb.randn(8, placement=p, sbp="S(0)").full_tensor() for _ in range(2))
        wb.manual_seed(1)
        return first, second, wb.randn(8, placement=p, sbp="S(0)").full_tensor()

    first, second, again = run_ranks(program, 2)[0]
    assert not torch.equal(first, second) and torch.equal(first, again)


def test_dropout_drops_the_right_share_and_its_gradient_follows_the_mask():
    def program(rank):
        x = wb.ones(200, 100, placement=wb.placement.all("cpu"), sbp="S(0)", requires_grad=True)
        y = F.dropout(x, 0.25)
        y.sum().backward()
        return y.detach().full_tensor(), x.grad.full_tensor()

    value, grad = run_ranks(program, 2)[0]
    assert abs((value == 0).float().mean().item() - 0.25) < 0.01
    assert torch.equal(value, grad) and value.max().item() == pytest.approx(4 / 3)
