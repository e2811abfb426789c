"""Strategies for models whose modules have seldom names: what is written for a model decides for its layers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.testing import run_ranks
from workbench.training.strategies.state import describe, state_of


class Chain(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


NUMBERED = [f"{number:02d}" for number in range(12)]
ODD = ["en:de", "a;b", "a|b", "a*b", "*", "[0-3]", "a, b", "model: row"]


@pytest.mark.parametrize("names", [NUMBERED, ODD], ids=["numbered", "odd"])
@pytest.mark.parametrize("strategy", ["pipeline", "hybrid", "model", "partition"])
def test_a_strategy_that_is_written_for_a_model_is_its(names: list[str], strategy: str):
    torch.manual_seed(0)
    plain, x = Chain(names), torch.randn(4, 4)

    def program():
        given = strategy
        if strategy == "partition":
            given = wb.planner.partition_stages(copy.deepcopy(plain), F.mse_loss, x, x, 2).strategy
        model = wb.parallelize(copy.deepcopy(plain), given)
        loss = wb.forward_backward(model, F.mse_loss, x, x).detach()
        return [(layer.parallel, layer.stage) for layer in state_of(model).resolved.layers], float(loss.full_tensor())

    choices, loss = run_ranks(program)[0]
    assert len(set(choices)) == (1 if strategy == "model" else 2)
    assert loss == pytest.approx(float(F.mse_loss(plain(x), x).detach()), rel=1e-5)


def test_a_range_of_numbers_with_zeros_in_front():
    layers = describe(Chain(NUMBERED))
    resolved = wb.Strategy("blocks.[00-11]: model").resolve(layers, 2)
    assert {layer.parallel for layer in resolved.layers} == {"model"}


def test_names_with_colons_are_rows_of_a_dict():
    layers = describe(Chain(ODD))
    strategy = wb.Strategy({"blocks.en:de": "model:row", "blocks.a, b": "model"})
    assert wb.Strategy(str(strategy)) == strategy
    resolved = strategy.resolve(layers, 2)
    assert [layer.name for layer in resolved.layers if layer.parallel == "model"] == ["blocks.en:de", "blocks.a, b"]
