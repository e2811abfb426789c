"""Whole comparisons on simulated ranks whose losses need a word beside the mark, or are all that is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.session.simulated_session import SimulatedSession
from tests.session.test_verdicts import STEPS, changed_sgd, features, is_spread, nobody_listens, sgd
from workbench.core.metrics import RunRecord
from workbench.session.comparison.comparison import Comparison
from workbench.session.comparison.subject import Subject
from workbench.ui.runs.table_rows import equal_text

__all__ = ["nobody_listens"]  # a fixture for every test of this file


class Explodes(nn.Module):
    """Its output is nan from a step on, on all devices or only where it is spread."""

    def __init__(self, at: int, only_spread: bool = False) -> None:
        super().__init__()
        self.fc, self.at, self.only_spread, self.step = nn.Linear(8, 4), at, only_spread, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        self.step += self.training and not y.is_meta
        breaks = self.step > self.at and (is_spread(y) or not self.only_spread)
        return y * (float("nan") if breaks else 1.0)


def plain_layer() -> nn.Module:
    return nn.Linear(8, 4)


def checked(model_fn: Callable[[], nn.Module], check_steps: int, strategy: str = "*: data") -> RunRecord:
    subject = Subject.of(model_fn, features(), F.cross_entropy, optimizer_fn=sgd, batch_size=8, steps=STEPS)
    with Comparison(SimulatedSession(), subject, check_steps=check_steps) as comparison:  # type: ignore[arg-type]
        comparison.baseline()
        return comparison.start(strategy).result()


def test_a_loss_that_is_nan_after_the_check_stands_beside_the_tick():
    run = checked(lambda: Explodes(7), 4)
    assert run.equal and run.verdict.note == "then nan" and "from step 8 on" in run.verdict.text
    assert equal_text(run).startswith("\u2713") and equal_text(run).endswith(", then nan")
    assert checked(lambda: Explodes(7), 0).verdict.note == "nan"


def test_a_loss_that_is_nan_only_where_it_is_spread_is_a_cross():
    run = checked(lambda: Explodes(7, only_spread=True), STEPS)
    assert run.equal is False and equal_text(run) == "\u2717 nan"
    assert "the loss of step 8 is nan, on one device" in run.verdict.text


def test_losses_that_are_nan_on_both_are_said_to_be():
    run = checked(lambda: Explodes(7), STEPS)
    assert run.equal and equal_text(run).endswith(", both nan")
    for at in (1, 2):  # within and right after the steps whose weights are compared
        assert checked(lambda at=at: Explodes(at), STEPS).equal
    first = checked(lambda: Explodes(0), STEPS)
    assert first.equal is None and equal_text(first) == "both nan"


def test_one_device_with_micro_batches_is_said_to_have_them_where_its_losses_show_it():
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))

    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4))

    run = checked(normed, STEPS, "*: data | mb=2")
    assert run.equal and equal_text(run).startswith("\u2713") and equal_text(run).endswith(", both mb=2")
    assert "one device had 2 micro-batches, too: its first loss is" in run.verdict.text
    assert checked(plain, STEPS, "*: data | mb=2").verdict.note == checked(normed, STEPS).verdict.note == ""


def test_weights_are_compared_after_as_many_steps_of_a_run_as_of_one_device():
    """A run of one step after longer ones was judged by its loss alone, which no optimizer has changed yet."""
    subject = Subject.of(plain_layer, features(), F.cross_entropy, optimizer_fn=sgd, batch_size=8, steps=STEPS)
    session: Any = SimulatedSession()
    with Comparison(session, subject) as comparison:
        runs = [comparison.start("*: data", num_steps=steps).result() for steps in (1, STEPS, 1, 1, 2, STEPS)]
    assert [run.verdict.text for run in runs] == ["every loss and every weight lies within the tolerance"] * 6
    assert None not in [run.weight_difference for run in runs]
    assert session.submitted.count("train_one_device") == 2, "for runs of one step, and for longer ones"


def test_a_run_keeps_its_one_device_while_a_run_of_one_step_begins():
    """Its losses were compared in one step only."""
    subject = Subject.of(plain_layer, features(), F.cross_entropy, optimizer_fn=sgd, batch_size=8, steps=STEPS)
    with Comparison(SimulatedSession(), subject) as comparison:  # type: ignore[arg-type]
        begun = [comparison.start("*: data", num_steps=steps) for steps in (STEPS, 1)]
        assert [len(run.result().verdict.differences) for run in begun] == [STEPS, 1]


def test_a_run_of_one_step_after_longer_ones_with_another_learning_rate_is_a_cross():
    wrong = changed_sgd(lr=0.2)
    subject = Subject.of(plain_layer, features(), F.cross_entropy, optimizer_fn=wrong, batch_size=8, steps=STEPS)
    with Comparison(SimulatedSession(), subject) as comparison:  # type: ignore[arg-type]
        runs = [comparison.start("*: data", num_steps=steps).result() for steps in (STEPS, 1)]
    assert [run.equal for run in runs] == [False, False], [run.verdict for run in runs]
