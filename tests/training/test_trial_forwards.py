"""A model that is looked at, on fake tensors or by a forward of its own, has afterwards what it had before."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from workbench.training.batches import Batch
from workbench.training.costs.layer_costs import layer_costs
from workbench.training.pipelining.balance import partition_stages
from workbench.training.traced_calls import describe_with_calls


class Starting(nn.Module):
    """Takes its first values from the first batch, makes what it needs when it is first called, counts and draws."""

    def __init__(self, reads_values: bool = False) -> None:
        super().__init__()
        self.loc, self.layer = nn.Parameter(torch.zeros(8)), nn.Linear(8, 8)
        self.register_buffer("scale", None)
        self.register_buffer("mean", torch.zeros(8))
        self.reads_values, self.has_begun, self.mask, self.num_calls = reads_values, False, None, 0
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.has_begun:
            self.loc.data.copy_(-x.mean(0))
            self.has_begun = True
        if self.mask is None:
            self.mask, self.scale = torch.tril(torch.ones(8, 8)), torch.ones(8)
            self.weight = nn.Parameter(torch.ones(8))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.num_calls += 1
        self.seen.append(x.mean())
        if self.reads_values and x.abs().sum() > 1e9:
            return x
        return (self.layer(x + self.loc) @ self.mask) * self.scale * self.weight * (1 + random.random())


class CountingLoss:
    def __init__(self) -> None:
        self.num_calls, self.last = 0, torch.zeros(())

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.last = F.mse_loss(output, targets)
        return self.last


def held(module: nn.Module) -> list[Any]:
    """What its attributes are, and what lists and dicts among them hold."""
    copies = {list: list, dict: dict}
    return [(name, copies.get(type(value), lambda same: same)(value)) for name, value in vars(module).items()]


BATCH = torch.ones(4, 8), torch.zeros(4, 8)


def test_costs_are_counted_without_a_trace() -> None:
    """A model in 32 bits is counted twice, each time as if it were called for the first time."""
    model, loss_fn, losses = Starting(), CountingLoss(), list[torch.Tensor]()
    before, drawn, last = held(model), random.getstate(), loss_fn.last

    def with_list(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses.append(F.mse_loss(output, targets))
        return losses[-1]

    for function in (loss_fn, with_list):
        costs = layer_costs(model, BATCH[0], loss_fn=function, targets=BATCH[1])
        assert costs.rows and costs.autocast
        assert held(model) == before and random.getstate() == drawn
    assert loss_fn.num_calls == 0 and loss_fn.last is last and not losses
    assert layer_costs(Starting, (4, 8), loss_fn=loss_fn, targets=BATCH[1]).autocast and loss_fn.num_calls == 0
    model(BATCH[0])
    assert torch.equal(model.loc, -torch.ones(8)) and type(model.mask) is torch.Tensor


def test_the_order_of_calls_is_seen_without_a_trace() -> None:
    """On fake tensors, or by a forward of one sample where values are read."""
    for reads_values in (False, True):
        model = Starting(reads_values)
        before = held(model)
        layers = describe_with_calls(model, Batch.of_arguments(*BATCH, F.mse_loss))
        assert all(layer.calls is not None for layer in layers)
        assert held(model) == before


def test_stages_are_measured_without_a_trace() -> None:
    model = nn.Sequential(Starting(), nn.Linear(8, 8))
    before, drawn = held(model[0]), random.getstate()
    values = [tensor.clone() for tensor in model.state_dict().values()]
    partition_stages(model, F.mse_loss, *BATCH, 2, num_repeats=1)
    assert held(model[0]) == before and random.getstate() == drawn
    assert all(map(torch.equal, values, model.state_dict().values()))
