"""Blocks whose calls are unlike the first one: they branch on values, change a list of the caller's, or read settings
in lists and dicts.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.pipeline.test_steps import whole
from workbench.testing import run_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)


class TakingSideIfSeen(Block):
    """Reads a plain mask: some micro-batches take the second input from its stage, others do not."""

    def forward(self, x, side, seen):
        x = x + torch.tanh(self.one(x))
        return x + self.two(side) if bool(seen.any()) else x


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(8, 8), TakingSideIfSeen(), TakingSideIfSeen(), nn.Linear(8, 4)

    def forward(self, x, settings):
        seen, hidden = x[:, 0] > 0, self.a(x)
        side = hidden.sigmoid()
        return self.head(self.c(self.b(hidden, side, seen), side, seen))


class Down(Block):
    def forward(self, x, skips):
        skips.append(torch.tanh(self.one(x)))
        return self.two(skips[-1])


class Up(Block):
    def forward(self, x, skips):
        return torch.tanh(self.one(x)) + self.two(skips.pop())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.down, self.b, self.c, self.head = Down(), Down(), Up(), Up(), nn.Linear(8, 4)

    def forward(self, x, settings):
        skips = []
        x = self.down(self.a(x, skips), skips)
        return self.head(self.c(self.b(x, skips), skips))


class Configured(Block):
    """Which layers run, and how many results there are, is in a list and in a dict."""

    def __init__(self):
        super().__init__()
        self.config = {"runs": [True, True], "gives": {"both": False}}

    def forward(self, x):
        for runs, layer in zip(self.config["runs"], (self.one, self.two), strict=True):
            x = x + torch.tanh(layer(x)) if runs else x
        return (x, x.sin()) if self.config["gives"]["both"] else x


class WithSettings(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(8, 8), Configured(), Configured(), nn.Linear(8, 4)

    def forward(self, x, step):
        x = self.a(x)
        for block in (self.b, self.c):
            x = block(x)
            x = sum(x) if isinstance(x, tuple) else x
        return self.head(x)


def configure(model, step):
    if isinstance(model, WithSettings):
        model.b.config["runs"][1] = model.c.config["runs"][0] = step != 1
        model.c.config["gives"]["both"] = step > 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Masked, UNet, WithSettings])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_they_train_as_on_one_device(kind, num_ranks):
    torch.manual_seed(0)
    models, targets = [kind()], torch.arange(8) % 4
    models += [copy.deepcopy(models[0]) for _ in range(num_ranks)]
    inputs = torch.randn(8, 8)
    inputs[:, 0] = torch.tensor([1.0, 1, -1, -1, 1, 1, -1, -1])

    def program(model, strategy):
        model, found = wb.parallelize(model, strategy), []
        for step in range(3):
            configure(model, step)
            model.zero_grad()
            found.append(wb.forward_backward(model, F.cross_entropy, (inputs, 0), targets).item())
            found += [None if p.grad is None else whole(p.grad) for p in model.parameters()]
        return found

    truth = run_ranks(lambda: program(models[-1], "*: data | mb=4"), 1)[0]
    rows = f"*: data; b.*: data@1; c.*: data@{num_ranks - 1}; head: data@{num_ranks - 1}"
    for found in run_ranks(lambda rank: program(models[rank], f"{rows} | {num_ranks}x1x1 mb=4 1f1b"), num_ranks):
        assert [value is None for value in found] == [value is None for value in truth]
        torch.testing.assert_close([v for v in found if v is not None], [v for v in truth if v is not None])
