"""The job on which strategies are compared. It is checked before any engine starts, so that mistakes show at once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from workbench.core.presets import StrategyLike, strategy_of
from workbench.core.rows import Layer, count_parameters
from workbench.core.strategy import Strategy
from workbench.tensors.agreement import fingerprint
from workbench.tensors.program_state import all_seeded, undrawn
from workbench.tensors.reached_objects import OF_TORCH, PLAIN_VALUES
from workbench.training.datasets import num_samples_of
from workbench.training.runs.job import Job
from workbench.training.traced_calls import describe_with_calls

_MAX_LINES = 4
"""Of a function whose source describes the optimizer."""


@dataclass(frozen=True)
class Subject:
    """A job, the layers of its model, the shape of one sample of the model's first input, and a checksum of the first
    samples.
    """

    job: Job
    layers: list[Layer]
    sample_shape: tuple[int, ...]
    first_samples: str

    @classmethod
    def of(
        cls,
        model_fn: Callable[[], Any],
        dataset: Any,
        loss_fn: Callable[[Any, Any], Any] | None,
        *,
        optimizer_fn: Callable[[Any], Any] | None = None,
        batch_size: int,
        steps: int,
        **options: Any,
    ) -> Subject:
        """A subject of the arguments of ``wb.compare``. It makes the model once in this process, to find its layers.

        Args:
            options: others of `Job`: seed, collate_fn, shuffle, drop_last, count.

        Raises:
            RunError: the job cannot be trained, see `Job`.
        """
        job = Job(model_fn, dataset, loss_fn, optimizer_fn, batch_size, steps, **options)
        with undrawn():
            model = job.model()
            job.optimizer(model)  # a mistake in it shows now
            with all_seeded(0):  # samples that draw random numbers are the same for every comparison
                batch = job.first_batch()
            checksum = fingerprint(tree_leaves((batch.inputs, batch.targets)))
            return cls(job, describe_with_calls(model, batch), batch.sample_shape, checksum)

    def settings(self) -> dict[str, Any]:
        """A description of the job, for tables and files."""
        job = self.job
        return {
            "model": getattr(job.model_fn, "__name__", type(job.model_fn).__name__),
            "num_parameters": count_parameters(self.layers),
            "batch_size": job.batch_size,
            "steps": job.num_steps,
            "optimizer": _optimizer_text(job.optimizer_fn),
            "loss": _loss_text(job.loss_fn),
            "sample_shape": "x".join(map(str, self.sample_shape)) or "scalar",
            "num_samples": num_samples_of(job.dataset),
            "first_samples": self.first_samples,
            "shuffle": job.shuffle,
            "drop_last": job.drop_last,
            "count": function_name(job.count) or "samples",
            "seed": job.seed,
        }

    def strategy(self, wanted: StrategyLike, num_ranks: int) -> Strategy:
        """A strategy from a preset's name, a text, a dict of rows or itself, checked against the model.

        Raises:
            StrategyError: it does not fit the model or the number of ranks.
        """
        strategy = strategy_of(wanted, self.layers, num_ranks)
        strategy.resolve(self.layers, num_ranks)
        return strategy


def function_name(function: Any) -> str:
    """The name of a function, of what a partial calls, or of the class of an object; empty for None."""
    while isinstance(function, partial):
        function = function.func
    return "" if function is None else getattr(function, "__name__", type(function).__name__)


def _loss_text(loss_fn: Any) -> str:
    """The name of the loss, with the options of a partial or of a module: others make another loss. Of class weights
    and other tensors it has a checksum.
    """
    own = dict(loss_fn.keywords) if isinstance(loss_fn, partial) else {}
    if isinstance(loss_fn, nn.Module):
        own = {**vars(loss_fn), **dict(loss_fn.named_buffers())}
    values = {name: value for name, value in own.items() if name not in OF_TORCH}
    options = {name: repr(value) for name, value in values.items() if type(value) in PLAIN_VALUES}
    options |= {name: fingerprint([value]) for name, value in values.items() if isinstance(value, Tensor)}
    texts = ", ".join(f"{name}={text}" for name, text in options.items())
    name = function_name(loss_fn) or "the model's own"
    return f"{name}({texts})" if texts else name


def _optimizer_text(optimizer_fn: Any) -> str:
    """The optimizer's source, if it is a function of a few lines; else its name."""
    if optimizer_fn is None:
        return "SGD(lr=0.1, momentum=0.9)"
    if not hasattr(optimizer_fn, "__qualname__"):
        return re.sub(r" at 0x[0-9a-f]+", "", repr(optimizer_fn))  # another one in every process
    if inspect.isfunction(optimizer_fn):
        with suppress(OSError):
            source = inspect.getsource(optimizer_fn).strip()
            if source.count("\n") < _MAX_LINES:
                return source
    return f"{optimizer_fn.__module__}.{optimizer_fn.__qualname__}"


__all__ = ["StrategyLike", "Subject", "function_name"]
