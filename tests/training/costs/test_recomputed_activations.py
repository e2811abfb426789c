"""The activations that an estimate says a rank keeps under ``recompute``, against those that simulated ranks keep."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from workbench.core.strategy import Strategy
from workbench.cost.hardware_files import load_hardware
from workbench.cost.software import WORKBENCH
from workbench.cost.stage_settings import counted_at, settings_of
from workbench.cost.stages import prices_of, stage_prices
from workbench.testing import run_ranks
from workbench.training.costs.layer_costs import layer_costs
from workbench.training.runs.job import Job
from workbench.training.runs.train import run_strategy

SAMPLES, WIDTH = 16, 12
INPUTS, CLASSES = torch.ones(2 * SAMPLES, WIDTH), torch.arange(2 * SAMPLES) % 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(WIDTH, 16), nn.ModuleList([Block() for _ in range(number)])
        self.head = nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def layers(*widths: int) -> list[nn.Module]:
    return [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]


def chain() -> nn.Module:
    return nn.Sequential(*layers(WIDTH, 16, 16), nn.Linear(16, 6))


def nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(*layers(WIDTH, 16, 16)), nn.Sequential(*layers(16, 16, 16)), nn.Linear(16, 6))


MODELS = {"two blocks": lambda: Blocks(2), "one block": lambda: Blocks(1), "chain": chain, "nested": nested}
WHOLE_BATCH = {"chain", "nested"}
"""Their first layer is recomputed: it keeps the batch as it came, all samples of it."""


def kept(name: str, text: str) -> float:
    costs = layer_costs(MODELS[name], INPUTS[:SAMPLES], loss_fn=F.cross_entropy, targets=CLASSES[:SAMPLES])
    resolved = Strategy(text).resolve(costs.layers, 2)
    model = counted_at(costs, "fp32", WORKBENCH)
    settings = settings_of(model, resolved, load_hardware("h200"), SAMPLES, "momentum", WORKBENCH)
    (stage,) = stage_prices(model, resolved.layers, prices_of(model.rows, resolved.layers, settings), settings)
    return stage.kept_bytes


def measured(name: str, text: str) -> int:
    job = Job(MODELS[name], (INPUTS, CLASSES), F.cross_entropy, None, SAMPLES, 2)
    return max(rank.memory_bytes["activations"] for rank in run_ranks(lambda: run_strategy(job, text), 2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_recomputed_blocks_keep_what_is_estimated(name: str):
    """Equal, but for what the loss keeps (classes), with recomputation and without."""
    of_loss = measured(name, "*: data") - kept(name, "*: data")
    assert 0 <= of_loss < 100
    batch = WIDTH * 4 * SAMPLES // 2 if name in WHOLE_BATCH else 0  # the other rank's samples
    assert measured(name, "*: data | recompute") == kept(name, "*: data | recompute") + of_loss + batch


def test_blocks_keep_their_input_as_it_arrives():
    """Columns of the layer before, which the block's first layer gathers anew."""
    again, once = (
        measured("two blocks", text) - kept("two blocks", text) for text in ("*: model | recompute", "*: model")
    )
    assert again == once < 300, "what the loss keeps, with recompute as without"
