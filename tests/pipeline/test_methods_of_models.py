"""Methods of a model other than ``forward``, under pipelines: nobody has entered the model's call."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.testing import run_ranks


class Translator(nn.Module):
    """What it computes outside of ``forward`` joins stages, and a buffer of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.linspace(0, 1, 6, dtype=torch.float64).view(6, 1))
        self.encoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.decoder, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of 4 -> rows of 4."""
        x = x + self.positions[: len(x)]
        for layer in self.encoder:
            x = x + torch.tanh(layer(x))
        return x

    def decode(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """Rows of 4 and what ``encode`` gives -> scores of 3 classes."""
        return self.head(self.decoder(x) * torch.sigmoid(memory) + memory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of 4 -> scores of 3 classes."""
        return self.decode(x, self.encode(x))


def test_methods_of_a_model_run_outside_of_its_call():
    torch.manual_seed(0)
    built, x = Translator().double(), torch.randn(6, 4, dtype=torch.float64)
    targets = torch.tensor([0, 1, 2, 0, 1, 2])

    def losses(model):
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
        for _ in range(3):
            loss = F.cross_entropy(model.decode(x, model.encode(x)), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    expected = losses(copy.deepcopy(built))
    for strategy in ("pipeline", "*: data; encoder.1: data@1; decoder: data@2; head: data@3"):
        for found in run_ranks(lambda text=strategy: losses(wb.parallelize(copy.deepcopy(built), text)), 4):
            assert found == pytest.approx(expected, rel=1e-12)
