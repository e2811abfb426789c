"""``fp8``: scales of logical tensors, so 8 bits that depend on no layout, and the losses of one device in fp8."""

import functools
import importlib
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.core.sbp import broadcast
from workbench.core.strategy import Strategy
from workbench.kernels import float8
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.precision import compute_in

CPU = torch.device("cpu")
ROWS = 9
"""Samples: they do not divide by the ranks."""


@pytest.fixture
def rounded(monkeypatch):
    """All tensors that this thread has rounded to 8 bits: (scale, as numbers)."""
    here, original = threading.local(), float8.quantize

    def quantize(x, scale, dtype):
        found = original(x, scale, dtype)
        if x.numel() and not x.is_meta and type(found) is torch.Tensor:
            here.__dict__.setdefault("seen", []).append((float(scale), found.float()))
        return found

    monkeypatch.setattr(float8, "quantize", quantize)

    def read():
        seen, here.seen = getattr(here, "seen", []), []
        return seen

    return read


def layer():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48, bias=False))


class Gathered(nn.Module):
    """A layer on the first stage, and one on the second that gets its input unrounded."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32, bias=False), nn.Linear(32, 48, bias=False)

    def forward(self, x):
        y = self.first(x)
        return self.second(y - y.detach() + x)


def values():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 32, generator=generator) * torch.arange(1, ROWS + 1)[:, None]
    factors = torch.randn(ROWS, 48, generator=generator) * torch.arange(1, 49)
    return x, factors


def one_step(model, read):
    """The tensors that a step rounds: the input and the weight, then the gradient, and the weight again."""
    x, factors = values()
    (model(x).float() * factors).sum().backward()
    return read()


LAYOUTS = {
    "*: data": 2,
    "*: data | 1x3x1": 3,
    "*: model": 2,
    "*: model:row": 2,
    "*: model | 1x2x2": 4,
    "*: model:row | 1x2x2": 4,
    "*: data | 1x4x1 zero=3": 4,
    "*: data | 1x4x1 zero=3 shards=2": 4,
}


@pytest.mark.parametrize("strategy", LAYOUTS)
def test_scales_and_8_bits_are_those_of_one_device(strategy, rounded):
    """Each rank's 8 bits are a slice of one device's, bit for bit: input, weight, gradient, and the weight again."""
    num_ranks = LAYOUTS[strategy]
    alone = layer()
    compute_in(alone, "fp8", CPU, "cpu")
    truth = one_step(alone, rounded)
    assert [tuple(bits.shape) for _, bits in truth[:3]] == [(ROWS, 32), (48, 32), (ROWS, 48)]
    models = [layer() for _ in range(num_ranks)]
    options = " fp8" if "|" in strategy else " | fp8"

    def program(rank):
        return one_step(wb.parallelize(models[rank], strategy + options), rounded)

    whole = 0
    for found in run_ranks(program, num_ranks):
        assert [scale for scale, _ in found] == [scale for scale, _ in truth]
        for (_, bits), (_, all_bits) in zip(found, truth, strict=True):
            assert is_slice(bits, all_bits)
            whole += bits.shape == all_bits.shape
    assert whole < len(truth) * num_ranks  # something was split


def is_slice(part, whole):
    rows, columns = (a - b for a, b in zip(whole.shape, part.shape, strict=True))
    return any(
        torch.equal(part, whole[i : i + part.shape[0], j : j + part.shape[1]])
        for i in range(rows + 1)
        for j in range(columns + 1)
    )


def test_a_slice_that_is_none():
    whole = torch.arange(12.0).view(3, 4)
    assert is_slice(whole[1:, 2:], whole) and not is_slice(whole[1:, 2:] + 1, whole)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_stages_round_as_one_device(schedule, rounded):
    """Micro-batches have their own scales."""
    _, factors = values()

    def loss(output, targets):
        return (output.float() * targets).mean()

    def program(rank, model, strategy):
        x, _ = values()
        wb.forward_backward(wb.parallelize(model, f"{strategy} mb=3 fp8"), loss, x, factors)
        return sorted((scale, tuple(bits.flatten().tolist())) for scale, bits in rounded())

    alone = run_ranks(lambda rank: program(rank, Gathered(), "*: data |"), 1)[0]
    found = run_ranks(lambda rank: program(rank, Gathered(), f"first: data; second: data@1 | 2x1x1 {schedule}"), 2)
    assert len(alone) == 3 * (3 + 4)  # micro-batches, tensors of both layers: the first has no gradient of its input
    assert sorted([*found[0], *found[1]]) == alone


def test_a_local_scale_would_be_another(rounded, monkeypatch):
    """The oracle: where ranks take the largest value of their own rows, the scales differ."""
    monkeypatch.setattr(importlib.import_module("workbench.tensors.rules.matmul.float8"), "partial_max", broadcast)
    models = [layer() for _ in range(2)]
    found = run_ranks(lambda rank: one_step(wb.parallelize(models[rank], "*: data | fp8"), rounded), 2)
    assert found[0][0][0] != found[1][0][0]


class Net(nn.Module):
    """Layers with dropout between them, of sizes that fit but for the last one's."""

    def __init__(self, rate=0.2):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.norm = nn.Linear(32, 64), nn.LayerNorm(64)
        self.up, self.down, self.head = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 10)
        self.drop = nn.Dropout(rate)

    def forward(self, x):
        x = self.drop(F.gelu(self.inp(x)))
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        return self.head(x)


RUNS = [
    ("*: data | 1x2x1", 2),
    ("*: data | 1x3x1 mb=2", 3),
    ("*: model | 1x1x2", 2),
    ("*: model | 1x2x2 sequence", 4),
    ("*: data | 1x2x1 zero=3", 2),
    ("*: data | 1x4x1 zero=2 shards=2 mb=2", 4),
    ("*: data | 1x2x1 zero=1 recompute", 2),
    ("*: model | 1x1x2 recompute=cheap", 2),
    ("*: data | 1x2x1 zero=3 recompute=cheap", 2),
    ("*: data | 1x2x1 offload=optimizer+activations", 2),
    ("*: data; up: data@1; down: data@1; head: data@1 | 2x1x1 mb=3 1f1b", 2),
    ("*: model; up: model@1; down: model@1; head: data@1 | 2x1x2 mb=2 zero_bubble", 4),
]
STEPS = 20


def train(model, strategy):
    model = wb.parallelize(model, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        current().context.generator.manual_seed(step)
        generator = torch.Generator().manual_seed(100 + step)
        x = torch.randn(24, 32, generator=generator)
        optimizer.zero_grad()
        loss = wb.forward_backward(model, F.cross_entropy, x, x[:, :10].argmax(1))
        losses.append(loss.full_tensor().item())
        optimizer.step()
    return losses


@functools.cache
def on_one_rank(precision, num_micro_batches=1):
    model = Net()
    return run_ranks(lambda rank: train(model, f"*: data | mb={num_micro_batches} {precision}"), 1)[0]


@pytest.mark.parametrize(("strategy", "num_ranks"), RUNS)
def test_losses_of_one_device_in_fp8(strategy, num_ranks):
    truth = on_one_rank("fp8", Strategy(strategy).options.num_micro_batches)
    models = [Net() for _ in range(num_ranks)]
    for losses in run_ranks(lambda rank: train(models[rank], f"{strategy} fp8"), num_ranks):
        print(strategy, max(abs(a-b) for a,b in zip(losses,truth)), losses[-1], truth[-1])
        assert losses == pytest.approx(truth, abs=1)
