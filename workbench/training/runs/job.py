"""A job of training, apart from its strategy: model, data, loss and optimizer. And a rank's result of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from numbers import Integral
from typing import Any

import torch
from torch import nn

from workbench.core.verdict import TOLERANCES, WEIGHT_STEPS, TensorChange
from workbench.tensors.program_state import all_seeded
from workbench.training.batches import Batch, Count, LossFunction, as_tensors
from workbench.training.datasets import (
    Collate,
    check_dataset,
    epoch_by_epoch,
    first_batch,
    is_of_arrays,
    num_samples_of,
    take,
    with_tensors,
)
from workbench.training.runs.exact_dtypes import wide, wide_model
from workbench.training.runs.job_checks import (  # fmt: skip
    check_batch_size,
    check_first_weights,
    check_functions,
    check_model,
    check_numbers,
    check_optimizer,
)
from workbench.training.runs.weight_changes import WeightHistory, perturb, precision_of
from workbench.training.sample_rows import batch_leaves, check_targets

WARM_UP_STEPS = 3
"""Steps that plan and cache. Throughput does not count them."""


@dataclass(frozen=True)
class Job:
    """Model, data, loss, optimizer and settings of a training, apart from the strategy.

    Attributes:
        model_fn: makes the model. Torch, Python and numpy have this seed before it is called.
        dataset: all samples in tensors or arrays (a tuple or dict of them, nested or not), or a Dataset whose items are
            tuples or dicts of these. ``batches`` says which entries the model gets, and which the loss.
        loss_fn: (output, targets) -> scalar, a mean over the samples. None: the model returns its own loss.
        optimizer_fn: parameters -> torch optimizer. Default: SGD with lr 0.1 and momentum 0.9.
        batch_size: samples per step, over all ranks.
        num_steps: training steps, over as many epochs as they need.
        collate_fn: list of samples -> batch, as for torch's ``DataLoader``. All ranks take the same batches.
        shuffle: a new order of the samples in every epoch, from the seed. False: the data set's order.
        drop_last: leave out a last batch of an epoch with fewer samples.
        count: (inputs, targets) -> the number of terms of a micro-batch's mean loss. None: its samples.
        is_wide: model and data have their floating-point numbers in float64, see ``exact_dtypes``.
        perturbed: a strategy's precision. The first weights change by up to one rounding unit of the precision in which
            the model then computes.
        measures_memory: False for a run of which only losses and weights are needed. Its memory figures are rough.
        draws: whether model, loss or optimizer are known to draw random numbers.
        flops_per_sample: operations of a step, for their share of the devices' peak; 0 if they were not counted.
        begun: by seed and name, checksums of the weights that ``model`` has made first.

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
    is_wide: bool = False
    perturbed: str | None = None
    measures_memory: bool = True
    draws: bool = False
    flops_per_sample: float = 0.0
    begun: dict[int, dict[str, str]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        names = ("model_fn", "loss_fn", "optimizer_fn", "collate_fn", "count")
        check_functions({name: getattr(self, name) for name in names})
        check_numbers({"batch_size": self.batch_size, "steps": self.num_steps})
        for name in ("batch_size", "num_steps", "seed"):
            if isinstance(number := getattr(self, name), Integral):  # of numpy, perhaps, which JSON does not take
                object.__setattr__(self, name, int(number))
        check_dataset(self.dataset, self.collate_fn, f"batch_size={self.batch_size}")
        object.__setattr__(self, "dataset", with_tensors(self.dataset))
        num_samples = num_samples_of(self.dataset)
        check_batch_size(self.batch_size, num_samples, self.dataset)
        if self.loss_fn is not None and is_of_arrays(self.dataset):
            check_targets(batch_leaves(Batch.of(self.dataset, self.loss_fn).targets), num_samples)

    def model(self) -> nn.Module:
        """A new model with the job's weights.

        Raises:
            RunError: ``model_fn`` returns no model, or one with other weights than before.
        """
        with all_seeded(self.seed):
            model = self.model_fn()
        check_model(model)
        check_first_weights(model, self.begun, self.seed)
        model = wide_model(model) if self.is_wide else model
        if self.perturbed is not None:
            perturb(model, TOLERANCES[precision_of(model, self.perturbed)])
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over a model's parameters.

        Raises:
            RunError: ``optimizer_fn`` returns no optimizer of the model.
        """
        if self.optimizer_fn is None:
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = self.optimizer_fn(model.parameters())
        check_optimizer(optimizer, model)
        return optimizer

    def first_batch(self) -> Batch:
        """A small batch, for a check of model and loss."""
        return first_batch(self.dataset, self.loss_fn, self.collate_fn)

    def batches(self) -> Iterator[Batch]:
        """The batches of the run, epoch after epoch."""
        num_samples = num_samples_of(self.dataset)
        used = num_samples - num_samples % self.batch_size if self.drop_last else num_samples
        epochs = epoch_by_epoch(num_samples, self.shuffle, self.seed)
        batches = (indices for order in epochs for indices in order[:used].split(self.batch_size))
        for indices in islice(batches, self.num_steps):
            samples = take(self.dataset, indices, self.collate_fn)
            yield Batch.of(wide(as_tensors(samples)) if self.is_wide else samples, self.loss_fn)


@dataclass(frozen=True)
class RankSegment:
    """One rank's memory and traffic of a step under one strategy of a run. ``memory_bytes`` has the peak."""

    memory_bytes: dict[str, int]
    boxed_bytes: int


@dataclass
class RankResult:
    """One rank's result of a run. ``samples`` are those of each step, over all ranks.

    ``changes`` has (step, strategy) for every change of the strategy. With several strategies, ``segments`` has the
    figures of each; other figures are those of the whole run. ``layer_forward_s`` and ``layer_backward_s`` are the
    layers' seconds of a step, see ``LayerTimes``. They are empty if there is no listener. ``uncompiled`` says why a run
    that was to compile its step did not; else it is empty.

    ``weights`` is the model's logical state after ``WEIGHT_STEPS`` steps (or the last), if it was asked for. ``course``
    is that of a one-device run, and ``draws`` says whether random numbers were drawn. Weights are not sent to the
    notebook: a result for it has in their place ``weight_difference`` and the differences of ``tensors`` from one
    device after these steps, if this rank knows them. ``precision`` is the coarsest one in which the model computes.
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
    uncompiled: str = ""
    weight_difference: float | None = None
    tensors: tuple[TensorChange, ...] = ()
    precision: str = "fp32"
    samples: list[int] = field(default_factory=list)


def seed_draws(job: Job) -> None:
    """Seed the random numbers of torch, Python and numpy, equally on all ranks."""
    with all_seeded(job.seed):
        pass


def checked_step(job: Job) -> int:
    """The step after which weights are compared."""
    return min(WEIGHT_STEPS, job.num_steps) - 1
