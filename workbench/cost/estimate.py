"""Seconds and bytes of one training step of a strategy: the cost model of planner, panel and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from workbench.core.model_costs import ModelCosts
from workbench.core.strategy import ResolvedStrategy
from workbench.core.weight_splits import tied_pairs
from workbench.cost.between_stages import hops_of, on_all_ranks, prices_with_ties, tied_s
from workbench.cost.calls import prices_with_calls
from workbench.cost.hardware import Hardware
from workbench.cost.layers import NO_WEIGHTS
from workbench.cost.memory import live_micro_batches, memory_of, postponed_micro_batches
from workbench.cost.reduction import optimizer_s, reduced_bytes, reduction_s, statistics_of
from workbench.cost.schedule import makespan_s, timeline_of
from workbench.cost.software import WORKBENCH, Software
from workbench.cost.stage_settings import StageSettings, counted_at, settings_of
from workbench.cost.stages import StagePrice, prices_of, stage_prices
from workbench.pipeline.simulate import Timeline

_ROUNDING = 1e-12
"""A wait that is a smaller part of the schedule is a difference of equal sums."""


class SentBytes(NamedTuple):
    """Bytes that all ranks send in a step: activations with their gradients, and what ranks with copies of a weight
    exchange (sums of gradients, under ZeRO weights too).
    """

    activations: float
    weights: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.activations + self.weights


@dataclass(frozen=True)
class Estimate:
    """The prediction of one step, on the slowest rank. Parts add up to ``step_s``.

    Attributes:
        step_s: seconds from batch to updated weights.
        compute_s: forward, backward and recomputation.
        boxing_s: exchanges of activations and their gradients between layers, without overlap.
        gradient_s: gradient reduction over data-parallel ranks (and gathers of ZeRO), without overlap.
        bubble_s: waiting for other stages.
        optimizer_s: the update.
        memory: bytes by kind (``core.metrics.MEMORY_KINDS``) of every stage's fullest rank, at the step's peak.
        sent: bytes that all ranks send in a step; ``boxed_bytes`` is their sum.
        samples_per_s: batch size over ``step_s``.
        timeline: the predicted schedule, one rank per slice of the pipeline axis.
        boxing_shares: by stage, the part of a forward and of a whole backward that is exchanges.
        offloaded_bytes: what the rank with most of it holds beside its memory: in the host's, or in files.
        flops_per_sample: operations of the step, all ranks together, without recomputation.
    """

    step_s: float
    compute_s: float
    boxing_s: float
    gradient_s: float
    bubble_s: float
    optimizer_s: float
    memory: tuple[Mapping[str, float], ...]
    sent: SentBytes
    samples_per_s: float
    timeline: Timeline | None = field(default=None, compare=False, repr=False)
    boxing_shares: tuple[tuple[float, float], ...] = field(default=(), compare=False, repr=False)
    flops_per_sample: float = field(default=0.0, compare=False, repr=False)
    offloaded_bytes: float = 0.0

    @property
    def boxed_bytes(self) -> float:
        """Bytes that all ranks send in a step."""
        return self.sent.total

    @property
    def peak_bytes(self) -> float:
        """Bytes of the fullest rank."""
        return max((sum(kinds.values()) for kinds in self.memory), default=0.0)

    @property
    def fullest_stage(self) -> int:
        """The slice of the pipeline axis with the fullest rank; a strategy's ``stages_by_slice`` has its stages."""
        return max(range(len(self.memory)), key=lambda stage: sum(self.memory[stage].values()))

    @property
    def peak_kinds(self) -> list[tuple[str, float]]:
        """(kind, bytes) of the fullest rank, without zeros, the largest first."""
        kinds = sorted(self.memory[self.fullest_stage].items(), key=lambda item: -item[1])
        return [(kind, size) for kind, size in kinds if size > 0]


def estimate(
    model: ModelCosts,
    strategy: ResolvedStrategy,
    hardware: Hardware,
    batch_size: int,
    *,
    optimizer: str = "adamw",
    software: Software = WORKBENCH,
    with_timeline: bool = False,
) -> Estimate:
    """Predict one training step.

    Args:
        model: costs of its layers, from a trace or a formula.
        strategy: a strategy that is resolved for the model's layers.
        hardware: the machine.
        batch_size: samples per step, all data-parallel ranks and micro-batches together.
        optimizer: "adamw", "adam", "adamw8bit", "momentum" or "sgd".
        software: properties of the training program; by default the engines of this package.
        with_timeline: include the schedule action by action; takes some 10 us per action.

    Raises:
        StrategyError: fewer samples than micro-batches, or the hardware has no rate for the precision.
    """
    model = counted_at(model, strategy.options.precision, software)
    settings = settings_of(model, strategy, hardware, batch_size, optimizer, software)
    prices = prices_of(model.rows, strategy.layers, settings)
    prices = prices_with_calls(model, strategy.layers, prices, settings)
    prices = prices_with_ties(model, tied_pairs(model.layers), strategy, prices, settings)
    stages = stage_prices(model, strategy.layers, prices, settings)
    return combine(model, strategy, stages, settings, batch_size, with_timeline)


