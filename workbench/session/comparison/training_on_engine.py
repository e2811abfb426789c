"""Functions on engines for ``wb.compare`` and the panel: a training run that publishes its steps, and its reference.

Engines load this module, so it imports nothing of the notebook's side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch

from workbench.core.verdict import WEIGHT_STEPS
from workbench.session.on_engine import shell as engine_shell
from workbench.tensors.program_state import ProgramState, generators_of
from workbench.tensors.world import current
from workbench.training.runs.exact_dtypes import KeepsFloat64, exact_sums
from workbench.training.runs.first_difference import first_difference
from workbench.training.runs.job import Job, RankResult, checked_step
from workbench.training.runs.train import flops_per_sample, largest_difference, run_one_device, run_strategy, warm_up
from workbench.training.runs.weight_changes import WeightHistory, changes_apart


@dataclass(frozen=True)
class OneDevice:
    """Identifies a one-device run. A strategy's reference has as many micro-batches, and the same precision and seed.

    Attributes:
        seed: of the weights and the order of the samples.
        variant: ``"plain"``; ``"perturbed"``, with its first weights changed by a rounding unit; ``"float64"``, or
            ``"perturbed float64"``.
        weight_steps: steps after which weights are compared: 1 for runs of one step.
    """

    num_micro_batches: int = 1
    precision: str = "fp32"
    variant: Literal["plain", "perturbed", "float64", "perturbed float64"] = "plain"
    seed: int = 0
    weight_steps: int = WEIGHT_STEPS


_MOST_JOBS = 4
_jobs: dict[str, Job] = {}
"""The last ones, that of the last use at the end. Panels free none, and each run of a panel's cell makes another one; a
comparison whose job is gone sends it again.
"""
_histories: dict[tuple[str, OneDevice], WeightHistory] = {}


@dataclass(frozen=True)
class Prepared:
    """An engine's report on a job: its threads, and the reason why micro-batches are impossible (empty: possible)."""

    num_threads: int
    no_micro_batches: str = ""


def keep_job(key: str, job: Job) -> Prepared:
    """Keep a job under a key, so that its data set is sent once, and run one small step of it."""
    for oldest in list(_jobs)[: 1 - _MOST_JOBS]:
        forget_job(oldest)
    job = replace(job, begun={})  # the notebook's processor may draw other weights
    with _undone(job):
        problem = warm_up(job)
        _jobs[key] = replace(job, flops_per_sample=flops_per_sample(job))
    return Prepared(torch.get_num_threads(), problem)


def has_job(key: str) -> bool:
    """Whether this engine has the job. An engine that was started after the job was sent does not."""
    if key in _jobs:
        _jobs[key] = _jobs.pop(key)
    return key in _jobs


def forget_job(key: str) -> None:
    """Free a job and its one-device runs."""
    _jobs.pop(key, None)
    forget_one_device(key)


def forget_one_device(key: str) -> None:
    """Free the one-device runs of a job: each holds the weights of a model."""
    for known in [k for k in _histories if k[0] == key]:
        del _histories[known]


def train_one_device(key: str, which: OneDevice, num_steps: int) -> RankResult:
    """Train a job on one device and publish the steps. The engine keeps the weights for later comparisons, unless the
    run was stopped before the steps that are compared.

    The report of a perturbed run has its distance from the one that is not.
    """
    job = _variant(key, which, num_steps)
    listener = engine_shell.publish, engine_shell.commands
    result = run_one_device(job, which.num_micro_batches, *listener, which.precision, lambda: _mode(job))
    if result.draws:
        _jobs[key] = replace(_jobs[key], draws=True)
    history = result.course
    if which.variant.startswith("perturbed"):
        truth = replace(which, variant="plain" if which.variant == "perturbed" else "float64")
        return _to_send(result, history, _histories.get((key, truth)))
    if history is not None and history.end:
        _histories[key, which] = history
    return _to_send(result, history, None)


def train_strategy(key: str, strategy: str, which: OneDevice, num_steps: int, compiles: bool = False) -> RankResult:
    """Train under a strategy and publish this rank's steps; ``compiles`` as for ``run_strategy``. The report of the
    rank with the one-device run ``which`` has the distance of the weights from that run.
    """
    job = _variant(key, which, num_steps)
    with _mode(job):
        result = run_strategy(
            job,
            strategy,
            listen=engine_shell.publish,
            commands=engine_shell.commands,
            keeps_weights=True,
            compiles=compiles,
        )
    reference = _histories.get((key, which))
    history = None
    if reference is not None and result.weights:
        history = replace(reference, end=result.weights, num_steps=checked_step(job) + 1)
    return _to_send(result, history, reference)


def find_first_difference(key: str, strategy: str, seed: int) -> str:
    """Where the first step of a job under a strategy parts from one device, in a sentence."""
    job = replace(_jobs[key], seed=seed)
    with _undone(job):
        return str(first_difference(job.model(), strategy, batch=next(job.batches()), loss_fn=job.loss_fn))


def _variant(key: str, which: OneDevice, num_steps: int) -> Job:
    """The job of a run. Runs other than plain ones serve verdicts only, so they record losses and weights."""
    job = replace(_jobs[key], num_steps=num_steps, measures_memory=which.variant == "plain", seed=which.seed)
    job = replace(job, perturbed=which.precision) if which.variant.startswith("perturbed") else job
    return replace(job, is_wide=True) if which.variant.endswith("float64") else job


@contextmanager
def _mode(job: Job) -> Iterator[None]:
    """What makes runs of a job comparable: the numbers of its dtypes, on GPUs too."""
    with _undone(job), exact_sums(), KeepsFloat64() if job.is_wide else nullcontext():
        yield


@contextmanager
def _undone(job: Job) -> Iterator[None]:
    """What the job's functions keep, the generators of its data set and those of the process are afterwards as before:
    every run begins alike, on every rank. One device trains on one of them only.
    """
    functions = [each for each in (job.loss_fn, job.count, job.collate_fn) if each is not None]
    before = ProgramState(generators_of(job.dataset), current().device, code=functions)
    try:
        yield
    finally:
        before.put_back()


def _to_send(result: RankResult, own: WeightHistory | None, reference: WeightHistory | None) -> RankResult:
    """A result without weights, with their distance from the reference if that has taken as many steps before them."""
    sent = replace(result, weights=None, course=None, precision="fp32" if own is None else own.precision)
    if own is None or reference is None or not own.end or own.num_steps != reference.num_steps:
        return sent
    distance = largest_difference(own.end, reference.end)
    return replace(sent, weight_difference=distance, tensors=changes_apart(own, reference))
