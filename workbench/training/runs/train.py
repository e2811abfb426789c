"""Training runs that can be compared: the same weights, the same batches, the same micro-batches under every strategy.

An engine calls ``run_strategy``. Its reference is ``run_one_device``, which is plain torch without a global tensor.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from weakref import WeakKeyDictionary

import torch
from torch.utils.flop_counter import FlopCounterMode

from workbench.core.metrics import StepBlock
from workbench.core.presets import StrategyLike
from workbench.core.run_commands import RunCommand
from workbench.core.strategy import Strategy
from workbench.tensors import default_generator
from workbench.tensors.simulated import Simulated, world_of_one
from workbench.tensors.world import World, current
from workbench.training.batches import call, loss_of
from workbench.training.diagnostics.device_use import DeviceMeter
from workbench.training.diagnostics.memory import PeakMeter, model_memory
from workbench.training.mean_losses import unlike_a_mean
from workbench.training.pipelining.step import Around
from workbench.training.precision import compute_in
from workbench.training.profiling.rank_profiler import is_simulated
from workbench.training.runs.job import Job, RankResult, checked_step, seed_draws
from workbench.training.runs.job_checks import explained
from workbench.training.runs.layer_times import LayerTimes, is_measured
from workbench.training.runs.live_run import LiveRun
from workbench.training.runs.step_metrics import INTERVAL_S, Listener
from workbench.training.runs.weight_changes import State, WeightHistory, copied_state
from workbench.transport.traffic import Time, seconds

_worlds_of_one: WeakKeyDictionary[World, World] = WeakKeyDictionary()
"""By this rank's world, a world of which it is the only rank: its plans serve the next run of that kind."""


def run_one_device(
    job: Job,
    num_micro_batches: int = 1,
    listen: Listener | None = None,
    commands: Callable[[], list[RunCommand]] = list,
    precision: str = "fp32",
    around: Around = nullcontext,
) -> RankResult:
    """The run on this rank's device in plain torch, with the same micro-batches in the same order.

    Where model, loss or optimizer draw random numbers, all of it runs once more in a world of one rank, because plain
    torch draws other numbers. ``listen`` gets a ``StepBlock`` about three times a second, and layers are timed if it is
    given. ``commands`` returns the commands so far. The run follows a stop, after the step in which it arrives.
    ``precision`` is that of a strategy: the precision of the model's forward. ``around`` is entered around each of the
    two tries.
    """
    if not job.draws:
        with around():
            result = _run_in_plain_torch(job, num_micro_batches, listen, commands, precision)
        if result is not None:
            return result
    with around():
        return _run_on_one_rank(job, num_micro_batches, listen, commands, precision)


def _run_in_plain_torch(
    job: Job,
    num_micro_batches: int,
    listen: Listener | None,
    commands: Callable[[], list[RunCommand]],
    precision: str,
) -> RankResult | None:
    """The run without global tensors; None where random numbers are drawn."""
    world = current()
    device = world.device
    peak = PeakMeter(device, collects_garbage=job.measures_memory and not is_simulated(world))
    model = job.model().to(device)
    course = WeightHistory.begin(model, precision, checked_step(job) + 1)
    optimizer = job.optimizer(model)
    layers = LayerTimes(model)
    compute_in(model, precision, world.device, world.autocast_type)
    seed_draws(job)
    losses, times, samples, weights = [], [], [], {}
    unread: list[tuple[list[torch.Tensor], Time, Time]] = []  # of each step: its losses, start, stop
    now, reported, reported_s = world.traffic.now, 0, time.perf_counter()
    for step, batch in enumerate(job.batches()):
        terms: list[torch.Tensor] = []
        measured = layers.measure() if listen is not None and is_measured(step) else nullcontext()
        with default_generator.watched(device) as has_drawn:
            started = now()
            optimizer.zero_grad()
            with measured:
                for part in batch.on_device(device).cut(num_micro_batches, job.count):
                    loss = part.term_of(part.loss(model, job.loss_fn))
                    if part.share:
                        loss.backward()
                    terms.append(loss.detach())
            with world.context.temporarily(profiler=None):  # a profile is of what all ranks do
                optimizer.step()
            unread.append((terms, started, now()))
            if has_drawn():
                return None
        samples.append(batch.num_samples)
        is_last = step == job.num_steps - 1 or any(command.kind == "stop" for command in commands())
        if is_last or time.perf_counter() - reported_s >= INTERVAL_S:
            values = iter(torch.stack([term for terms, *_ in unread for term in terms]).tolist())
            losses += [sum(islice(values, len(terms))) for terms, *_ in unread]
            times += [seconds(stop) - seconds(start) for _, start, stop in unread]
            unread.clear()
            if listen is not None:
                listen(_steps_alone(job, reported, losses, times, samples))
            reported, reported_s = step + 1, time.perf_counter()
        if step == checked_step(job):
            weights = copied_state(model)
        if is_last:
            break
    memory = {**model_memory(model, optimizer), "peak": peak.peak_bytes()}
    course = replace(course, end=weights)
    seconds_of = layers.forward_s, layers.backward_s
    return RankResult(losses, times, memory, 0, weights, [], *seconds_of, course=course, samples=samples)


