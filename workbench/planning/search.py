"""The search: exact where a problem is small, by dynamic programming and bounds where it is large."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import comb, prod
from operator import attrgetter

from workbench.core.model_costs import ModelCosts
from workbench.core.options import PRECISIONS
from workbench.core.recompute_kinds import KINDS
from workbench.cost.hardware import Hardware
from workbench.cost.software import WORKBENCH, Software
from workbench.cost.stages import rows_again
from workbench.planning.best_first_search import search_best_first
from workbench.planning.candidates import Candidate, candidates
from workbench.planning.incumbents import Incumbents, PricedStrategy
from workbench.planning.infeasible import check_constraints, raise_does_not_fit
from workbench.planning.layer_prices import data_ranks, least_step_s
from workbench.planning.plan import Plan
from workbench.planning.problem import Choice, Constraints, Problem

_MAX_REFINED = 8
"""Number of strategies that ``finer_recompute`` prices again."""
_LEAST_PART = 0.75
"""The part of a step that stays without recomputation: of a forward, a backward and another forward."""


def search(
    costs: ModelCosts,
    hardware: Hardware,
    num_ranks: int,
    batch_size: int,
    *,
    objective: str = "throughput",
    memory_bytes: float | None = None,
    precision: str | None = None,
    optimizer: str = "adamw",
    software: Software = WORKBENCH,
    constraints: Constraints | None = None,
) -> Plan:
    """Find the strategy with the best prediction.

    The search covers all degrees, micro-batches, schedules, stages of ZeRO, recomputation and sequence parallelism, the
    choice of every layer, and the cuts into stages. It is exact for small problems: ``plan.is_exact``.

    Args:
        costs: costs of the model's layers.
        hardware: the machine of each rank.
        num_ranks: number of ranks. The strategy uses all, except for the objective "cost".
        batch_size: samples per step, all ranks together.
        objective: "throughput" (a short step), "memory" (a small peak), "cost" (few rank-seconds per step).
        memory_bytes: the most bytes that a rank may hold. None: the memory of the hardware.
        precision: "fp32", "bf16", "fp16" or "fp8". None: as the model was counted.
        optimizer: "adamw", "adam", "adamw8bit", "momentum" or "sgd".
        software: properties of the training program.
        constraints: limits on the search.

    Raises:
        StrategyError: constraints that conflict (the error names them), or a model that fits nowhere (the error says by
            how much, and what would make it fit).
    """
    problem = Problem(
        costs,
        hardware,
        num_ranks,
        batch_size,
        objective,
        hardware.memory_bytes if memory_bytes is None else memory_bytes,
        precision or (costs.dtype if costs.dtype in PRECISIONS else "fp32"),
        optimizer,
        software,
        constraints or Constraints(),
    )
    return solve(problem)


def solve(problem: Problem) -> Plan:
    """``search`` for a given problem."""
    started_s = time.perf_counter()
    check_constraints(problem)
    incumbents, is_exact = run(problem)
    if (best := incumbents.best) is None:
        raise_does_not_fit(problem, incumbents, is_exact, run)
    others = sorted((each for each in incumbents.by_degrees.values() if each is not best), key=attrgetter("value"))
    search_s = time.perf_counter() - started_s
    return Plan(problem, best, solve, tuple(others), is_exact, search_s, incumbents.num_priced)


def run(problem: Problem, is_quick: bool = False) -> tuple[Incumbents, bool]:
    """(the best strategies, whether the search is exact). ``is_quick``: only find out whether anything fits."""
    incumbents = Incumbents(problem)
    every = candidates_if_few(problem)
    if every is not None:
        search_exhaustively(problem, every, incumbents)
    else:
        search_best_first(problem, incumbents, is_quick)
    spread_experts(problem, incumbents)
    finer_recompute(problem, incumbents)
    return incumbents, every is not None


MAX_STRATEGIES = 20_000
"""The search is exact for this number of strategies or fewer."""


def candidates_if_few(problem: Problem) -> list[Candidate] | None:
    """The candidates of a problem with few strategies; None if there are more than ``MAX_STRATEGIES``."""
    known: dict[tuple[int, int], int] = {}
    found, number, gaps = [], 0, len(problem.rows) - 1
    for candidate in candidates(problem):
        width = _width(problem, candidate)
        if width not in known:
            known[width] = prod(len(problem.choices(index, *width)) for index in range(gaps + 1))
        number += known[width] * comb(gaps, candidate.num_stages - 1)
        found.append(candidate)
        if number > MAX_STRATEGIES:
            return None
    return found


def search_exhaustively(problem: Problem, every: Sequence[Candidate], incumbents: Incumbents) -> None:
    """Add the best strategies to the incumbents, in the order of their lower bounds."""
    bounded: list[tuple[float, int, Candidate, tuple[Choice, ...]]] = []
    widths = {_width(problem, candidate) for candidate in every}
    assignments = {width: list(choice_assignments(problem, *width)) for width in widths}
    for candidate in every:
        prices = incumbents.prices(candidate)
        for choices in assignments[_width(problem, candidate)]:
            seconds = prices.least_seconds(choices, candidate.options.recompute)
            weights = sum(prices.summed_weights(index, choice) for index, choice in enumerate(choices))
            bound = least_step_s(prices, candidate, seconds, weights)
            bounded.append((bound, len(bounded), candidate, choices))
    bounded.sort()
    for bound, _, candidate, choices in bounded:
        if incumbents.cannot_improve(candidate.degrees, bound):
            continue
        for stages in stage_assignments(len(problem.rows), candidate.num_stages):
            if problem.fits_stages(stages):
                incumbents.add(candidate, choices, stages)


def _width(problem: Problem, candidate: Candidate) -> tuple[int, int]:
    """Model and data ranks, as the choices of layers depend on them."""
    return candidate.degrees[2], data_ranks(problem, candidate.degrees[1])


def choice_assignments(problem: Problem, model: int, data: int) -> Iterator[tuple[Choice, ...]]:
    """Every combination of choices that cuts shared weights alike."""
    options = [problem.choices(index, model, data) for index in range(len(problem.rows))]
    return (choices for choices in product(*options) if problem.fits_ties(choices))


def stage_assignments(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """The stage of every layer, for every cut.

    >>> list(stage_assignments(3, 2))
    [(0, 1, 1), (0, 0, 1)]
    """
    for places in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(sum(place <= index for place in places) for index in range(num_layers))


def finer_recompute(problem: Problem, incumbents: Incumbents) -> None:
    """Add the best strategies to the incumbents with as little recomputation as their memory allows.

    The search prices none and all: what else is best depends little on which blocks run again, or what they keep. Each
    kind saves some bytes for some seconds. Of those that fit, the one with the shortest step has spent the fewest
    seconds on the bytes that lacked.
    """
    if problem.constraints.recompute is not None or problem.software.recompute != "full":
        return
    found = sorted(incumbents.kept, key=lambda each: each.value)[:_MAX_REFINED]
    num_blocks = max(rows_again(problem.costs).blocks) + 1
    for each in found:
        if each.strategy.options.recompute != "full" or each.value[0] * _LEAST_PART > incumbents.best_value:
            continue
        for kind in KINDS[1:]:
            _again(problem, incumbents, each, kind)
        fewest, most = 0, num_blocks  # the number of blocks that fits is between
        while most - fewest > 1:
            middle = (fewest + most) // 2
            fits = _again(problem, incumbents, each, str(middle)).estimate.peak_bytes <= problem.memory_bytes
            fewest, most = (fewest, middle) if fits else (middle, most)


def _again(problem: Problem, incumbents: Incumbents, found: PricedStrategy, recompute: str) -> PricedStrategy:
    strategy = replace(found.strategy, options=replace(found.strategy.options, recompute=recompute))
    return incumbents.keep(strategy, problem.estimate(strategy))


def spread_experts(problem: Problem, incumbents: Incumbents) -> None:
    """Add the best strategies to the incumbents with the choice ``expert`` for all lists that no constraint pins.

    Experts are spread over as many ranks as fit. A list is spread as a whole, and the search chooses layer by layer: it
    prices ``data`` and ``model`` for the layers of lists. For fused experts it prices ``expert`` too.
    """
    free = {i for i, row in enumerate(problem.rows) if row.layer.expert is not None and problem.pins[i] is None}
    for each in incumbents.kept if free else ():
        strategy = each.strategy
        choices = problem.choices_of(strategy)
        for index in free:
            choices[index] = ("expert", None)
        spread = problem.resolve(choices, [layer.stage for layer in strategy.layers], strategy.options)
        if any(spread.layers[index].over_data > 1 for index in free):
            incumbents.keep(spread, problem.estimate(spread))
