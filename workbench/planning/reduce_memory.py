"""Where nothing was found that fits: the leanest strategy is changed, a little at a time, while that makes it leaner.

Short cuts choose by bytes that add up: gradients beside all activations. A step's peak is a moment, of which whole
estimates know; they take longer, so they are made where nothing else is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from workbench.planning.candidates import Candidate, candidates_of, groups
from workbench.planning.incumbents import Incumbents, PricedStrategy
from workbench.planning.problem import Choice, Problem

MAX_PRICED = 400
"""Strategies."""
Changed = tuple[Candidate, tuple[Choice, ...], tuple[int, ...]]


def reduce_memory(problem: Problem, incumbents: Incumbents, ranges: Sequence[range]) -> None:
    """Put leaner and leaner strategies into the incumbents, until one fits or no change makes the leanest leaner.

    Args:
        problem: the question.
        incumbents: with strategies that do not fit.
        ranges: rows that belong together where stages are cut.
    """
    most, seen = incumbents.num_priced + MAX_PRICED, set[Changed]()
    start: PricedStrategy | None = None
    while incumbents.least_memory is not None and incumbents.least_memory is not start:
        start = incumbents.least_memory
        for changed in _changes(problem, incumbents, start, ranges):
            if changed not in seen and problem.fits_ties(changed[1]) and problem.fits_stages(changed[2]):
                seen.add(changed)
                incumbents.add(*changed)
            if incumbents.best is not None or incumbents.num_priced >= most:
                return


def _changes(
    problem: Problem, incumbents: Incumbents, found: PricedStrategy, ranges: Sequence[range]
) -> Iterator[Changed]:
    """Other choices of two kinds of rows that are neighbours, a unit on the stage beside its own, other options."""
    candidate = Candidate(found.strategy.options, found.strategy.num_stages)
    layers, model = found.strategy.layers, candidate.degrees[2]
    choices = tuple((layer.parallel, layer.split) for layer in layers)
    stages = tuple(layer.stage for layer in layers)
    free = [tuple(problem.choices(index, model)) for index in range(len(layers))]
    kinds = list(zip(incumbents.classes.with_before, free, choices, strict=True))
    for near in dict.fromkeys(tuple(kinds[index : index + 2]) for index in range(len(kinds))):
        for ours in product(*(options for _, options, _ in near)):
            new = dict(zip(near, ours, strict=True))
            yield candidate, tuple(new.get(kind, kind[2]) for kind in kinds), stages
    for rows in ranges:
        for stage in (stages[rows.start] - 1, stages[rows.stop - 1] + 1):
            moved = stages[: rows.start] + (stage,) * len(rows) + stages[rows.stop :]
            if list(moved) == sorted(moved) and set(moved) == set(stages):
                yield candidate, choices, moved
    for group in groups(problem):
        if group.degrees == candidate.degrees:
            for other in candidates_of(problem, group):
                if other.num_stages == candidate.num_stages:
                    yield other, choices, stages


__all__ = ["reduce_memory"]
