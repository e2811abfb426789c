"""The best cut of a row of parts into stages, by the simulated time of a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from workbench.core.presets import balanced_cuts
from workbench.pipeline.schedules import make_table
from workbench.pipeline.simulate import simulate

_MAX_CUTS = 300
"""So many are tried."""
_SHARES = {"F": 0.4, "B": 0.6, "I": 0.4, "W": 0.35}
"""What an action takes of its stage's cost, measured on blocks of a GPT: a split backward takes longer."""


def fastest_partition(costs: Sequence[float], num_stages: int, num_micro_batches: int, schedule: str) -> list[int]:
    """The stage of every part, for the shortest simulated step.

    With few micro-batches, filling and emptying the pipeline counts as much as the slowest stage. Early stages wait for
    their first backward, so they may be slower than late ones.

    It tries all cuts if there are at most 300. Otherwise it descends from the cut whose slowest stage is fastest.

    Args:
        costs: seconds, or other units, of forward and backward of one micro-batch, for each part.
        num_stages: at most as many as parts.
        num_micro_batches: micro-batches of a step.
        schedule: see ``make_table``.

    >>> balanced_cuts([2, 8, 8, 8, 8, 8, 8, 8, 8, 14], 4)
    [0, 0, 0, 1, 1, 2, 2, 2, 3, 3]
    >>> fastest_partition([2, 8, 8, 8, 8, 8, 8, 8, 8, 14], 4, 4, "1f1b")
    [0, 0, 0, 0, 1, 1, 1, 2, 2, 3]
    """
    total = sum(costs) or 1.0

    def price(ends: Sequence[int]) -> tuple[float, float]:
        """The time of a step, rounded to a millionth of the work, and that of its slowest stage."""
        stages = [sum(costs[start:end]) for start, end in itertools.pairwise((0, *ends, len(costs)))]
        return round(step_s(stages, num_micro_batches, schedule) / total, 6), max(stages)

    if math.comb(len(costs) - 1, num_stages - 1) <= _MAX_CUTS:
        best = min(itertools.combinations(range(1, len(costs)), num_stages - 1), key=price)
    else:
        first = balanced_cuts(costs, num_stages)
        best = tuple(first.index(stage) for stage in range(1, num_stages))
        best_price, tried = price(best), 0
        cuts = _beside(best, len(costs))
        while tried < _MAX_CUTS and (cut := next(cuts, None)):
            tried += 1
            if (cut_price := price(cut)) < best_price:
                best, best_price, cuts = cut, cut_price, _beside(cut, len(costs))
    return [sum(end <= part for end in best) for part in range(len(costs))]


def step_s(stages: Sequence[float], num_micro_batches: int, schedule: str) -> float:
    """Seconds of a simulated step, from the seconds of forward and backward of one micro-batch on every stage.

    Once the pipeline is full, each further micro-batch takes as long as on the slowest rank.
    """
    simulated = min(num_micro_batches, 2 * len(stages))
    table = make_table(schedule, len(stages), simulated)
    timeline = simulate(table, len(stages), lambda action: stages[action.stage] * _SHARES[action.kind])
    slowest = max(sum(stages[stage] for stage in {action.stage for action in actions}) for actions in table)
    return timeline.makespan_s + (num_micro_batches - simulated) * slowest


def _beside(ends: tuple[int, ...], num_parts: int) -> Iterator[tuple[int, ...]]:
    """Cuts with one border moved by one part, or two neighbours."""
    for border in range(len(ends)):
        for here, next_one in itertools.product((-1, 0, 1), repeat=2):
            moved = [*ends, num_parts]
            moved[border] += here
            moved[border + 1] += next_one
            if moved[-1] == num_parts and all(start < end for start, end in itertools.pairwise((0, *moved))):
                yield tuple(moved[:-1])
