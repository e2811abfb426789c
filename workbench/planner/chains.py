"""The best choice for every layer of a long model, by dynamic programming along the layers.

A layer's price depends on its own choice and on those of its two neighbours, so a state is a pair of choices. Behind
equal blocks the costs of all states grow by one and the same amount per block: from then on blocks repeat the decisions
of the one before, and hundreds of layers take the time of a few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from workbench.core.pairing import split_dim
from workbench.planner.problem import Choice, Problem

Costs = Callable[[int], np.ndarray]
"""Of the layer at a place: by the choice of the layer before, its own, and that of the next one. A neighbour that there
is not has one choice.
"""


def best_chain(problem: Problem, options: Sequence[Sequence[Choice]], costs: Costs) -> tuple[Choice, ...] | None:
    """The choices with the smallest sum of costs; None where shared weights leave none.

    Args:
        problem: the layers, their blocks and shared weights.
        options: what each layer may do.
        costs: of a layer between its neighbours.
    """
    repeats = _repeats(problem, options)
    costs = cache(costs)
    best: tuple[float, list[int]] | None = None
    for barred in _ways_of_ties(problem, options):
        found = _walk(options, repeats, costs, barred)
        if np.isfinite(found[0]) and (best is None or found[0] < best[0]):
            best = found
    if best is None:
        return None
    return tuple(option[place] for option, place in zip(options, best[1], strict=True))


def _ways_of_ties(problem: Problem, options: Sequence[Sequence[Choice]]) -> list[dict[int, np.ndarray]]:
    """For each dim along which shared weights may be cut, the choices that this bars: infinity by row and choice."""
    tied = sorted({index for pair in problem.ties for index in pair})
    layers = problem.costs.layers
    return [
        {i: np.array([0.0 if split_dim(layers[i], c[1]) == dim else np.inf for c in options[i]]) for i in tied}
        for dim in ((None, 0, 1) if tied else (None,))
    ]


def _walk(
    options: Sequence[Sequence[Choice]],
    repeats: dict[int, tuple[int, int]],
    costs: Costs,
    barred: dict[int, np.ndarray],
) -> tuple[float, list[int]]:
    """(sum of costs, place of the choice of every layer)."""
    value = np.zeros((1, len(options[0])))  # so far, by choice before and choice
    decisions: list[np.ndarray] = []
    at_block: np.ndarray | None = None
    index = 0
    while index < len(options):
        total = value[:, :, None] + costs(index)
        if index in barred:
            total = total + barred[index][None, :, None]
        decisions.append(total.argmin(0))
        value = total.min(0)
        index += 1
        period, left = repeats.get(index, (0, 0))
        step = _step(value, at_block)
        if left and step is not None:
            decisions += decisions[-period:] * left
            value, index, at_block = value + step * left, index + period * left, None
        elif period:
            at_block = value
    places = [int(value[:, 0].argmin())]
    following = 0
    for decision in reversed(decisions[1:]):
        places.append(int(decision[places[-1], following]))
        following = places[-2]
    return float(value[places[0], 0]), places[::-1]


def _repeats(problem: Problem, options: Sequence[Sequence[Choice]]) -> dict[int, tuple[int, int]]:
    """By the row behind a block: (rows of a block, how many equal ones follow whose next block is equal, too)."""
    found: dict[int, tuple[int, int]] = {}
    for first, period, count in problem.costs.blocks:
        starts = range(first, first + period * count, period)
        if len({tuple(map(tuple, options[start : start + period])) for start in starts}) > 1:  # wishes for some
            continue
        for block in range(count):
            found[first + (block + 1) * period] = (period, max(0, count - 2 - block))
    return found


def _step(value: np.ndarray, before: np.ndarray | None) -> float | None:
    """By how much all states have grown since the last block, if by the same."""
    if before is None or before.shape != value.shape or not np.isfinite(value).all():
        return None
    steps = value - before
    return float(steps.flat[0]) if np.ptp(steps) <= 1e-9 * np.abs(steps).max() else None


__all__ = ["Costs", "best_chain"]
