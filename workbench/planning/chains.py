"""The best choice for every layer of a long model, by dynamic programming along the layers.

A layer's price depends on its own choice and on those of its two neighbours, so a state is a pair of choices. After
some equal blocks, the costs of all states grow by the same amount per block. Later blocks then repeat the decisions of
the block before, and hundreds of layers take the time of a few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from workbench.core.weight_splits import split_dim
from workbench.planning.problem import Choice, Problem

Costs = Callable[[int], np.ndarray]
"""Takes a layer's index. Returns its costs by the choices of the layer before, of itself, and of the next layer.
A missing neighbour counts as one choice.
"""


class Chain:
    """A row of layers, each with several choices.

    Args:
        problem: the layers, their blocks and shared weights.
        options: the choices of each layer.
    """

    def __init__(self, problem: Problem, options: Sequence[Sequence[Choice]]) -> None:
        self.options = options
        self._tie_costs, self._num_tied_splits = _tie_costs(problem, options)
        self._repeats = _repeats(problem, options)

    def best(self, costs: Costs) -> tuple[Choice, ...] | None:
        """The choices with the smallest sum of costs; None if shared weights exclude all."""
        if not self._num_tied_splits:
            return None
        value, decisions = self._walk(cache(costs))
        tied_split, place = np.unravel_index(int(value[:, :, 0].argmin()), value.shape[:2])
        places, following = [int(place)], 0
        for decision in reversed(decisions[1:]):
            places.append(int(decision[tied_split, places[-1], following]))
            following = places[-2]
        return tuple(option[place] for option, place in zip(self.options, places[::-1], strict=True))

    def _walk(self, costs: Costs) -> tuple[np.ndarray, list[np.ndarray]]:
        """(sums of costs by split of shared weights and choice of the last layer, decisions of each layer)."""
        # so far, by split of shared weights, choice of the layer before, and choice
        value = np.zeros((self._num_tied_splits, 1, len(self.options[0])))
        decisions: list[np.ndarray] = []
        at_block: np.ndarray | None = None
        index = 0
        while index < len(self.options):
            total = value[..., None] + costs(index)
            if index in self._tie_costs:
                total += self._tie_costs[index][:, None, :, None]
            decisions.append(total.argmin(1))
            value = total.min(1)
            index += 1
            period, left = self._repeats.get(index, (0, 0))
            step = _step(value, at_block)
            if left and step is not None:
                decisions += decisions[-period:] * left
                value, index, at_block = value + step * left, index + period * left, None
            elif period:
                at_block = value
        return value, decisions


def _tie_costs(problem: Problem, options: Sequence[Sequence[Choice]]) -> tuple[dict[int, np.ndarray], int]:
    """(by row, infinity for each choice that a split of the shared weights excludes; the number of possible splits).

    A split is a dim along which all layers cut the shared weight, or None.
    """
    tied = sorted({index for pair in problem.ties for index in pair})
    if not tied:
        return {}, 1
    cuts = {i: [split_dim(problem.costs.layers[i].kind, split) for _, split in options[i]] for i in tied}
    splits = [dim for dim in (None, 0, 1) if all(dim in dims for dims in cuts.values())]
    tie_costs = {i: np.array([[0.0 if cut == dim else np.inf for cut in cuts[i]] for dim in splits]) for i in tied}
    return tie_costs, len(splits)


def _repeats(problem: Problem, options: Sequence[Sequence[Choice]]) -> dict[int, tuple[int, int]]:
    """By the row after a block: (rows of a block, number of equal blocks that follow, without the last)."""
    found: dict[int, tuple[int, int]] = {}
    for first, period, count in problem.costs.blocks:
        starts = range(first, first + period * count, period)
        if len({tuple(map(tuple, options[start : start + period])) for start in starts}) > 1:  # constraints for some
            continue
        for block in range(count):
            found[first + (block + 1) * period] = (period, max(0, count - 2 - block))
    return found


def _step(value: np.ndarray, before: np.ndarray | None) -> np.ndarray | None:
    """The amount by which all states of a split have grown since the last block, if it is the same for all."""
    if before is None or before.shape != value.shape or not np.isfinite(value).all():
        return None
    steps = value - before
    is_same = np.ptp(steps, axis=(1, 2)) <= 1e-9 * np.abs(steps).max()
    return steps[:, :1, :1] if is_same.all() else None
