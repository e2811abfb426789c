"""The exact search of small problems: every choice of every layer and every cut that a bound does not exclude."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from math import comb, prod

from workbench.planning.candidates import Candidate, candidates
from workbench.planning.incumbents import Incumbents
from workbench.planning.layer_prices import least_step_s
from workbench.planning.problem import Choice, Problem

MAX_STRATEGIES = 20_000
"""The search is exact for this number of strategies or fewer."""


def candidates_if_few(problem: Problem) -> list[Candidate] | None:
    """The candidates of a problem with few strategies; None if there are more than ``MAX_STRATEGIES``."""
    known: dict[int, int] = {}
    found, number, gaps = [], 0, len(problem.rows) - 1
    for candidate in candidates(problem):
        model = candidate.degrees[2]
        if model not in known:
            known[model] = prod(len(problem.choices(index, model)) for index in range(gaps + 1))
        number += known[model] * comb(gaps, candidate.num_stages - 1)
        found.append(candidate)
        if number > MAX_STRATEGIES:
            return None
    return found


def search_exhaustively(problem: Problem, every: Sequence[Candidate], incumbents: Incumbents) -> None:
    """Add the best strategies to the incumbents, in the order of their lower bounds."""
    bounded: list[tuple[float, int, Candidate, tuple[Choice, ...]]] = []
    assignments = {
        model: list(choice_assignments(problem, model)) for model in {candidate.degrees[2] for candidate in every}
    }
    for candidate in every:
        prices = incumbents.prices(candidate)
        for choices in assignments[candidate.degrees[2]]:
            seconds = prices.least_seconds(choices, candidate.options.recompute)
            weights = sum(prices.weights(index, choice) for index, choice in enumerate(choices))
            bound = least_step_s(prices, candidate, seconds, weights)
            bounded.append((bound, len(bounded), candidate, choices))
    bounded.sort()
    for bound, _, candidate, choices in bounded:
        if incumbents.cannot_improve(candidate.degrees, bound):
            continue
        for stages in stage_assignments(len(problem.rows), candidate.num_stages):
            if problem.fits_stages(stages):
                incumbents.add(candidate, choices, stages)


def choice_assignments(problem: Problem, model: int) -> Iterator[tuple[Choice, ...]]:
    """Every combination of choices that cuts shared weights alike."""
    options = [problem.choices(index, model) for index in range(len(problem.rows))]
    return (choices for choices in product(*options) if problem.fits_ties(choices))


def stage_assignments(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """The stage of every layer, for every cut.

    >>> list(stage_assignments(3, 2))
    [(0, 1, 1), (0, 0, 1)]
    """
    for places in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(sum(place <= index for place in places) for index in range(num_layers))
