"""What an engine runs for ``wb.compare`` and the panel: a training run that publishes its steps, and its truth.

Loaded on engines, so it imports no part of the notebook's side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.runtime.runs.train import Job, RankResult, largest_difference, run_one_device, run_strategy, warm_up
from workbench.session.on_engine import orders as engine_orders
from workbench.session.on_engine import shell as engine_shell

_truth: dict[tuple[Any, int], RankResult] = {}
_jobs: dict[str, Job] = {}


@dataclass(frozen=True)
class RankReport:
    """One rank's figures of a run, small enough to send."""

    losses: tuple[float, ...]
    step_times_s: tuple[float, ...]
    memory_bytes: dict[str, int]
    boxed_bytes: int
    weight_difference: float | None = None
    changes: tuple[tuple[int, str], ...] = ()
    layer_forward_s: dict[str, float] = field(default_factory=dict)
    layer_backward_s: dict[str, float] = field(default_factory=dict)


def keep_job(key: str, job: Job) -> None:
    """Keep a job under a key, so that its data set travels to the engines once."""
    _jobs[key] = job
    warm_up(job)


def forget_job(key: str) -> None:
    """Free a job and its one-device runs."""
    _jobs.pop(key, None)
    for known in [k for k in _truth if k[0] == key]:
        del _truth[known]


def train_one_device(key: str, num_micro_batches: int) -> RankReport:
    """The one-device run of a job, kept on this engine for the comparisons that follow; publishes its steps.

    One that was stopped is not kept.
    """
    job = _jobs[key]
    result = run_one_device(job, num_micro_batches, engine_shell.publish, engine_orders.orders)
    if len(result.losses) == job.num_steps:
        _truth[key, num_micro_batches] = result
    return _report(result)


def train_strategy(key: str, strategy: str, num_micro_batches: int = 1) -> RankReport:
    """Train under a strategy, publish this rank's steps; where the truth is kept, say how far the weights
    are from it.
    """
    torch.manual_seed(0)
    result = run_strategy(
        _jobs[key], strategy, listen=engine_shell.publish, orders=engine_orders.orders, keeps_weights=True
    )
    truth = _truth.get((key, num_micro_batches))
    difference = None
    if truth is not None and truth.weights is not None and result.weights is not None:
        difference = largest_difference(result.weights, truth.weights)
    return _report(result, difference)


def _report(result: RankResult, difference: float | None = None) -> RankReport:
    return RankReport(
        tuple(result.losses),
        tuple(result.step_times_s),
        result.memory_bytes,
        result.boxed_bytes,
        difference,
        tuple(result.changes),
        result.layer_forward_s,
        result.layer_backward_s,
    )
