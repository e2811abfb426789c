"""Boxings between numbers that stand for ranks: several stages on a rank have a number each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.core.boxing import BoxingPlan
from workbench.core.layout import Layout
from workbench.core.placement import Placement

RankOf = Sequence[int] | None
"""The rank that each number stands for; None: numbers are ranks."""


def sent_by_number(plan: Any, rank_of: RankOf) -> Mapping[int, int]:
    """Bytes on the wire by the number that sends them; between two numbers of one rank there are none.

    ``plan`` is a boxing plan, a path of several, or an account of moved rows, which stay within a stage.
    """
    found = dict(plan.bytes_sent)
    for step in getattr(plan, "steps", ()) if rank_of is not None else ():
        for number in step.bytes_sent:
            found[number] -= bytes_within_rank(step, number, rank_of)
    return found


def bytes_within_rank(plan: BoxingPlan, number: int, rank_of: RankOf) -> int:
    """Bytes that a number hands to others of its rank."""
    if rank_of is None or plan.kind != "send":
        return 0
    moves = (move for move in plan.moves_from(number) if move.destination != number)
    return plan.itemsize * sum(m.num_elements for m in moves if rank_of[m.destination] == rank_of[number])


def on_ranks(layout: Layout, rank_of: RankOf) -> Layout:
    """A layout in terms of ranks; all stages of all ranks become all ranks, once each."""
    if rank_of is None:
        return layout
    placement = layout.placement
    grid = tuple(rank_of[number] for number in placement.grid)
    if len(set(grid)) < len(grid):
        return Layout.of(Placement.of(placement.device_type, sorted(set(grid))), "B")
    return Layout(Placement(placement.device_type, grid, placement.shape), layout.sbp)
