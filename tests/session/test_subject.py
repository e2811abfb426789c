"""The description of a job, for tables and files."""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from workbench.session.comparison.subject import Subject


def quick(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def of_two_groups(parameters: Any) -> torch.optim.Optimizer:
    """Weights decay, biases do not."""
    parameters = list(parameters)
    weights = [each for each in parameters if each.dim() > 1]
    others = [each for each in parameters if each.dim() <= 1]
    return torch.optim.SGD([{"params": weights, "weight_decay": 0.1}, {"params": others}], lr=0.1)


@pytest.mark.parametrize(
    ("optimizer_fn", "text"),
    [
        (None, "SGD(lr=0.1, momentum=0.9)"),
        (torch.optim.Adam, "torch.optim.adam.Adam"),
        (partial(torch.optim.SGD, lr=0.5), "functools.partial(<class 'torch.optim.sgd.SGD'>, lr=0.5)"),
        (partial(of_two_groups), "functools.partial(<function of_two_groups>)"),
        (
            quick,
            "def quick(parameters: Any) -> torch.optim.Optimizer:\n    return torch.optim.SGD(parameters, lr=0.5)",
        ),
        (of_two_groups, "tests.session.test_subject.of_two_groups"),
    ],
)
def test_the_optimizer_is_described_in_a_few_lines(optimizer_fn: Any, text: str) -> None:
    """Adam's was its whole source, in every table, file and log."""
    data = torch.zeros(4, 3), torch.zeros(4, 2)
    subject = Subject.of(
        lambda: nn.Linear(3, 2), data, nn.functional.mse_loss, optimizer_fn=optimizer_fn, batch_size=2, steps=1
    )
    assert subject.settings()["optimizer"] == text


def test_losses_with_other_options_are_other_losses() -> None:
    """Runs with and without label smoothing were runs of one training, and with two seeds one row of means."""
    smoothed = partial(nn.functional.cross_entropy, label_smoothing=0.1), nn.CrossEntropyLoss(label_smoothing=0.1)
    data = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
    losses = [*smoothed, nn.CrossEntropyLoss(), nn.functional.cross_entropy]
    subjects = [Subject.of(lambda: nn.Linear(3, 2), data, loss, batch_size=2, steps=1) for loss in losses]
    assert [subject.settings()["loss"] for subject in subjects] == [
        "cross_entropy(label_smoothing=0.1)",
        "CrossEntropyLoss(reduction='mean', ignore_index=-100, label_smoothing=0.1)",
        "CrossEntropyLoss(reduction='mean', ignore_index=-100, label_smoothing=0.0)",
        "cross_entropy",
    ]


def pinball(q: float) -> Any:
    return lambda output, target: torch.max(q * (target - output), (q - 1) * (target - output)).mean()


def test_functions_that_read_other_values_are_other_trainings() -> None:
    """Runs in a loop over quantiles or rates were one training: with two seeds one row of means, and drawn beside a one
    device of another one.
    """
    data, loss, made = (torch.zeros(4, 3), torch.zeros(4, 2)), nn.functional.mse_loss, lambda: nn.Linear(3, 2)
    given: list[Any] = [
        (made, loss, None),
        *((made, pinball(q), None) for q in (0.1, 0.9)),
        *((made, lambda output, target, q=q: q * loss(output, target), None) for q in (0.1, 0.9)),
        (made, lambda output, target: 0.2 * loss(output, target), None),
        (made, lambda output, target: 0.3 * loss(output, target), None),
        *((made, loss, lambda parameters, lr=lr: torch.optim.Adam(parameters, lr=lr)) for lr in (0.1, 0.2)),
        *((lambda p=p: nn.Sequential(nn.Linear(3, 2), nn.Dropout(p)), loss, None) for p in (0.1, 0.2)),
    ]
    subjects = [
        Subject.of(make, data, loss, optimizer_fn=optimizer_fn, batch_size=2, steps=1)
        for make, loss, optimizer_fn in [*given, *given]
    ]
    found = [json.dumps(subject.settings()) for subject in subjects]
    assert found[: len(given)] == found[len(given) :] and len(set(found)) == len(given)


def test_variables_have_the_values_that_engines_have() -> None:
    """Those of the time when the job was made: a later run of a panel was of another loss than its one device."""
    data, factor = (torch.zeros(4, 3), torch.zeros(4, 2)), 0.5

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return factor * (output - target).square().mean()

    subject = Subject.of(lambda: nn.Linear(3, 2), data, loss, batch_size=2, steps=1)
    before, factor = subject.settings(), 0.7
    assert subject.settings() == before and "factor=0.5" in before["loss"]


def test_a_rate_is_among_the_settings_and_the_line_of_a_lambda_is_not() -> None:
    """The line had the whole call, with its seed: runs of other seeds were of other optimizers."""
    data, loss = (torch.zeros(4, 3), torch.zeros(4, 2)), nn.functional.mse_loss
    subject = Subject.of(
        partial(nn.Linear, 3, 2), data, loss, optimizer_fn=lambda p: torch.optim.SGD(p, lr=0.5), batch_size=2, steps=1
    )
    settings = subject.settings()
    options = "lr=0.5, momentum=0, dampening=0, weight_decay=0"
    assert (settings["model"], settings["optimizer"]) == ("Linear", f"SGD({options})")
    assert settings["optimizer_options"] == options


def scattered() -> nn.Module:
    """Its weights are drawn by torch, numpy and Python."""
    model = nn.Linear(3, 2)
    drawn = np.random.rand(2, 3)  # noqa: NPY002
    model.weight.data += torch.from_numpy(drawn).float() * random.random()
    return model


def drawn_next() -> tuple[float, float, float]:
    """Of torch, Python and numpy."""
    return torch.rand(()).item(), random.random(), float(np.random.rand())  # noqa: NPY002


def test_a_comparison_draws_none_of_the_notebooks_random_numbers() -> None:
    """A loop over comparisons of random data had the same data each time."""
    data, drawn = (torch.zeros(4, 3), torch.zeros(4, 2)), []
    for compares in (False, True):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(3)
        if compares:
            Subject.of(scattered, data, nn.functional.mse_loss, batch_size=2, steps=1)
        drawn.append(drawn_next())
    assert drawn[0] == drawn[1]


def test_the_data_and_the_loss_are_described() -> None:
    """Runs of other data were compared: speed-ups of short sequences over one device with long ones."""
    data = torch.zeros(6, 3, 8), torch.zeros(6, 2)
    loss = partial(nn.functional.mse_loss, reduction="mean")
    subject = Subject.of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, 2)), data, loss, batch_size=2, steps=1)
    settings = subject.settings()
    assert (settings["loss"], settings["sample_shape"], settings["num_samples"]) == (
        "mse_loss(reduction='mean')",
        "3x8",
        6,
    )
    assert json.loads(json.dumps(settings)) == settings, "records from files are like those of today"


