"""What is trained, apart from the strategy: model, data, loss and optimizer, and what a rank brings home from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from workbench.core.verdict import TOLERANCES, WEIGHT_STEPS
from workbench.tensors import default_generator
from workbench.training.batches import Batch, Count, LossFunction, as_tensors
from workbench.training.datasets import Collate, check_dataset, first_batch, num_samples_of, take
from workbench.training.runs.job_checks import (  # fmt: skip
    check_batch_size,
    check_functions,
    check_model,
    check_numbers,
    check_optimizer,
)
from workbench.training.runs.weight_changes import WeightHistory, disturb, precision_of

WARM_UP_STEPS = 3
"""Steps that plan and cache; left out of throughput."""


@dataclass(frozen=True)
class Job:
    """What is trained, apart from the strategy.

    Attributes:
        model_fn: makes the model; called after ``torch.manual_seed(seed)``.
        dataset: all samples in tensors or arrays (a tuple or dict of them, nested or not), or a Dataset whose items are
            tuples or dicts of such; what of them goes to the model and what to the loss: see ``batches``.
        loss_fn: (output, targets) -> scalar, a mean over the samples; None where the model returns its own loss.
        optimizer_fn: parameters -> torch optimizer; default SGD with lr 0.1 and momentum 0.9.
        batch_size: samples per step, over all ranks.
        num_steps: training steps; the data set starts anew as often as that takes.
        collate_fn: makes a batch of a list of samples, as for torch's ``DataLoader``; all ranks take the same batches.
        shuffle: take the samples in another order in every epoch, which follows from the seed; else in their own.
        drop_last: leave out the uneven batch at the end of an epoch.
        count: how many terms a micro-batch's loss is the mean of, ``(inputs, targets) -> number``; None: its samples.
        dtype: of the floating-point numbers in model and data; default as they are.
        perturbed: change the first weights by up to one rounding unit of what the model computes in, under
            that precision of a strategy.
        measures_memory: False for a run that only its losses and weights are wanted of; memory figures are rough then.
        draws: the model is known to draw random numbers in its first step.

    Raises:
        RunError: a model instead of a function that makes one, a number below 1, a data set without positions, or a
            batch larger than the data set.
    """

    model_fn: Callable[[], nn.Module]
    dataset: Any
    loss_fn: LossFunction | None
    optimizer_fn: Callable[[Any], torch.optim.Optimizer] | None
    batch_size: int
    num_steps: int
    seed: int = 0
    collate_fn: Collate | None = None
    shuffle: bool = True
    drop_last: bool = False
    count: Count | None = None
    dtype: torch.dtype | None = None
    perturbed: str | None = None
    measures_memory: bool = True
    draws: bool = False

    def __post_init__(self) -> None:
        names = ("model_fn", "loss_fn", "optimizer_fn", "collate_fn", "count")
        check_functions({name: getattr(self, name) for name in names})
        check_numbers({"batch_size": self.batch_size, "steps": self.num_steps})
        check_dataset(self.dataset, self.collate_fn, f"batch_size={self.batch_size}")
        check_batch_size(self.batch_size, num_samples_of(self.dataset), self.dataset)

    def model(self) -> nn.Module:
        """A fresh model with the job's weights.

        Raises:
            RunError: ``model_fn`` makes something else.
        """
        with default_generator.seeded(self.seed):
            model = self.model_fn()
        check_model(model)
        model = model.to(self.dtype) if self.dtype is not None else model
        if self.perturbed is not None:
            disturb(model, TOLERANCES[precision_of(model, self.perturbed)])
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over a model's parameters.

        Raises:
            RunError: ``optimizer_fn`` makes something else.
        """
        if self.optimizer_fn is None:
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = self.optimizer_fn(model.parameters())
        check_optimizer(optimizer, model)
        return optimizer

    def first_batch(self) -> Batch:
        """A small batch, to see whether model and loss take it."""
        return first_batch(self.dataset, self.loss_fn, collate_fn=self.collate_fn)

    def batches(self) -> Iterator[Batch]:
        """The batches of the run, epoch after epoch."""
        num_samples = num_samples_of(self.dataset)
        generator = torch.Generator().manual_seed(self.seed)
        step = 0
        while step < self.num_steps:
            order = torch.randperm(num_samples, generator=generator) if self.shuffle else torch.arange(num_samples)
            used = num_samples - num_samples % self.batch_size if self.drop_last else num_samples
            for indices in order[:used].split(self.batch_size)[: self.num_steps - step]:
                yield Batch.of(self._cast(take(self.dataset, indices, self.collate_fn)), self.loss_fn)
                step += 1

    def _cast(self, samples: Any) -> Any:
        if self.dtype is None:
            return samples
        wide = lambda tensor: tensor.to(self.dtype) if tensor.is_floating_point() else tensor  # noqa: E731
        return tree_map_only(torch.Tensor, wide, as_tensors(samples))


@dataclass(frozen=True)
class RankSegment:
    """What one rank held and sent in a step under one of the strategies of a run; ``memory_bytes`` has its peak."""

    memory_bytes: dict[str, int]
    boxed_bytes: int


@dataclass
class RankResult:
    """What one rank brings home from a run.

    ``weights`` is the model's logical state after ``WEIGHT_STEPS`` steps (or the last), where it was asked for.
    ``course`` is that of a one-device run, and ``draws`` says whether its model drew random numbers.
    ``changes`` has (step, strategy) for every change of strategy on the way, ``segments`` what was measured under each
    of them, where there are several; other figures are those of the whole run. ``layer_forward_s`` and
    ``layer_backward_s`` say how long layers compute in a step, see ``LayerTimes``; empty where nobody listened.
    """

    losses: list[float]
    step_times_s: list[float]
    memory_bytes: dict[str, int]
    boxed_bytes: int
    weights: dict[str, torch.Tensor] | None = None
    changes: list[tuple[int, str]] = field(default_factory=list)
    layer_forward_s: dict[str, float] = field(default_factory=dict)
    layer_backward_s: dict[str, float] = field(default_factory=dict)
    segments: list[RankSegment] = field(default_factory=list)
    course: WeightHistory | None = None
    draws: bool = False


def seed_draws(job: Job) -> None:
    """Seed what the model draws for plain tensors: alike on all ranks."""
    with default_generator.seeded(job.seed):
        pass


def checked_step(job: Job) -> int:
    """The step after which weights are compared."""
    return min(WEIGHT_STEPS, job.num_steps) - 1


__all__ = [
    "WARM_UP_STEPS",
    "Job",
    "RankResult",
    "checked_step",
    "seed_draws",
]
