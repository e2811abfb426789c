"""Training runs that can be compared: the same weights, the same batches, the same micro-batches under every strategy.

``run_strategy`` is what an engine executes; ``run_one_device`` is the truth it is checked against, plain torch
without a global tensor in it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from workbench.core.metrics import StepMetrics
from workbench.core.strategy import Strategy
from workbench.runtime.memory import ActivationMeter, PeakMeter, model_memory
from workbench.runtime.ops.reading import everywhere
from workbench.runtime.parallel import parallelize, state_of
from workbench.runtime.pipelining.micro_batches import call, cut
from workbench.runtime.pipelining.step import train_micro_batches
from workbench.runtime.tensor import GlobalTensor
from workbench.runtime.transport.threads import ThreadHub, ThreadTransport
from workbench.runtime.world import Simulated, World, current

WARM_UP_STEPS = 3
"""Steps that plan and cache; left out of throughput."""
CHECKED_STEPS = 20
"""Steps after which weights are compared with one device's; later, rounding alone drives any two runs apart."""
_FETCH_INTERVAL_S = 0.1
_seeding = threading.Lock()  # torch's default generator is one for all simulated ranks
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Job:
    """What is trained, apart from the strategy.

    Attributes:
        model_fn: makes the model; called after ``torch.manual_seed(seed)``.
        dataset: a (inputs, targets) pair of tensors or arrays, or any torch Dataset of pairs.
        loss_fn: (output, target) -> scalar, a mean over the samples.
        optimizer_fn: parameters -> torch optimizer; default SGD with lr 0.1 and momentum 0.9.
    """

    model_fn: Callable[[], nn.Module]
    dataset: Any
    loss_fn: Callable[[Any, Any], torch.Tensor]
    optimizer_fn: Callable[[Any], torch.optim.Optimizer] | None
    batch_size: int
    num_steps: int
    seed: int = 0

    def model(self) -> nn.Module:
        """A fresh model with the job's weights."""
        with _seeding:
            torch.manual_seed(self.seed)
            return self.model_fn()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over a model's parameters."""
        if self.optimizer_fn is not None:
            return self.optimizer_fn(model.parameters())
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def batches(self) -> Iterator[Batch]:
        """The batches of the run, epoch after epoch, each in its own order that follows from the seed alone."""
        num_samples = num_samples_of(self.dataset)
        generator = torch.Generator().manual_seed(self.seed)
        step = 0
        while step < self.num_steps:
            order = torch.randperm(num_samples, generator=generator)
            for indices in order.split(self.batch_size)[: self.num_steps - step]:
                yield take(self.dataset, indices)
                step += 1


@dataclass
class RankResult:
    """What one rank brings home from a run.

    ``weights`` is the model's logical state after ``CHECKED_STEPS`` steps (or the last), where it was asked for.
    """

    losses: list[float]
    step_times_s: list[float]
    memory_bytes: dict[str, int]
    boxed_bytes: int
    weights: dict[str, torch.Tensor] | None = None


def num_samples_of(dataset: Any) -> int:
    """Samples in a dataset or in a pair of arrays."""
    return len(dataset[0]) if isinstance(dataset, tuple) else len(dataset)


def take(dataset: Any, indices: torch.Tensor) -> Batch:
    """The samples at ``indices`` as a pair of tensors."""
    if isinstance(dataset, tuple):
        inputs, targets = (torch.as_tensor(part) for part in dataset)
        return inputs[indices], targets[indices]
    if isinstance(dataset, torch.utils.data.TensorDataset):
        inputs, targets = dataset.tensors
        return inputs[indices], targets[indices]
    inputs, targets = torch.utils.data.default_collate([dataset[int(index)] for index in indices])
    return inputs, targets