def test_another_order_or_weighting_of_the_samples_is_another_training() -> None:
    """Runs with and without them counted as one: two seeds had one row of means, and one of them a wrong baseline."""
    data, weighted = (torch.zeros(6, 3), torch.zeros(6, dtype=torch.long)), nn.functional.cross_entropy
    weights = torch.ones(2), torch.tensor([1.0, 3.0])
    given: list[tuple[Any, dict[str, Any]]] = [
        (weighted, {}),
        (weighted, {"shuffle": False}),
        (weighted, {"drop_last": True}),
        (weighted, {"count": lambda inputs, targets: len(targets)}),
        *((partial(weighted, weight=weight), {}) for weight in weights),
        *((nn.CrossEntropyLoss(weight=weight), {}) for weight in weights),
    ]
    subjects = [Subject.of(lambda: nn.Linear(3, 2), data, loss, batch_size=4, steps=1, **more) for loss, more in given]
    assert len({json.dumps(subject.settings()) for subject in subjects}) == len(given)


class Noisy(torch.utils.data.Dataset):
    """Adds noise to a sample each time."""

    def __init__(self, samples: torch.Tensor) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.samples[index] + torch.randn(3), self.samples[index, :2]


def test_data_sets_of_one_size_and_shape_are_not_one() -> None:
    """They counted as one, so a run had a speed-up over one device with other data."""
    ones, zeros = torch.ones(4, 3), torch.zeros(4, 3)
    sets = [Noisy(ones), Noisy(zeros), Noisy(ones), (ones, ones[:, :2]), (ones, zeros[:, :2])]
    options: dict[str, Any] = {"batch_size": 2, "steps": 1}
    subjects = [Subject.of(lambda: nn.Linear(3, 2), data, nn.functional.mse_loss, **options) for data in sets]
    found = [subject.settings()["first_samples"] for subject in subjects]
    assert found[0] == found[2] and len(set(found)) == 4, found


def test_folds_of_one_data_set_are_not_one() -> None:
    """Most folds begin with the same samples, and have as many."""
    x = torch.arange(60.0).reshape(20, 3)
    kept = [[row for row in range(20) if row // 4 != fold] for fold in range(5)]
    whole = torch.utils.data.TensorDataset(x, x[:, :2])
    sets = [*((x[rows], x[rows, :2]) for rows in kept), *(torch.utils.data.Subset(whole, rows) for rows in kept)]
    options: dict[str, Any] = {"batch_size": 2, "steps": 1}
    subjects = [Subject.of(lambda: nn.Linear(3, 2), data, nn.functional.mse_loss, **options) for data in sets]
    assert len({subject.settings()["first_samples"] for subject in subjects}) == len(sets)
