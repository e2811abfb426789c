"""The values of one step under a strategy, in plain torch, and in a world of one rank, which draws as strategies do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from workbench.core.strategy import Strategy
from workbench.tensors import default_generator
from workbench.tensors.simulated import Simulated, world_of_one
from workbench.tensors.world import current
from workbench.training.batches import Batch, LossFunction
from workbench.training.parallel import parallelize
from workbench.training.pipelining.step import train_micro_batches
from workbench.training.precision import compute_in
from workbench.training.runs.exact_dtypes import exact_sums
from workbench.training.runs.recorded_values import RecordedValue, ValueName, ValueRecorder

Values = dict[ValueName, RecordedValue]


def values_under(strategy: Strategy, model: nn.Module, parts: Sequence[Batch], loss_fn: LossFunction | None) -> Values:
    """This rank's values of a step of micro-batches under a strategy. The model is parallelized."""
    with default_generator.seeded(0):  # of plain tensors
        pass
    with exact_sums(), current().context.temporarily(generator=torch.Generator().manual_seed(0)):
        model = parallelize(model, strategy)
        recorder = ValueRecorder(model)
        with recorder.watch():
            train_micro_batches(model, loss_fn, parts)
    return recorder.values


def values_in_plain_torch(
    model: nn.Module, parts: Sequence[Batch], loss_fn: LossFunction | None, precision: str
) -> tuple[Values, bool]:
    """The values of the step on this rank's device, and whether the model drew random numbers."""
    world = current()
    model = model.to(world.device)
    compute_in(model, precision, world.device, world.autocast_type)
    recorder = ValueRecorder(model)
    with exact_sums(), default_generator.watched(world.device) as has_drawn, recorder.watch():
        for part in parts:
            (part.on_device(world.device).loss(model, loss_fn) * part.share).backward()
        return recorder.values, has_drawn()


def values_on_one_rank(
    strategy: Strategy, model: nn.Module, parts: Sequence[Batch], loss_fn: LossFunction | None
) -> Values:
    """The values of the step in a world of one rank, as those of one device: plain torch draws other numbers."""
    with Simulated(world_of_one(current().device)):
        values = values_under(strategy, model, parts, loss_fn)
    return {name: replace(value, layout=None, operands=()) for name, value in values.items()}
