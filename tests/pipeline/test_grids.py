"""Stages whose ranks are grids, and tensors on other grids of the same ranks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.errors import StrategyError
from workbench.testing import run_ranks


class OnAGrid(nn.Module):
    """Takes a tensor to another grid of the first stage's ranks, from the first stage or from the second."""

    def __init__(self, goes_back):
        super().__init__()
        self.goes_back, self.first, self.second = goes_back, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        hidden = self.first(x)
        out = self.second(hidden)
        on_grid = (out if self.goes_back else hidden).to_global(wb.placement("cpu", ranks=[[0], [1]]), "S(0), B")
        return 2 * on_grid if self.goes_back else out + on_grid


def test_another_grid_of_the_ranks_of_a_stage_is_the_stage():
    torch.manual_seed(0)
    models, inputs = [OnAGrid(False) for _ in range(4)], torch.randn(5, 4)
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    one = copy.deepcopy(models[0])
    hidden = one.first(inputs)
    loss = (one.second(hidden) + hidden).square().mean()
    loss.backward()

    def program(rank):
        model = wb.parallelize(models[rank], "first: data; second: data@1 | 2x2x1 mb=2")
        found = wb.forward_backward(model, lambda out, _: out.square().mean(), inputs, inputs)
        assert found.item() == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(model.first.weight.grad.full_tensor(), one.first.weight.grad)
        model.goes_back = True
        with pytest.raises(StrategyError, match=r"on stage 0.*from stage 1.*deadlock.*gpipe"):
            wb.forward_backward(model, lambda out, _: out.square().mean(), inputs, inputs)

    run_ranks(program, 4)


class Counting(nn.Module):
    """A buffer that both stages read, and the forward replaces."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        x = self.first(x) * self.count
        x = self.second(x) * self.count
        self.count = self.count + 1
        return x


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble_v"])
def test_stages_that_share_a_grid_of_ranks_may_replace_a_buffer(schedule):
    torch.manual_seed(0)
    one = Counting()
    models, (inputs, targets) = [copy.deepcopy(one) for _ in range(4)], torch.randn(2, 6, 8)

    def program(rank):
        model = wb.parallelize(models[rank], f"first: model; second: data@1 | 1x2x2 mb=2 {schedule}")
        loss = wb.forward_backward(model, F.mse_loss, inputs, targets).item()
        return loss, model.count.full_tensor().item(), model.first.weight.grad.full_tensor()

    losses = [F.mse_loss(one(x), y) / 2 for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True)]
    sum(losses).backward()
    for loss, count, grad in run_ranks(program, 4):
        assert (loss, count) == (pytest.approx(sum(losses).item(), rel=1e-5), 3.0)
        torch.testing.assert_close(grad, one.first.weight.grad)