def _steps_alone(job: Job, first_step: int, losses: list[float], times_s: list[float], samples: list[int]) -> StepBlock:
    """The steps of one device from ``first_step`` on."""
    count = len(losses) - first_step
    new = slice(first_step, None)
    nothing = ((0.0,) * count,), ((0,) * count,)
    return StepBlock(
        first_step, tuple(samples[new]), tuple(losses[new]), (tuple(times_s[new]),), *nothing, (), job.num_steps
    )


def _run_on_one_rank(
    job: Job,
    num_micro_batches: int,
    listen: Listener | None,
    commands: Callable[[], list[RunCommand]],
    precision: str,
) -> RankResult:
    """The run in a world of one rank. Its random numbers depend on positions, as under every strategy."""
    here = current()
    course = WeightHistory.begin(job.model(), precision, checked_step(job) + 1)
    strategy = Strategy("*: data").with_options(num_micro_batches=num_micro_batches, precision=precision)
    alone = _worlds_of_one.pop(here, None) or world_of_one(here.device)
    with Simulated(alone):
        result = run_strategy(job, strategy, listen=listen, commands=commands, keeps_weights=True)
    _worlds_of_one[here] = alone  # not after a failure
    result.course, result.draws = replace(course, end=result.weights or {}), True
    return result


def warm_up(job: Job) -> str:
    """Run one small step in plain torch, to find mistakes and to load what torch loads on first use.

    Returns:
        The reason why the job's loss cannot be taken over micro-batches; empty if it can.

    Raises:
        RunError: the model does not take the batch, or there is no loss with a gradient.
    """
    device = current().device
    model, batch = job.model().to(device), job.first_batch().on_device(device)
    optimizer = job.optimizer(model)
    with explained("the model", {"inputs": batch.inputs}, "It must run in plain torch: model_fn()(inputs)."):
        output = call(model, batch.inputs)
    problem = unlike_a_mean(job.loss_fn, output, batch.targets) if job.loss_fn is not None else ""
    given = {"output": output, "targets": batch.targets}
    with explained(
        "loss_fn(output, targets)", given, "If output is a tuple, use the part that the loss needs: output[0]."
    ):
        loss = loss_of(output, batch.targets, job.loss_fn)
    loss.backward()
    optimizer.step()
    return problem


def run_strategy(
    job: Job,
    strategy: StrategyLike,
    *,
    listen: Listener | None = None,
    commands: Callable[[], list[RunCommand]] | None = None,
    keeps_weights: bool = False,
    compiles: bool = False,
) -> RankResult:
    """Train under a strategy. All ranks of the world call it.

    Args:
        listen: gets the reports: on rank 0 a ``StepBlock`` about three times a second and every ``RunEvent``, on every
            rank its ``StepSpans`` about once a second.
        commands: returns the notebook's commands to this rank so far, in order: stop, pause, resume, another strategy.
            At fixed moments the ranks exchange them, and follow those that all ranks have received.
        keeps_weights: return the model's logical state too, which costs one exchange of the whole model.
        compiles: compile the step, see ``wb.capture``. Such a run has no timeline, and no times of layers.

    Raises:
        StrategyError: the strategy does not fit.
    """
    run = LiveRun(job, strategy, listen, commands, compiles)
    return run.train(keeps_weights)


def largest_difference(ours: State, truth: State) -> float:
    """Largest difference between two states, each tensor's over its largest element where that is beyond 1.

    It is measured like that of losses (``core.metrics.difference``). Infinite if a name is missing, or one is NaN.
    """
    worst = 0.0
    for name, value in ours.items():
        if name not in truth:
            return math.inf
        if value.numel():
            dtype = torch.complex128 if value.is_complex() else torch.float64
            own, expected = value.to("cpu", dtype), truth[name].to("cpu", dtype)
            difference = float((own - expected).abs().max() / expected.abs().max().clamp(min=1))
            worst = max(worst, math.inf if math.isnan(difference) else difference)
    return worst


def flops_per_sample(job: Job) -> float:
    """Multiplications and additions of matrix products, convolutions and attention, forward and backward, for a
    sample. 0 where nobody asks, because the peak of this rank's device is not known.
    """
    device = current().device
    return counted_flops(job) if "peak_flops_per_s" in DeviceMeter(device).read("fp32") else 0.0


def counted_flops(job: Job) -> float:
    """The same on any device, counted in one small step of plain torch."""
    device = current().device
    model, batch = job.model().to(device), job.first_batch().on_device(device)
    with FlopCounterMode(display=False) as counter:
        batch.loss(model, job.loss_fn).backward()
    return counter.get_total_flops() / batch.num_samples
