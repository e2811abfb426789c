"""The losses of a training job."""

from __future__ import annotations

from typing import Any

import torch

from workbench.errors import JobError
from workbench.flow.jobs.context import running_job
from workbench.flow.jobs.micro_batches import MicroBatches

__all__ = ["add_loss"]


def add_loss(loss: Any) -> None:
    """Train on this loss (its mean over all elements) by the rule of the job's config, when the body has ended.

    Several losses are added up.

    Raises:
        JobError: outside of a job function, in one of type ``"predict"``, or the loss is no tensor.

    ``flow.losses.add_loss(flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))``
    """
    name_loss(loss, None, "losses.add_loss")


def name_loss(loss: Any, rule: Any, what: str) -> None:
    """Record a loss and the rule that trains on it; None for the rule of the config."""
    job = running_job(what)
    if not job.trains:
        raise JobError(
            f'{what} in {job.name}, a job of type "predict": it updates nothing. Declare it '
            '@flow.global_function(type="train").'
        )
    if not isinstance(loss, (torch.Tensor, MicroBatches)):
        raise JobError(f"{what} in {job.name}: the loss is a {type(loss).__name__}. Give a tensor that the body made.")
    job.losses.append((loss, rule))
