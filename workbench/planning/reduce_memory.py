"""Local search for less memory: small changes of the strategy that holds least, if no strategy was found that fits.

The best-first search chooses by bytes that add up: gradients beside all activations. The peak of a step is one moment,
which only a whole estimate finds. Estimates take longer, so this search runs last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from workbench.planning.candidates import Candidate, candidates_of, groups
from workbench.planning.incumbents import Incumbents, PricedStrategy
from workbench.planning.problem import Choice, Problem

MAX_PRICED = 400
"""The largest number of strategies that the search prices."""
Changed = tuple[Candidate, tuple[Choice, ...], tuple[int, ...]]


def reduce_memory(problem: Problem, incumbents: Incumbents, ranges: Sequence[range]) -> None:
    """Add strategies that hold less and less to the incumbents, until one fits or no change helps.

    Args:
        problem: the question.
        incumbents: hold strategies that do not fit.
        ranges: rows that a cut keeps together.
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
    """Other choices for two neighbouring kinds of rows, a unit on the next or previous stage, other options."""
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
        if (group.degrees, group.context) == (candidate.degrees, candidate.options.context):
            for other in candidates_of(problem, group):
                if other.num_stages == candidate.num_stages:
                    yield other, choices, stages
