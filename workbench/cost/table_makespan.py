"""Seconds of a table of actions, for schedules without a recurrence.

Every stage takes the same time for every micro-batch, so a table is analysed once for all durations: its actions have
*levels*, each above the actions that it waits for, and a level is a few operations on arrays of ranks. In the tables of
a V, more micro-batches repeat the middle part: once that adds the same time to all ranks, the rest is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

import numpy as np

from workbench.core.options import V_SCHEDULES
from workbench.pipeline.schedules import KINDS, make_table
from workbench.pipeline.simulate import running_order

_NEVER = -1.0e300
_FEW = 4
"""So many micro-batches for each rank, at least, are run in a V."""


@dataclass(frozen=True, slots=True)
class _Level:
    """Actions that can run at the same time: their numbers, ranks and durations (stage and kind, numbered), and the
    number of an action of another rank that each waits for.
    """

    actions: np.ndarray
    ranks: np.ndarray
    durations: np.ndarray
    waits_for: np.ndarray


def table_makespan_s(
    schedule: str, num_ranks: int, num_micro_batches: int, by_kind: Mapping[str, np.ndarray], transfer_s: float = 0.0
) -> float:
    """Seconds from the first action's start to the last one's end; arguments as for ``makespan_s``, the seconds of each
    stage by kind of action.

    >>> by_kind = {"F": np.ones(4), "B": 2 * np.ones(4), "I": np.ones(4), "W": np.ones(4)}
    >>> table_makespan_s("zero_bubble_v", 2, 4, by_kind)
    25.0
    """
    num_stages, few = len(by_kind["F"]), _FEW * num_ranks
    durations = np.stack([by_kind[kind] for kind in KINDS], axis=1).reshape(-1)

    def ends(number: int) -> list[np.ndarray]:
        return _ends(schedule, num_stages, number, num_ranks, durations, transfer_s)

    if schedule in V_SCHEDULES and num_micro_batches > few:
        less, more = ends(few - 1), ends(few)
        # the later half has all of the drain, and rounds before it
        steps = np.concatenate([b[-len(a) // 2 :] - a[-len(a) // 2 :] for a, b in zip(less, more, strict=True)])
        if float(np.ptp(steps)) <= 1e-9 * abs(float(steps[0])):
            return float(max(each[-1] for each in more) + (num_micro_batches - few) * steps[0])
    return float(max(each[-1] for each in ends(num_micro_batches)))


def _ends(
    schedule: str, num_stages: int, num_micro_batches: int, num_ranks: int, durations: np.ndarray, transfer_s: float
) -> list[np.ndarray]:
    """When the actions of each rank end."""
    levels, lengths = _analysed(schedule, num_stages, num_micro_batches, num_ranks)
    ended, free = np.full(sum(lengths) + 1, _NEVER), np.zeros(num_ranks)
    for level in levels:
        start = np.maximum(free[level.ranks], ended[level.waits_for] + transfer_s)
        free[level.ranks] = ended[level.actions] = start + durations[level.durations]
    return np.split(ended[:-1], np.cumsum(lengths)[:-1])


@lru_cache(maxsize=128)
def _analysed(
    schedule: str, num_stages: int, num_micro_batches: int, num_ranks: int
) -> tuple[list[_Level], tuple[int, ...]]:
    """The levels of a table, and the number of actions of each rank.

    Actions are numbered rank by rank; the number beyond the last one stands for none.
    """
    table = make_table(schedule, num_stages, num_micro_batches, num_ranks)
    number = {action: index for index, action in enumerate(chain.from_iterable(table))}
    nobody = len(number)
    waits_for, levels, free = [nobody] * nobody, [0] * nobody, [0] * num_ranks
    for rank, action, others in running_order(table, num_stages):
        own = number[action]
        for other in map(number.__getitem__, others):  # there is no second one
            waits_for[own], free[rank] = other, max(free[rank], levels[other] + 1)
        levels[own] = free[rank]
        free[rank] += 1
    ranks = np.repeat(np.arange(num_ranks), [len(actions) for actions in table])
    durations = np.array([action.stage * len(KINDS) + KINDS.index(action.kind) for action in number])
    waited, order = np.array(waits_for), np.argsort(levels, kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(levels))[:-1])
    found = [_Level(group, ranks[group], durations[group], waited[group]) for group in groups]
    return found, tuple(len(actions) for actions in table)
