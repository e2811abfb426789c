"""The baseline of every plan: the same step on one device, without micro-batches, ZeRO or recomputation."""

from __future__ import annotations

from dataclasses import replace

from workbench.core.options import Options
from workbench.cost.estimate import Estimate
from workbench.planning.incumbents import PricedStrategy
from workbench.planning.problem import DATA, Problem
from workbench.planning.strategy_comparison import PARTS
from workbench.units import counted, format_bytes, format_seconds

DEGREES = (1, 1, 1)


def one_device(problem: Problem) -> PricedStrategy:
    """The price of the whole batch on one rank while all others wait, whether it fits into memory or not."""
    options = Options(degrees=DEGREES, precision=problem.precision)
    strategy = problem.resolve([DATA] * len(problem.rows), [0] * len(problem.rows), options)
    price = _alone(problem, problem.estimate(strategy))
    return PricedStrategy(strategy, price, problem.value(strategy, price))


def fits(problem: Problem, found: PricedStrategy) -> bool:
    """Whether it fits into the memory of a rank."""
    return found.estimate.peak_bytes <= problem.memory_bytes


def is_faster(problem: Problem, alone: PricedStrategy, best: PricedStrategy) -> bool:
    """Whether one device is as good or better by the objective of the search."""
    return fits(problem, alone) and alone.value[0] <= best.value[0]


def describe_one_device(problem: Problem, alone: PricedStrategy, best: PricedStrategy) -> str:
    """A text that compares one device with the best strategy of all ranks."""
    step_s, peak_bytes = alone.estimate.step_s, alone.estimate.peak_bytes
    figures = f"step {format_seconds(step_s)}, {format_bytes(peak_bytes)}"
    if not fits(problem, alone):
        return f"{figures}: does not fit into {format_bytes(problem.memory_bytes)}"
    if is_faster(problem, alone, best):
        return f"{figures}: nothing on {counted(problem.num_ranks, 'rank')} beats it"
    ratio = f"{step_s / best.estimate.step_s:#.3g}".rstrip(".")
    return f"{figures}: {ratio} times as long a step"


def _alone(problem: Problem, price: Estimate) -> Estimate:
    """The estimate if the other ranks wait and leave shared cores to this one."""
    speedup = min(problem.hardware.alone_speedup, problem.num_ranks)
    seconds = {part: getattr(price, part) / speedup for part in ("step_s", *PARTS)}
    return replace(price, samples_per_s=price.samples_per_s * speedup, **seconds)
