"""The norm of the gradients with which an optimizer steps: that of plain torch, whatever the layouts."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.gradients.optimizer_meter import OptimizerMeter

PLAIN = nn.Sequential(nn.Embedding(8, 6), nn.Flatten(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 3))
WORDS, CLASSES = torch.arange(8).reshape(4, 2), torch.tensor([0, 1, 2, 0])
STRATEGIES = (
    "*: data",
    "*: model | 1x1x2",
    "*: data | zero=1",
    "*: data | zero=2",
    "*: data | zero=3",
    "0: data; 2: data; 4: data@1 | 2x1x1 mb=2",
)


class NotElementwise(torch.optim.SGD):
    """An optimizer whose step needs whole tensors."""

    elementwise = False

    def step(self, closure=None):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(0.0 * parameter.grad / parameter.grad.norm())


def norm_of_a_step(model, optimizer_fn, take_gradients) -> float | None:
    """This rank's part; measuring it sends nothing."""
    optimizer = optimizer_fn(model.parameters())
    meter, sent = OptimizerMeter(optimizer), []
    for meter.wants_norm in (False, False, True):
        optimizer.zero_grad()
        take_gradients(model)
        before = current().traffic.num_exchanges
        optimizer.step()
        sent.append(current().traffic.num_exchanges - before)
    assert sent[2] == sent[1]
    rate, norm = meter.take()
    assert rate == {"learning_rate": 0.0} and meter.take()[1] is None
    meter.end()
    return None if norm is None else float(norm)


def gradients_of_plain(model) -> None:
    F.cross_entropy(model(WORDS), CLASSES).backward()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_the_parts_of_all_ranks_are_the_norm_of_all_gradients(optimizer):
    make = lambda parameters: optimizer(parameters, lr=0.0)  # noqa: E731
    plain = copy.deepcopy(PLAIN)
    whole = norm_of_a_step(plain, make, gradients_of_plain)
    assert whole == pytest.approx(float(nn.utils.get_total_norm([p.grad for p in plain.parameters()])))

    def program():
        found = []
        for strategy in STRATEGIES:
            model = wb.parallelize(copy.deepcopy(PLAIN), strategy)
            step = lambda model: wb.forward_backward(model, F.cross_entropy, WORDS, CLASSES)  # noqa: E731
            found.append(norm_of_a_step(model, make, step))
        return found

    for strategy, parts in zip(STRATEGIES, zip(*run_ranks(program), strict=True), strict=True):
        assert math.hypot(*parts) == pytest.approx(whole, rel=1e-5), strategy


def test_other_optimizers():
    def program():
        model = wb.parallelize(copy.deepcopy(PLAIN), "*: model | 1x1x2")
        step = lambda model: wb.forward_backward(model, F.cross_entropy, WORDS, CLASSES)  # noqa: E731
        return norm_of_a_step(model, lambda parameters: NotElementwise(parameters, lr=0.0), step)

    whole = norm_of_a_step(copy.deepcopy(PLAIN), lambda p: torch.optim.SGD(p, lr=0.0), gradients_of_plain)
    assert math.hypot(*run_ranks(program)) == pytest.approx(whole, rel=1e-5)

    sparse = nn.Embedding(4, 2, sparse=True)
    found = norm_of_a_step(
        sparse, lambda p: torch.optim.SGD(p, lr=0.0), lambda m: m(torch.tensor([1, 1])).sum().backward()
    )
    assert found == pytest.approx(math.sqrt(8.0)), "a row that is read twice has gradients of 2"


@pytest.mark.parametrize("strategy", [None, "*: model:row | 1x1x2", "*: data | 1x2x1 zero=1"])
def test_replays_of_a_captured_step_are_read(strategy):
    """Rate and norm are those of each replay, also of plain parameters; a meter is no hook that a recording refuses."""
    slope = nn.Linear(2, 1, bias=False)

    def program():
        model = copy.deepcopy(slope) if strategy is None else wb.parallelize(copy.deepcopy(slope), strategy)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []

        @wb.capture
        def step(x):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

        meter = OptimizerMeter(optimizer)
        meter.wants_norm = True
        for number in range(4):
            step(torch.tensor([[3.0, 4.0]]) * 2**number)
            rate, norm = meter.take()
            found.append((rate["learning_rate"], float(norm)))
            optimizer.param_groups[0]["lr"] *= 0.5
        assert (step.num_recordings, step.num_replays) == (1, 2)
        return found

    for number, ranks in enumerate(zip(*run_ranks(program), strict=True)):
        assert {rate for rate, _ in ranks} == {0.5 ** (number + 1)}
        assert math.hypot(*(norm for _, norm in ranks)) == pytest.approx(5.0 * 2**number)


def test_a_fused_step_that_unscales_by_itself():
    def norm(scale):
        model, scaler = wb.parallelize(copy.deepcopy(PLAIN), "*: data"), torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        meter = OptimizerMeter(optimizer)
        meter.wants_norm = True
        scaler.scale(F.cross_entropy(model(WORDS), CLASSES)).backward()
        scaler.step(optimizer)
        return float(meter.take()[1])

    for scaled, alone in run_ranks(lambda: (norm(1024.0), norm(1.0))):
        assert scaled == pytest.approx(alone, rel=1e-6)
