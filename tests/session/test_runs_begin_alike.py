"""Whole comparisons on simulated ranks whose runs begin alike and draw alike, or are refused; and signs of rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.session.simulated_session import SimulatedSession
from tests.session.test_verdicts import SLOW, features, is_spread, judged, mlp, nobody_listens
from workbench.errors import RunError, SessionError

__all__ = ["nobody_listens"]  # a fixture for every test of this file


@pytest.mark.parametrize("begins_at", [0, 3])
def test_dropout_that_begins_in_a_later_step_is_equal(begins_at: int):
    """One device went on in plain torch, which draws other numbers."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.step = nn.Linear(8, 4), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.step += not x.is_meta
            return F.dropout(self.fc(x), 0.3, self.step > begins_at)

    assert judged(Drops, features(), F.cross_entropy).equal


class Noisy(torch.optim.SGD):
    """Adds noise to the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn_like(parameter), alpha=1e-2)


def test_an_optimizer_that_draws_random_numbers_is_equal():
    assert judged(mlp, features(), F.cross_entropy, optimizer_fn=lambda parameters: Noisy(parameters, lr=0.1)).equal


class GrowingLoss:
    """Its weight grows with its calls."""

    calls = 0

    def __call__(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.cross_entropy(output, targets) * self.calls


def test_a_loss_that_keeps_a_state_beside_dropout_is_equal():
    """The step in which one device finds out that the model draws counted, too."""
    model_fn, session = lambda: nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.3)), SimulatedSession(1)
    assert judged(model_fn, features(), GrowingLoss(), session=session).equal


class Signs(torch.optim.SGD):
    """Takes the sign of gradients, of which some are nothing but rounding. ``factor``: of its rate, where spread."""

    def __init__(self, parameters: Any, factor: float = 1.0) -> None:
        parameters = list(parameters)
        super().__init__(parameters, lr=1e-3 * (factor if is_spread(parameters[0]) else 1.0))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = parameter.grad.sign()
        super().step()


@pytest.mark.parametrize(
    ("strategy", "factor"), [("*: data", 1.0), ("*: data", 1.01), pytest.param("*: data | bf16", 1.0, marks=SLOW)]
)
def test_signs_of_gradients_that_are_zero_are_equal_and_another_rate_is_found(strategy: str, factor: float):
    """A bias before batch norm has a gradient of zero, and its sign is that of rounding in float64, too."""
    model_fn = lambda: nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 4))  # noqa: E731
    run = judged(model_fn, features(), F.cross_entropy, strategy, lambda parameters: Signs(parameters, factor))
    assert run.equal is (factor == 1.0), run.verdict


BACKBONE, VECTORS = nn.Linear(8, 16), torch.ones(5, 3)
GENERATOR = torch.Generator().manual_seed(0)


def with_own_generator() -> nn.Module:
    model = nn.Linear(8, 4)
    nn.init.normal_(model.weight, generator=GENERATOR)
    return model


ALIKE = {
    "a layer of all models": (lambda: nn.Sequential(BACKBONE, nn.Linear(16, 4)), features(), "'0.weight' first"),
    "its own generator": (with_own_generator, features(), "1 of 2 trained parameters"),
    "a tensor of all models": (
        lambda: nn.Sequential(nn.Embedding.from_pretrained(VECTORS, freeze=False), nn.Flatten(), nn.Linear(6, 4)),
        (torch.ones(32, 2, dtype=torch.long), features()[1]),
        "1 of 3 trained parameters",
    ),
}


@pytest.mark.parametrize("name", ALIKE)
def test_models_that_do_not_begin_with_the_same_weights_are_an_error(name: str):
    """One engine had no equal run, and two were asked to seed the ranks."""
    model_fn, data, words = ALIKE[name]
    with pytest.raises((RunError, SessionError), match=words):
        judged(model_fn, data, F.cross_entropy, session=SimulatedSession(1))
