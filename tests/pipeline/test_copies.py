"""Copies of a model that has been trained under a schedule."""

import copy

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.testing import run_ranks

BATCH = torch.arange(24.0).view(6, 4) / 24, torch.ones(6, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        losses.append(wb.forward_backward(model, nn.functional.mse_loss, *BATCH).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def run(model, strategy):
    """Losses of a model, of a copy made between its steps, and of the model again."""
    wb.parallelize(model, strategy)
    found = train(model, 2)
    copied = copy.deepcopy(model)
    return [*found, *train(copied, 3), *train(model, 1), *train(copied, 1)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "interleaved", "1f1b zero=3"])
def test_a_copy_made_between_steps_trains_by_itself(schedule):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    [truth] = run_ranks(lambda: run(copy.deepcopy(model), "*: data | mb=2"), 1)
    of = (0, 1, 2, 3) if schedule == "interleaved" else (0, 0, 1, 1)
    rows = "; ".join(f"{block}.*: data@{stage}" for block, stage in enumerate(of))
    degrees = "2x2x1" if "zero=" in schedule else "2x1x1"
    ranks = [copy.deepcopy(model) for _ in range(4)]
    for found in run_ranks(
        lambda rank: run(ranks[rank], f"{rows} | {degrees} mb=2 {schedule}"), 4 if "zero=" in schedule else 2
    ):
        assert found == pytest.approx(truth, rel=1e-4)