def combine(
    model: ModelCosts,
    strategy: ResolvedStrategy,
    stages: Sequence[StagePrice],
    settings: Sequence[StageSettings],
    batch_size: int,
    with_timeline: bool = False,
) -> Estimate:
    """A step from the prices of its stages: schedule, gradient reduction, optimizer, and memory at the peak."""
    m, hardware, slices = strategy.num_micro_batches, settings[0].hardware, strategy.stages_by_slice()
    stages = _with_statistics(stages, statistics_of(model, strategy, settings))
    hop_s, hop_bytes = hops_of(model, strategy, settings, batch_size)
    wait_s = 0.0 if settings[0].software.hides_sends else hop_s
    hop_s -= wait_s
    times = [s.forward_s + wait_s for s in stages], [s.input_s + wait_s for s in stages], [s.weight_s for s in stages]
    makespan = makespan_s(strategy.schedule, len(slices), m, *times, hop_s, hardware.alone_speedup)
    compute = [m * sum(stages[s].compute_s for s in mine) for mine in slices]
    boxing = [m * sum(stages[s].boxing_s for s in mine) for mine in slices]
    busy = [a + b for a, b in zip(compute, boxing, strict=True)]
    slowest = busy.index(max(busy))
    share = min(1.0, makespan / busy[slowest]) if busy[slowest] else 1.0
    compute_s, boxing_s = compute[slowest] * share, boxing[slowest] * share
    idle = makespan - compute_s - boxing_s
    bubble = idle if idle > _ROUNDING * makespan else 0.0
    gradient = max(reduction_s([stages[s] for s in mine], settings[mine[0]]) for mine in slices)
    gradient += tied_s(model, strategy, settings)
    update = max(optimizer_s(sum((stages[s].trained for s in mine), NO_WEIGHTS), settings[mine[0]]) for mine in slices)
    update += hardware.step_s
    step = makespan + gradient + update
    alive, postponed = live_micro_batches(strategy), postponed_micro_batches(strategy)
    received = (m * s.boxed_bytes * on_all_ranks(t, batch_size) for s, t in zip(stages, settings, strict=True))
    boxed = sum(received) + hop_bytes
    reduced = sum(sum(reduced_bytes(s, t)) * t.data * t.model for s, t in zip(stages, settings, strict=True))
    return Estimate(
        step,
        compute_s,
        boxing_s,
        gradient,
        bubble,
        update,
        memory_of(stages, alive, postponed, m, slices),
        SentBytes(boxed, reduced),
        batch_size / step if step else 0.0,
        timeline_of(strategy, *times, hop_s, hardware.alone_speedup) if with_timeline else None,
        tuple(_boxing_shares(stage, wait_s) for stage in stages),
        model.training_flops,
        max(sum(stages[s].offloaded + alive[s] * stages[s].leaving for s in mine) for mine in slices),
    )


def _with_statistics(stages: Sequence[StagePrice], found: Sequence[tuple[float, float]]) -> Sequence[StagePrice]:
    """Stages with the exchanges of their batch norms, half in forward and half in backward."""
    if not any(received for _, received in found):
        return stages
    return [
        replace(
            stage,
            forward_s=stage.forward_s + seconds / 2,
            input_s=stage.input_s + seconds / 2,
            boxing_s=stage.boxing_s + seconds,
            boxing_forward_s=stage.boxing_forward_s + seconds / 2,
            boxed_bytes=stage.boxed_bytes + received,
        )
        for stage, (seconds, received) in zip(stages, found, strict=True)
    ]


def _boxing_shares(stage: StagePrice, wait_s: float) -> tuple[float, float]:
    forward, backward = stage.forward_s + wait_s, stage.input_s + stage.weight_s + wait_s
    boxing_back = stage.boxing_s - stage.boxing_forward_s
    return (
        (stage.boxing_forward_s + wait_s) / forward if forward else 0.0,
        (boxing_back + wait_s) / backward if backward else 0.0,
    )