def run_one_device(job: Job, num_micro_batches: int = 1) -> RankResult:
    """The run on one device in plain torch, with the same micro-batches in the same order.

    A model that drops out runs as the only rank of a world of its own instead: plain torch draws other random numbers.
    """
    peak = PeakMeter(torch.device("cpu"), shares_process=_is_simulated(current()))
    model = job.model()
    if drops_out(model):
        return _run_on_one_rank(job, num_micro_batches)
    optimizer = job.optimizer(model)
    losses, times, weights = [], [], {}
    for step, batch in enumerate(job.batches()):
        started = time.perf_counter()
        optimizer.zero_grad()
        total = 0.0
        for part in cut(*batch, num_micro_batches):
            loss = job.loss_fn(call(model, part.inputs), part.targets) * part.share
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
        times.append(time.perf_counter() - started)
        if step == checked_step(job):
            weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    memory = {**model_memory(model, optimizer), "peak": peak.peak_bytes()}
    return RankResult(losses, times, memory, 0, weights)


def _is_simulated(world: World) -> bool:
    return world.transport_name == "threads" and world.world_size > 1


def drops_out(model: nn.Module) -> bool:
    """Whether training the model draws random numbers, as far as its modules tell."""
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules())


def _run_on_one_rank(job: Job, num_micro_batches: int) -> RankResult:
    world = World(0, 1, current().device, ThreadTransport(ThreadHub(1), 0))
    with Simulated(world):
        strategy = Strategy("*: data").with_options(num_micro_batches=num_micro_batches)
        return run_strategy(job, strategy, keeps_weights=True)


def checked_step(job: Job) -> int:
    """The step after which weights are compared."""
    return min(CHECKED_STEPS, job.num_steps) - 1


def warm_up(job: Job) -> None:
    """One small step in plain torch, so that what torch loads on first use counts in nobody's memory."""
    model = job.model()
    optimizer = job.optimizer(model)
    inputs, targets = take(job.dataset, torch.arange(min(2, num_samples_of(job.dataset))))
    job.loss_fn(model(inputs), targets).backward()
    optimizer.step()


class _Run:
    """The state of one strategy's run on this rank."""

    def __init__(self, job: Job, strategy: Strategy) -> None:
        self.job, self.world = job, current()
        self.world.traffic.reset()
        self.peak = PeakMeter(self.world.device, shares_process=_is_simulated(self.world))
        self.model = parallelize(job.model(), strategy)
        self.optimizer = job.optimizer(self.model)
        self.meter = ActivationMeter(self.model)
        self.resolved = state_of(self.model).resolved
        self.memory: dict[str, int] = {}
        self.generator = torch.Generator().manual_seed(job.seed)  # of the seeds of steps, alike under every strategy
        self.losses: list[float] = []
        self.pending: list[torch.Tensor] = []
        self.times: list[float] = []
        self.sent: list[int] = []
        self.boxing_s = 0.0

    def step(self, batch: Batch, measures_activations: bool) -> float:
        """One training step; returns its seconds. The loss stays where it is until ``fetch_losses``."""
        started = time.perf_counter()
        traffic = self.world.traffic
        sent_before, waited_before = traffic.sent_bytes, traffic.time_s
        parts = cut(*batch, self.resolved.num_micro_batches)
        self.optimizer.zero_grad()

        around = self.meter.measure if measures_activations else contextlib.nullcontext
        loss = train_micro_batches(self.model, self.job.loss_fn, parts, around)
        self.optimizer.step()
        self.pending.append(loss)
        self.times.append(time.perf_counter() - started)
        self.sent.append(traffic.sent_bytes - sent_before)
        self.boxing_s = traffic.time_s - waited_before
        return self.times[-1]

    def fetch_losses(self) -> None:
        """The logical losses of the steps since the last call, in one exchange; all ranks call it together."""
        if self.pending:
            values = torch.stack(self.pending) if len(self.pending) > 1 else self.pending[0].reshape(1)
            fetched = everywhere(values) if isinstance(values, GlobalTensor) else values
            self.losses += fetched.tolist()
            self.pending.clear()

    def measure_memory(self) -> None:
        """Live storages by kind, and the peak so far."""
        activations = self.meter.size_bytes
        self.memory = {
            **model_memory(self.model, self.optimizer),
            "activations": activations,
            "peak": self.peak.peak_bytes(),
        }

    def metrics(self, step: int, batch_size: int) -> StepMetrics:
        """The record of the last step."""
        loss = self.losses[-1] if self.losses and not self.pending else None
        return StepMetrics(
            self.world.rank,
            step,
            self.job.num_steps,
            self.times[-1],
            batch_size,
            loss,
            dict(self.memory),
            self.sent[-1],
            self.boxing_s,
        )


