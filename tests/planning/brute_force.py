"""Every strategy of a small problem, written as text and priced one by one. Shares no code with the search."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from workbench.core.rows import Layer
from workbench.core.strategy import ResolvedStrategy, Strategy
from workbench.cost.estimate import Estimate, estimate
from workbench.errors import StrategyError
from workbench.planning.problem import Problem

MATRICES = {"Linear", "Embedding"}


def every_strategy(problem: Problem) -> Iterator[tuple[ResolvedStrategy, Estimate]]:
    """Each with its estimate, whether it fits or not."""
    layers = problem.costs.layers
    for ranks in range(1, problem.num_ranks + 1):
        if ranks != problem.num_ranks and (problem.objective != "cost" or problem.num_ranks % ranks):
            continue
        for options, num_stages, model in _options(problem, ranks):
            for text in _rows(layers, num_stages, model):
                try:
                    resolved = Strategy(f"{text} | {options}").resolve(layers, ranks)
                except StrategyError:  # one weight cut in two ways
                    continue
                yield (
                    resolved,
                    estimate(
                        problem.costs, resolved, problem.hardware, problem.batch_size, optimizer=problem.optimizer
                    ),
                )


def best_value(problem: Problem) -> float:
    """Of those that fit; infinite where none does."""
    best = float("inf")
    for resolved, found in every_strategy(problem):
        if found.peak_bytes > problem.memory_bytes:
            continue
        ranks = 1
        for degree in resolved.degrees:
            ranks *= degree
        value = {"throughput": found.step_s, "memory": found.peak_bytes, "cost": ranks * found.step_s}
        best = min(best, value[problem.objective])
    return best


def _options(problem: Problem, ranks: int) -> Iterator[tuple[str, int, int]]:
    """(options as text, stages, model degree)."""
    limits = [range(1, ranks + 1)] * 3
    constraints, batch = problem.constraints, problem.batch_size
    for p, d, m, context in product(*limits, problem.contexts):
        groups = d // context
        if p * d * m != ranks or d % context or batch % groups or not _wanted(constraints.pipeline, p):
            continue
        for mb in range(1, batch // groups + 1):
            if (batch // groups) % mb or not _wanted(constraints.micro_batches, mb):
                continue
            virtual_stages = [("interleaved", p * n) for n in range(2, 9) if p > 1]
            virtual_stages += [(schedule, 2 * p) for schedule in ("zero_bubble_v", "dualpipe_v") if p > 1]
            for schedule, stages in [
                *((name, p) for name in ("1f1b", "gpipe", "zero_bubble") if p > 1),
                *virtual_stages,
            ] or [("", 1)]:
                if schedule and not _wanted(constraints.schedule, schedule):
                    continue
                hosts = {link.span // m for link in problem.hardware.links}
                sharded = [(zero, 0) for zero in range(4)]
                sharded += [(3, n) for n in hosts if n in range(2, d) and d % n == 0]
                for (zero, shards), again, sequence in product(sharded, (False, True), (False, True)):
                    if (zero and d * m == 1) or (sequence and m == 1):
                        continue
                    if not _wanted(constraints.zero, zero) or not _wanted(constraints.recompute, again):
                        continue
                    if not _wanted(constraints.sequence, sequence):
                        continue
                    words = [
                        f"{p}x{d}x{m} mb={mb}",
                        schedule,
                        f"zero={zero} context={context}" + (f" shards={shards}" if shards else ""),
                        "recompute" * again,
                        "sequence" * sequence,
                    ]
                    yield " ".join([*filter(None, words), problem.precision]), stages, m


def _wanted(constraint: object, value: object) -> bool:
    return constraint is None or value == constraint or (isinstance(constraint, tuple) and value in constraint)


def _rows(layers: list[Layer], num_stages: int, model: int) -> Iterator[str]:
    words = [["data", "model:column", "model:row"] if layer.kind in MATRICES else ["data", "model"] for layer in layers]
    if model == 1:
        words = [["data"] for _ in layers]
    for stages in _stages(len(layers), num_stages):
        for choice in product(*words):
            yield "; ".join(f"{layer.name}: {c}@{s}" for layer, c, s in zip(layers, choice, stages, strict=True))


def _stages(num_layers: int, num_stages: int) -> Iterator[list[int]]:
    """All ways to number layers upwards from 0, each number used."""
    for steps in product((0, 1), repeat=num_layers - 1):
        if sum(steps) == num_stages - 1:
            stages = [0]
            for step in steps:
                stages.append(stages[-1] + step)
            yield stages
