"""Optimizers of torchao: one device's numbers where parts are whole blocks, and an error where they are not.

torchao is not installed here: a module with its names, and its AdamW's arithmetic, is in its place. Where it is
installed, the same steps run with it.
"""

import importlib.util
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.errors import CheckpointError, LayoutError, StrategyError
from workbench.testing import run_ranks

BLOCK = 256


class Rounded:
    """A tensor rounded to 8 bits of its blocks' largest values, in the place of torchao's subclass of a tensor."""

    def __init__(self, like, block_size):
        self.values, self.block_size = torch.zeros_like(like), block_size

    def read(self):
        return self.values

    def write(self, new):
        rows = new.reshape(-1, self.block_size)
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-12)
        self.values = ((rows / scale).to(torch.float8_e5m2).float() * scale).view(new.shape)


class _AdamBase(torch.optim.Optimizer):
    """AdamW as torchao writes it."""

    def __init__(self, params, lr=1e-2, block_size=BLOCK):
        super().__init__(params, {"lr": lr, "amsgrad": False})
        self.block_size = block_size

    @staticmethod
    def _subclass_zeros(p, signed, block_size):
        return Rounded(p, block_size)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self.state[p], group["lr"])

    def _update(self, p, state, lr):
        if not state:
            is_rounded = p.numel() >= 4096 and p.numel() % self.block_size == 0
            make = (
                (lambda: self._subclass_zeros(p, True, self.block_size)) if is_rounded else lambda: torch.zeros_like(p)
            )
            state.update(step=torch.tensor(0.0), exp_avg=make(), exp_avg_sq=make())
        state["step"] += 1
        moments = []
        for name, new, beta in (("exp_avg", p.grad, 0.9), ("exp_avg_sq", p.grad.square(), 0.999)):
            kept = state[name]
            moment = (kept.read() if isinstance(kept, Rounded) else kept).lerp(new, 1 - beta)
            kept.write(moment) if isinstance(kept, Rounded) else kept.copy_(moment)
            moments.append(moment / (1 - beta ** state["step"]))
        p.sub_(lr * moments[0] / (moments[1].sqrt() + 1e-8))


class AdamW8bit(_AdamBase):
    pass


@pytest.fixture(autouse=True)
def torchao(monkeypatch):
    module = types.ModuleType("torchao.optim.adam")
    module._AdamBase = _AdamBase
    monkeypatch.setitem(sys.modules, "torchao.optim.adam", module)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 160), nn.GELU(), nn.Linear(160, 64))


X = torch.randn(12, 64, generator=torch.Generator().manual_seed(1))


def train(model, optimizer_class=AdamW8bit, steps=6):
    optimizer = optimizer_class(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(X), X)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


WHOLE_BLOCKS = {"*: data": 2, "*: data | zero=1": 2, "*: data | zero=3": 2, "*: data | 1x4x1 zero=1": 4,
                "*: data; 2: data@1 | 2x1x1": 2, "*: model:column": 2}  # fmt: skip


@pytest.mark.parametrize("strategy", WHOLE_BLOCKS)
def test_losses_of_one_device(strategy):
    """Of (160, 64), four ranks have 2560 elements each, which is less than torchao rounds by itself."""
    expected, _ = train(make())
    exact, _ = train(make(), lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0))
    models = [make() for _ in range(WHOLE_BLOCKS[strategy])]
    for losses in run_ranks(lambda rank: train(wb.parallelize(models[rank], strategy))[0], len(models)):
        assert losses == pytest.approx(expected, abs=1e-6)
    assert max(abs(a - b) for a, b in zip(exact, expected, strict=True)) > 1e-5


@pytest.mark.parametrize(("strategy", "num_ranks"), [("*: model:row", 2), ("*: data | 1x3x1 zero=1", 3)])
def test_parts_of_blocks_are_an_error_that_names_them(strategy, num_ranks):
    models = [make() for _ in range(num_ranks)]
    words = (
        r"AdamW8bit\.step\(\): .*256 elements.*2 of 4 parameters.*\(160, 64\) as .*\(64, 160\) as .*torch\.optim\.AdamW"
    )
    with pytest.raises(LayoutError, match=words):
        run_ranks(lambda rank: train(wb.parallelize(models[rank], strategy)), num_ranks)


def test_blocks_are_neither_saved_nor_split_again(tmp_path):
    models = [make() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: data")
        _, optimizer = train(model, steps=1)
        with pytest.raises(CheckpointError, match="blocks of 256 elements"):
            wb.checkpoint.save(tmp_path / "step", model=model, optimizer=optimizer)
        with pytest.raises(StrategyError, match=r"for 4 parameters here.*Make a new optimizer"):
            wb.parallelize(model, "*: data | zero=1", optimizer=optimizer)

    run_ranks(program, 2)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install torchao")
def test_torchao_itself(monkeypatch):
    monkeypatch.undo()
    from torchao.optim import AdamW8bit as Optimizer

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # takes minutes here
    expected, _ = train(make(), Optimizer)
    models = [make() for _ in range(2)]
    for losses in run_ranks(lambda rank: train(wb.parallelize(models[rank], "*: data | zero=1"), Optimizer)[0], 2):
        assert losses == pytest.approx(expected, abs=1e-6)
