"""Boxing: changing the layout of a tensor, as a plan that can be printed, priced and executed.

One formulation covers every case. A layout says which region of the logical tensor a rank holds (S, B) or has a term of
(P). A boxing is therefore, for each destination rank, a list of moves: *this slice of that source rank's shard goes
there in my shard, copied or reduced*. Uneven sizes, permuted ranks, grids, overlapping and disjoint placements need no
special cases; they only change the slices.

This module imports neither torch nor a transport; prices come from the ``LinkCost`` of the caller.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from workbench.core.layout import Layout, Shape, balanced_bounds, format_sbp
from workbench.core.moves import Move, moves_from, moves_to, owner
from workbench.core.row_pieces import exchanging_groups
from workbench.core.sbp import Broadcast, Partial, Sbp, Split
from workbench.core.tiling import num_elements, overlap, tiling_of
from workbench.errors import LayoutError
from workbench.units import format_bytes, format_seconds

LOCAL_KINDS = ("none", "slice", "zero-fill", "relabel")
"""Kinds that move nothing between ranks."""
_MAX_NAMED_RANKS = 8
_MAX_COUNTED_MOVES = 100_000
"""With more moves out of copies, the plan assumes that copies share the load evenly."""


@dataclass(frozen=True, slots=True)
class LinkCost:
    """The cost of moving bytes over one transport: a start-up time, and the rate at which a rank sends and receives.

    Attributes:
        latency_s: seconds to start an exchange.
        bandwidth_bytes_per_s: bytes per second that a rank sends, and at the same time receives.
        one_shot_bytes: up to this size, every rank adds all p terms of a sum itself: one start-up, but p - 1 times the
            bytes.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    one_shot_bytes: int = 0

    def time_s(self, size_bytes: float) -> float:
        """Seconds for one message of ``size_bytes``; nothing to move costs nothing."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s if size_bytes else 0.0


@dataclass(frozen=True)
class BoxingPlan:
    """How one logical tensor gets from layout ``source`` to layout ``destination``.

    ``kind`` names the pattern. None, slice, zero-fill and relabel move nothing. An all-reduce is the transport's own
    collective. All-gather, reduce-scatter, all-to-all and send exchange the slices of ``moves_to``.
    """

    source: Layout
    destination: Layout
    shape: Shape
    itemsize: int
    kind: str
    groups: tuple[tuple[int, ...], ...] = field(default=())
    """For an all-reduce: the ranks that sum with one another; each rank is in exactly one group."""
    cost: LinkCost | None = None
    """The link: it determines the number of steps of a sum (two, if None) and the predicted time."""

    @property
    def steps(self) -> tuple[BoxingPlan, ...]:
        """The steps of the boxing: this plan alone."""
        return (self,)

    @cached_property
    def reduction(self) -> str | None:
        """The reduction of slices that arrive at the same place; None where each place gets one slice."""
        return next((entry.reduction for entry in self.source.sbp if isinstance(entry, Partial)), None)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All moves, by destination in placement order; those into one place in source placement order."""
        return tuple(move for rank in self.destination.placement for move in self.moves_to(rank))

    def moves_to(self, rank: int) -> tuple[Move, ...]:
        """The moves to ``rank``, with those from itself, in the order of their combination."""
        return moves_to(self.source, self.destination, self.shape, rank) if rank in self.destination.placement else ()

    def moves_from(self, rank: int) -> tuple[Move, ...]:
        """The moves from ``rank``, with those to itself."""
        return moves_from(self.source, self.destination, self.shape, rank) if rank in self.source.placement else ()

    @property
    def is_local(self) -> bool:
        """Whether the boxing needs no communication."""
        return self.kind in LOCAL_KINDS

    @cached_property
    def bytes_sent(self) -> dict[int, int]:
        """Bytes on the wire by sending rank."""
        if self.kind == "all-reduce":
            return {
                rank: self._summing_bytes(group, place) for group in self.groups for place, rank in enumerate(group)
            }
        if self.is_local and self.source.placement.num_axes == 1:
            return dict.fromkeys(self.source.placement, 0)
        return {rank: elements * self.itemsize for rank, elements in self._sent_elements.items()}

    @cached_property
    def bytes_received(self) -> dict[int, int]:
        """Bytes on the wire by receiving rank."""
        if self.kind == "all-reduce" or self.is_local:
            return dict.fromkeys(self.destination.placement, 0) if self.is_local else self.bytes_sent
        return {rank: self._received_elements(rank) * self.itemsize for rank in self.destination.placement}

    def _summing_bytes(self, group: tuple[int, ...], place: int) -> int:
        """Bytes that a rank sends in a sum: its term to all, or slices of it and then its slice of the sum to all."""
        num_elements = math.prod(self.source.local_shape(self.shape, group[place]))
        if self._is_one_shot(group):
            return (len(group) - 1) * num_elements * self.itemsize
        start, stop = balanced_bounds(num_elements, len(group))[place]
        return (num_elements + (len(group) - 2) * (stop - start)) * self.itemsize

    def _staged_terms(self, group: tuple[int, ...]) -> int:
        num_elements = math.prod(self.source.local_shape(self.shape, group[0]))
        read = num_elements if self._is_one_shot(group) else -(-num_elements // len(group))
        return (num_elements + (len(group) - 1) * read) * self.itemsize if len(group) > 1 else 0

    def _is_one_shot(self, group: tuple[int, ...]) -> bool:
        local = math.prod(self.source.local_shape(self.shape, group[0])) * self.itemsize
        return len(group) <= 2 or (self.cost is not None and local <= self.cost.one_shot_bytes)

    @cached_property
    def _sent_elements(self) -> dict[int, int]:
        """By source rank; out of many copies of a slice, the load of each is taken to be even."""
        source, destination = tiling_of(self.source, self.shape), tiling_of(self.destination, self.shape)
        ranks, copies = self.source.placement, len(source.copies)
        if copies > 1 and ranks.num_ranks // copies * self.destination.placement.num_ranks <= _MAX_COUNTED_MOVES:
            sent = dict.fromkeys(ranks, 0)
            for move in self.moves:
                sent[move.source] += move.num_elements if move.source != move.destination else 0
            return sent
        # Each copy in the destination needs the shard once, except for the part that its holders have.
        kept: dict[tuple[int, int], int] = {}
        for rank in ranks:
            place = source.place(rank)
            kept[place.tile, place.term] = kept.get((place.tile, place.term), 0) + self._kept_elements(rank)
        order = {copy: i for i, copy in enumerate(source.copies)}
        sent = {}
        for rank in ranks:
            place = source.place(rank)
            needed = num_elements(source.region(rank)) * len(destination.copies) - kept[place.tile, place.term]
            sent[rank] = needed // copies + (order[place.copy] < needed % copies)
        return sent

    def _received_elements(self, rank: int) -> int:
        source, destination = tiling_of(self.source, self.shape), tiling_of(self.destination, self.shape)
        if len(destination.terms) > 1:
            return sum(move.num_elements for move in self.moves_to(rank) if move.source != rank)
        return num_elements(destination.region(rank)) * len(source.terms) - self._kept_elements(rank)

    def _kept_elements(self, rank: int) -> int:
        """Elements that a rank of both placements takes from its own shard."""
        if rank not in self.source.placement or rank not in self.destination.placement:
            return 0
        term = tiling_of(self.source, self.shape).place(rank)
        if (
            owner(self.source, self.destination, self.shape, term)
            != tiling_of(self.destination, self.shape).place(rank).term
        ):
            return 0
        return overlap(self.source.region(self.shape, rank), self.destination.region(self.shape, rank))

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes on the wire, summed over the ranks."""
        return sum(self.bytes_sent.values())

    @cached_property
    def peak_temporary_bytes(self) -> int:
        """Largest staging space of any rank: packed slices to send and received slices not yet in place."""
        if self.is_local:
            return 0
        if self.kind == "all-reduce":  # the term that the others read, and theirs: whole, or slices of them
            return max(self._staged_terms(group) for group in self.groups)
        staged = dict.fromkeys({*self.source.placement, *self.destination.placement}, 0)
        for rank in self.source.placement:
            staged[rank] += self._sent_elements[rank] * self.itemsize
        for rank in self.destination.placement:
            staged[rank] += self._received_elements(rank) * self.itemsize
        return max(staged.values())

    @cached_property
    def title(self) -> str:
        """Source, destination and shape on one line: the name of the exchange in messages between ranks."""
        return f"boxing {self.source} -> {self.destination} of {self.shape}"

    def on(self, cost: LinkCost) -> BoxingPlan:
        """The plan for a link."""
        return self if self.cost == cost else replace(self, cost=cost)

    def time_s(self, cost: LinkCost) -> float:
        """Predicted seconds: the busiest rank's bytes, sent or received, over the link's rate, and the start-ups."""
        plan = self.on(cost)
        busiest = max(*plan.bytes_sent.values(), *plan.bytes_received.values(), 0)
        is_two_shot = self.kind == "all-reduce" and not all(map(plan._is_one_shot, plan.groups))
        return cost.time_s(busiest) + (cost.latency_s if busiest and is_two_shot else 0.0)

    def describe(self, max_moves: int = 16) -> str:
        """The plan as text: kind, moves, bytes per rank, temporary bytes, predicted time."""
        lines = [
            f"boxing {self.source} -> {self.destination}",
            f"  {self.kind} of {tuple(self.shape)}, {format_bytes(math.prod(self.shape) * self.itemsize)} logical",
        ]
        lines += [f"  ranks {list(group)} {self._describe_sum(group)}" for group in self.groups]
        if self.kind != "all-reduce":
            # Not all of them: between thousands of ranks there are millions.
            between_ranks = (m for rank in self.destination.placement for m in self.moves_to(rank) if m.source != rank)
            shown = list(itertools.islice(between_ranks, max_moves + 1))
            lines += [f"  {self._describe_move(move)}" for move in shown[:max_moves]]
            lines += ["  ... and more"] * (len(shown) > max_moves)
        lines.append(
            f"  on the wire {format_bytes(self.wire_bytes)}, at most "
            f"{format_bytes(max(self.bytes_sent.values()))} sent by a rank; "
            f"temporary at most {format_bytes(self.peak_temporary_bytes)} on a rank"
        )
        if 1 < len(self.bytes_sent) <= _MAX_NAMED_RANKS and self.wire_bytes:
            lines.append("  sent by " + ", ".join(f"{rank}: {format_bytes(n)}" for rank, n in self.bytes_sent.items()))
        if self.cost is not None:
            lines.append(f"  predicted {format_seconds(self.time_s(self.cost))}")
        return "\n".join(lines)

    def _describe_sum(self, group: tuple[int, ...]) -> str:
        if self._is_one_shot(group):
            return "add up all terms, each by itself"
        return "add up a slice each, then copy the others'"

    def _describe_move(self, move: Move) -> str:
        region = ", ".join(f"{start}:{stop}" for start, stop in move.source_region)
        verb = "adds to" if self.reduction == "sum" else f"{self.reduction} with" if self.reduction else "to"
        return (
            f"{move.source} -> {move.destination}  [{region}] {verb} its shard, "
            f"{format_bytes(move.num_elements * self.itemsize)}"
        )

    __str__ = describe


@lru_cache(maxsize=4096)
def plan_boxing(source: Layout, destination: Layout, shape: Shape, itemsize: int) -> BoxingPlan:
    """The plan that brings a tensor of logical ``shape`` from layout ``source`` to ``destination``.

    >>> p = Placement.of("cpu", [0, 1])
    >>> plan_boxing(Layout.of(p, "S(0)"), Layout.of(p, "B"), (4, 4), itemsize=4).wire_bytes
    64

    Raises:
        LayoutError: terms of two different reductions in one layout, whose order is not defined.
    """
    source, destination = source.normalized(shape), destination.normalized(shape)
    for layout in (source, destination):
        reductions = {entry.reduction for entry in layout.sbp if isinstance(entry, Partial)}
        if len(reductions) > 1:
            raise LayoutError(
                f"layout {layout} mixes the reductions {sorted(reductions)}; sums of maxima and maxima of sums differ. "
                "Use one reduction, and box to B in between."
            )
    kind = _classify(source, destination)
    groups = exchanging_groups(source, destination) if kind == "all-reduce" else ()
    plan = BoxingPlan(source, destination, shape, itemsize, kind, groups)
    # Slices of slices can shift between ranks although each axis by itself only slices: (S(0), S(0)) -> (P, S(0)).
    shifted = plan.is_local and source.placement.num_axes > 1 and plan.wire_bytes > 0
    return replace(plan, kind="exchange") if shifted else plan


def _classify(source: Layout, destination: Layout) -> str:
    if source == destination:
        return "none"
    if source.placement != destination.placement:
        moved = source.placement.device_type == destination.placement.device_type
        identical = moved and source.placement.grid == destination.placement.grid == source.placement.grid[:1]
        return "relabel" if identical and not destination.has_partial else "send"
    if is_all_reduce(source, destination):
        return "all-reduce"
    changes = {(a, b) for a, b in zip(source.sbp, destination.sbp, strict=True) if a != b}
    names = {_classify_axis(a, b) for a, b in changes}
    return "exchange" if len(names) > 1 else names.pop()


def is_all_reduce(source: Layout, destination: Layout) -> bool:
    """Whether every axis stays or goes from P to B, on one placement: what transports have a collective for."""
    if source.placement != destination.placement or source.sbp == destination.sbp:
        return False
    changes = ((a, b) for a, b in zip(source.sbp, destination.sbp, strict=True) if a != b)
    return all(isinstance(a, Partial) and isinstance(b, Broadcast) for a, b in changes)


def _classify_axis(a: Sbp, b: Sbp) -> str:
    if isinstance(a, Broadcast):
        return "slice" if isinstance(b, Split) else "zero-fill"
    if isinstance(a, Split):
        return {Split: "all-to-all", Broadcast: "all-gather", Partial: "zero-fill"}[type(b)]
    return "reduce-scatter" if isinstance(b, Split) else "exchange"


def describe_sbp_change(source: Layout, destination: Layout) -> str:
    """``S(0) -> B`` on one placement, ``B@0,1 -> B@2,3`` between two."""
    if source.placement == destination.placement:
        return f"{format_sbp(source.sbp)} -> {format_sbp(destination.sbp)}"
    names = [
        f"{format_sbp(layout.sbp)}@{','.join(map(str, layout.placement.grid))}" for layout in (source, destination)
    ]
    return " -> ".join(names)


__all__ = [
    "BoxingPlan",
    "LinkCost",
    "Move",
    "describe_sbp_change",
    "is_all_reduce",
    "plan_boxing",
]