def run_strategy(
    job: Job,
    strategy: Strategy | str,
    *,
    on_step: Callable[[StepMetrics], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    keeps_weights: bool = False,
) -> RankResult:
    """Train under a strategy; every rank of the world calls it.

    Args:
        on_step: gets this rank's record whenever losses were fetched, about every tenth of a second.
        should_stop: asked at the same moments; the run ends for all ranks as soon as one says so.
        keeps_weights: return the model's logical state too (costs one exchange of the whole model).

    Raises:
        StrategyError: the strategy does not fit.
    """
    run = _Run(job, Strategy(strategy) if isinstance(strategy, str) else strategy)
    with _drawing_from(run.world, run.generator):
        return _train(run, on_step, should_stop, keeps_weights)


@contextlib.contextmanager
def _drawing_from(world: World, generator: torch.Generator) -> Iterator[None]:
    before, world.generator = world.generator, generator
    try:
        yield
    finally:
        world.generator = before


def _train(
    run: _Run,
    on_step: Callable[[StepMetrics], None] | None,
    should_stop: Callable[[], bool] | None,
    keeps_weights: bool,
) -> RankResult:
    job, interval, weights = run.job, 1, None
    for step, batch in enumerate(job.batches()):
        run.step(batch, measures_activations=step == 1)
        if step <= 1 or step == WARM_UP_STEPS:
            run.measure_memory()
        if step == WARM_UP_STEPS:
            interval = _agreed_interval(run.times[-1], run.world)
        if keeps_weights and step == checked_step(job):
            weights = logical_state(run.model)
        if step % interval == 0 or step == job.num_steps - 1:
            run.fetch_losses()
            run.memory["peak"] = run.peak.peak_bytes()
            if on_step is not None:
                on_step(run.metrics(step, len(batch[0])))
            if should_stop is not None and _any_rank(should_stop(), run.world):
                break
    run.fetch_losses()
    run.measure_memory()
    return RankResult(run.losses, run.times, run.memory, _median(run.sent), weights)


def logical_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers as plain logical tensors, on every rank of the world. All ranks call it."""
    return {
        name: (everywhere(value) if isinstance(value, GlobalTensor) else value.detach()).clone()
        for name, value in (*model.named_parameters(), *model.named_buffers())
    }


def largest_difference(ours: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference between two states; infinite where a name is missing or a value is not finite."""
    worst = 0.0
    for name, value in ours.items():
        if name not in truth:
            return math.inf
        difference = float((value.double() - truth[name].double()).abs().max()) if value.numel() else 0.0
        worst = max(worst, math.inf if math.isnan(difference) else difference)
    return worst


def _agreed_interval(step_time_s: float, world: World) -> int:
    """How many steps lie between two fetches, the same on all ranks."""
    times = world.transport.all_gather(torch.tensor([step_time_s], device=world.device), "agreement on an interval")
    return max(1, round(_FETCH_INTERVAL_S / max(float(t) for t in times)))


def _any_rank(flag: bool, world: World) -> bool:
    flags = world.transport.all_gather(torch.tensor([int(flag)], device=world.device), "agreement on stopping")
    return any(bool(f) for f in flags)


def _median(values: list[int]) -> int:
    return sorted(values)[len(values) // 2] if values else 0
