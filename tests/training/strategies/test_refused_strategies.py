"""A strategy that is refused changes nothing: the module, its strategy and its optimizer go on."""

import copy
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.models.training import whole
from workbench.errors import StrategyError
from workbench.testing import run_ranks
from workbench.training import precision
from workbench.training.parallel import state_of

DATA = torch.Generator().manual_seed(3)
X, Y = torch.randn(8, 8, generator=DATA), torch.randint(0, 8, (8,), generator=DATA)
ROWS = "; ".join(f"{number // 4}.{number % 4}: data@{number}" for number in range(8))
REFUSED = {
    "a deadlock": (f"{ROWS} | 4x1x1 mb=7 interleaved recompute", "recompute runs 0 again, which lies on stages 0 to 3"),
    "8 bits": ("*: data | mb=2 fp8", "option fp8: no 8 bits here"),
    "space": ("*: data | mb=2 zero=1 offload=optimizer", r"offload=optimizer: .* where 10 B are free"),
}


@pytest.fixture(autouse=True)
def a_small_machine(monkeypatch):
    """Without products of 8 bits, and with a full disk."""
    monkeypatch.setattr(precision, "lacks_float8", lambda device: "no 8 bits here")
    monkeypatch.setattr(psutil, "disk_usage", lambda folder: SimpleNamespace(free=10))


def blocks():
    """Two blocks of four layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) for _ in range(2)))


def step(model, optimizer):
    """One step; the loss."""
    optimizer.zero_grad()
    loss = wb.forward_backward(model, F.cross_entropy, X, Y)
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("name", REFUSED)
def test_training_goes_on_under_the_strategy_before(name):
    """Also if the program says this strategy once more, with the optimizer."""
    strategy, message = REFUSED[name]
    built = blocks()

    def program(asks):
        model = wb.parallelize(copy.deepcopy(built), "*: data")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        losses, state, plan = [step(model, optimizer)], state_of(model), model.plan
        if asks:
            with pytest.raises(StrategyError, match=message):
                wb.parallelize(model, strategy, optimizer=optimizer)
        assert state_of(model) is state and model.plan is plan
        assert not any(parameter._keeps_state_on_host for parameter in model.parameters())
        losses.append(step(model, optimizer))
        wb.parallelize(model, "*: data", optimizer=optimizer)
        losses.append(step(model, optimizer))
        return losses, [whole(parameter) for parameter in model.parameters()]

    found, expected = (run_ranks(lambda asks=asks: program(asks), 4) for asks in (True, False))
    for (losses, weights), (true_losses, true_weights) in zip(found, expected, strict=True):
        assert losses == true_losses
        assert all(map(torch.equal, weights, true_weights))


@pytest.mark.parametrize("name", REFUSED)
def test_a_first_call_can_be_made_again(name):
    """With the same optimizer: the module has the parameters that it had."""
    strategy, message = REFUSED[name]
    built = blocks()

    def program():
        model = copy.deepcopy(built)
        optimizer, parameters = torch.optim.AdamW(model.parameters()), list(model.parameters())
        with pytest.raises(StrategyError, match=message):
            wb.parallelize(model, strategy, optimizer=optimizer)
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        return step(wb.parallelize(model, "*: data", optimizer=optimizer), optimizer)

    assert run_ranks(program, 4) == [pytest.approx(F.cross_entropy(built(X), Y).item(), rel=1e-5)] * 4
