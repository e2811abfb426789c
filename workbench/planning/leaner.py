"""Where nothing was found that fits: the leanest strategy is changed, a little at a time, while that makes it leaner.

Short cuts choose by bytes that add up: gradients beside all activations. A step's peak is a moment, of which whole
estimates know; they take longer, so they are made where nothing else is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from workbench.planning.ledger import Found, Ledger
from workbench.planning.problem import Choice, Problem
from workbench.planning.settings import Candidate, groups, members

MOST_PRICED = 400
"""Strategies."""
Changed = tuple[Candidate, tuple[Choice, ...], tuple[int, ...]]


def make_leaner(problem: Problem, ledger: Ledger, ranges: Sequence[range]) -> None:
    """Put leaner and leaner strategies into the ledger, until one fits or no change makes the leanest leaner.

    Args:
        problem: the question.
        ledger: with strategies that do not fit.
        ranges: rows that belong together where stages are cut.
    """
    most, seen = ledger.num_priced + MOST_PRICED, set[Changed]()
    start: Found | None = None
    while ledger.leanest is not None and ledger.leanest is not start:
        start = ledger.leanest
        for changed in _changes(problem, ledger, start, ranges):
            if changed not in seen and problem.fits_ties(changed[1]) and problem.fits_stages(changed[2]):
                seen.add(changed)
                ledger.add(*changed)
            if ledger.best is not None or ledger.num_priced >= most:
                return


def _changes(problem: Problem, ledger: Ledger, found: Found, ranges: Sequence[range]) -> Iterator[Changed]:
    """Other choices of two kinds of rows that are neighbours, a unit on the stage beside its own, other options."""
    candidate = Candidate(found.strategy.options, found.strategy.num_stages)
    layers, model = found.strategy.layers, candidate.degrees[2]
    choices = tuple((layer.parallel, layer.split) for layer in layers)
    stages = tuple(layer.stage for layer in layers)
    free = [tuple(problem.choices(index, model)) for index in range(len(layers))]
    kinds = list(zip(ledger.classes.with_before, free, choices, strict=True))
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
            for other in members(problem, group):
                if other.num_stages == candidate.num_stages:
                    yield other, choices, stages


__all__ = ["make_leaner"]
