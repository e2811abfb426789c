"""What an engine runs for ``wb.compare`` and the panel: a training run that publishes its steps, and its reference.

Loaded on engines, so it imports no part of the notebook's side.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from workbench.core.verdict import TensorChange
from workbench.session.on_engine import run_commands as engine_commands
from workbench.session.on_engine import shell as engine_shell
from workbench.training.runs.float64 import KeepsFloat64
from workbench.training.runs.job import RankSegment
from workbench.training.runs.train import Job, RankResult, largest_difference, run_one_device, run_strategy, warm_up
from workbench.training.runs.weight_changes import WeightHistory, changes_apart


@dataclass(frozen=True)
class OneDevice:
    """Which one-device run: strategies are compared with one of as many micro-batches and the same precision.

    Attributes:
        variant: ``"plain"``; ``"perturbed"``, with its first weights changed by a rounding unit; or ``"float64"``.
    """

    num_micro_batches: int = 1
    precision: str = "fp32"
    variant: Literal["plain", "perturbed", "float64"] = "plain"


_jobs: dict[str, Job] = {}
_histories: dict[tuple[str, OneDevice], WeightHistory] = {}


@dataclass(frozen=True)
class RankReport:
    """One rank's figures of a run, small enough to send.

    ``changes`` are those of the strategy, ``segments`` what was measured between them. ``tensors`` says how far the
    model's tensors are from one device's after the first steps, where this rank knows; ``precision`` is the coarsest
    one in which the model computes.
    """

    losses: tuple[float, ...]
    step_times_s: tuple[float, ...]
    memory_bytes: dict[str, int]
    boxed_bytes: int
    weight_difference: float | None = None
    changes: tuple[tuple[int, str], ...] = ()
    layer_forward_s: dict[str, float] = field(default_factory=dict)
    layer_backward_s: dict[str, float] = field(default_factory=dict)
    tensors: tuple[TensorChange, ...] = ()
    precision: str = "fp32"
    segments: tuple[RankSegment, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """What an engine says of a job that it keeps: its threads, and why micro-batches cannot be (empty: they can)."""

    num_threads: int
    no_micro_batches: str = ""


def keep_job(key: str, job: Job) -> Prepared:
    """Keep a job under a key, so that its data set travels to the engines once; its first small step is taken."""
    problem = warm_up(job)
    _jobs[key] = job
    return Prepared(torch.get_num_threads(), problem)


def has_job(key: str) -> bool:
    """Is the job here? Not on an engine that was started after it was sent."""
    return key in _jobs


def forget_job(key: str) -> None:
    """Free a job and its one-device runs."""
    _jobs.pop(key, None)
    for known in [k for k in _histories if k[0] == key]:
        del _histories[known]


def train_one_device(key: str, which: OneDevice, num_steps: int) -> RankReport:
    """A one-device run of a job; publishes its steps. Its weights are kept for the comparisons that follow, unless it
    was stopped before it had compared ones.

    One that is perturbed says how far it is from the plain one.
    """
    job = _variant(key, which.variant, num_steps, which.precision)
    with _mode(job):
        result = run_one_device(
            job, which.num_micro_batches, engine_shell.publish, engine_commands.commands, which.precision
        )
    if result.draws:
        _jobs[key] = replace(_jobs[key], draws=True)
    history, plain = result.course, replace(which, variant="plain")
    if which.variant == "perturbed":
        return _report(result, history, _histories.get((key, plain)))
    if history is not None and history.end:
        _histories[key, which] = history
    return _report(result, history, None)


def train_strategy(key: str, strategy: str, which: OneDevice, num_steps: int) -> RankReport:
    """Train under a strategy, publish this rank's steps; the rank that has the one-device run ``which`` says how far
    the weights are from its own.
    """
    job = _variant(key, which.variant, num_steps, which.precision)
    with _mode(job):
        result = run_strategy(
            job, strategy, listen=engine_shell.publish, commands=engine_commands.commands, keeps_weights=True
        )
    reference = _histories.get((key, which))
    history = replace(reference, end=result.weights) if reference is not None and result.weights else None
    return _report(result, history, reference)


def _variant(key: str, variant: str, num_steps: int, precision: str) -> Job:
    """The job of a run; one that is no plain one is evidence for a verdict, of losses and weights only."""
    job = replace(_jobs[key], num_steps=num_steps, measures_memory=variant == "plain")
    if variant == "perturbed":
        return replace(job, perturbed=precision)
    return replace(job, dtype=torch.float64) if variant == "float64" else job


def _mode(job: Job) -> AbstractContextManager[Any]:
    return KeepsFloat64() if job.dtype == torch.float64 else nullcontext()


def _report(result: RankResult, own: WeightHistory | None, reference: WeightHistory | None) -> RankReport:
    compared = own is not None and reference is not None and own is not reference and bool(own.end)
    return RankReport(
        tuple(result.losses),
        tuple(result.step_times_s),
        result.memory_bytes,
        result.boxed_bytes,
        largest_difference(own.end, reference.end) if compared and own and reference else None,
        tuple(result.changes),
        result.layer_forward_s,
        result.layer_backward_s,
        changes_apart(own, reference) if compared and own and reference else (),
        own.precision if own is not None else "fp32",
        tuple(result.segments),
    )
