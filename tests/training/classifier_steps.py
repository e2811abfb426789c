"""Some steps of a classifier on one device and under a strategy, compared."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.models.training import whole
from workbench.testing import run_ranks


def assert_steps_equal_one_device(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, strategy: str, num_ranks: int, num_steps: int = 2
) -> None:
    """Steps of SGD on ranks give the losses and weights of the same steps on one device, to 1e-9 in 64 bits."""

    def train(model: nn.Module) -> tuple[list[float], list[torch.Tensor]]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
        for _ in range(num_steps):
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [whole(parameter) for parameter in model.parameters()]

    expected = train(copy.deepcopy(model))
    for found in run_ranks(lambda: train(wb.parallelize(copy.deepcopy(model), strategy)), num_ranks):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
