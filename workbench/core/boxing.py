"""Boxing: changing the layout of a tensor, as a plan that can be printed, priced and executed.

One formulation covers every case. A layout says which region of the logical tensor a rank holds (S, B) or contributes
a term to (P). A boxing is therefore, for each destination rank, a list of moves: *this slice of that source rank's
shard goes there in my shard, copied or reduced*. Uneven sizes, permuted ranks, hierarchies, overlapping and disjoint
placements are no cases of it; they are only other slices.

Nothing here knows torch or a network: prices come from a ``LinkCost`` that is passed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from workbench.core.layout import Layout, Region, Shape, format_sbp
from workbench.core.sbp import Broadcast, Partial, Sbp, Split
from workbench.errors import LayoutError
from workbench.units import format_bytes, format_seconds

LOCAL_KINDS = ("none", "slice", "zero-fill", "relabel")
"""Kinds that move nothing between ranks."""


@dataclass(frozen=True, slots=True)
class Move:
    """One slice from one rank's shard to another's; regions count from the start of the shard."""

    source: int
    destination: int
    source_region: Region
    destination_region: Region

    @property
    def num_elements(self) -> int:
        """How many elements the slice has."""
        return math.prod(stop - start for start, stop in self.source_region)


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What moving bytes costs on one transport: a start-up time and a rate per rank."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def time_s(self, size_bytes: float) -> float:
        """Seconds for one message of ``size_bytes``; nothing to move costs nothing."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s if size_bytes else 0.0


@dataclass(frozen=True)
class BoxingPlan:
    """How one logical tensor gets from layout ``source`` to layout ``destination``.

    ``kind`` names the pattern: none, slice, zero-fill and relabel move nothing; all-reduce runs as the transport's own
    collective; all-gather, reduce-scatter, all-to-all and send are exchanges of the slices in ``moves_to``.
    """

    source: Layout
    destination: Layout
    shape: Shape
    itemsize: int
    kind: str
    groups: tuple[tuple[int, ...], ...] = field(default=())
    """For an all-reduce: the ranks that sum with one another; each rank is in exactly one group."""

    @cached_property
    def reduction(self) -> str | None:
        """How slices that arrive at the same place are combined, or None where each place gets one slice."""
        return next((entry.reduction for entry in self.source.sbp if isinstance(entry, Partial)), None)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All moves, by destination in placement order; those into one place in source placement order."""
        return tuple(move for rank in self.destination.placement for move in self.moves_to(rank))

    def moves_to(self, rank: int) -> tuple[Move, ...]:
        """What ``rank`` receives (its own slices included), in the order in which it is to be combined."""
        return _moves_to(self.source, self.destination, self.shape, rank) if rank in self.destination.placement else ()

    def moves_from(self, rank: int) -> tuple[Move, ...]:
        """What ``rank`` sends (its own slices included)."""
        return self._moves_by_source.get(rank, ())

    @cached_property
    def _moves_by_source(self) -> dict[int, tuple[Move, ...]]:
        by_source: dict[int, list[Move]] = {}
        for move in self.moves:
            by_source.setdefault(move.source, []).append(move)
        return {rank: tuple(moves) for rank, moves in by_source.items()}

    @property
    def is_local(self) -> bool:
        """Whether no rank needs another one."""
        return self.kind in LOCAL_KINDS

    @cached_property
    def bytes_sent(self) -> dict[int, int]:
        """Bytes on the wire by sending rank; a ring all-reduce sends ``2 (p - 1) / p`` of the tensor per rank."""
        if self.kind == "all-reduce":
            return {
                rank: 2 * (len(group) - 1) * self._local_bytes(self.source, rank) // len(group)
                for group in self.groups
                for rank in group
            }
        sent = dict.fromkeys(self.source.placement, 0)
        for move in self.moves:
            if move.source != move.destination:
                sent[move.source] += move.num_elements * self.itemsize
        return sent

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes on the wire, summed over the ranks."""
        return sum(self.bytes_sent.values())

    @cached_property
    def peak_temporary_bytes(self) -> int:
        """Largest staging space of any rank: packed slices to send and received slices not yet in place."""
        if self.kind == "all-reduce" or self.is_local:
            return 0
        staged = dict.fromkeys({*self.source.placement, *self.destination.placement}, 0)
        for move in self.moves:
            if move.source != move.destination:
                staged[move.source] += move.num_elements * self.itemsize
                staged[move.destination] += move.num_elements * self.itemsize
        return max(staged.values())

    def time_s(self, cost: LinkCost) -> float:
        """Predicted seconds: the busiest rank's bytes over the link's rate, and one start-up."""
        return cost.time_s(max(self.bytes_sent.values(), default=0))

    def _local_bytes(self, layout: Layout, rank: int) -> int:
        return math.prod(layout.local_shape(self.shape, rank)) * self.itemsize

    def describe(self, cost: LinkCost | None = None, max_moves: int = 16) -> str:
        """The plan for people: kind, who sends what to whom, bytes per rank, temporary bytes, predicted time."""
        lines = [
            f"boxing {self.source} -> {self.destination}",
            f"  {self.kind} of {tuple(self.shape)}, {format_bytes(math.prod(self.shape) * self.itemsize)} logical",
        ]
        lines += [f"  ranks {list(group)} sum in place" for group in self.groups]
        crossing = [] if self.kind == "all-reduce" else [move for move in self.moves if move.source != move.destination]
        lines += [f"  {self._describe_move(move)}" for move in crossing[:max_moves]]
        if len(crossing) > max_moves:
            lines.append(f"  ... and {len(crossing) - max_moves} more")
        lines.append(
            f"  on the wire {format_bytes(self.wire_bytes)}, at most "
            f"{format_bytes(max(self.bytes_sent.values()))} sent by a rank; "
            f"temporary at most {format_bytes(self.peak_temporary_bytes)} on a rank"
        )
        if cost is not None:
            lines.append(f"  predicted {format_seconds(self.time_s(cost))}")
        return "\n".join(lines)

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
        LayoutError: terms of two different reductions in one layout, whose order nobody defined.
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
    groups = _reduce_groups(source, destination) if kind == "all-reduce" else ()
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
    changes = {(a, b) for a, b in zip(source.sbp, destination.sbp, strict=True) if a != b}
    if all(isinstance(a, Partial) and isinstance(b, Broadcast) for a, b in changes):
        return "all-reduce"
    names = {_classify_axis(a, b) for a, b in changes}
    return "exchange" if len(names) > 1 else names.pop()


def _classify_axis(a: Sbp, b: Sbp) -> str:
    if isinstance(a, Broadcast):
        return "slice" if isinstance(b, Split) else "zero-fill"
    if isinstance(a, Split):
        return {Split: "all-to-all", Broadcast: "all-gather", Partial: "zero-fill"}[type(b)]
    return "reduce-scatter" if isinstance(b, Split) else "exchange"


def _reduce_groups(source: Layout, destination: Layout) -> tuple[tuple[int, ...], ...]:
    """Ranks that share all coordinates but those of the axes that are summed."""
    summed = [axis for axis, (a, b) in enumerate(zip(source.sbp, destination.sbp, strict=True)) if a != b]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in source.placement:
        coordinates = source.placement.coordinates(rank)
        kept = tuple(c for axis, c in enumerate(coordinates) if axis not in summed)
        groups.setdefault(kept, []).append(rank)
    return tuple(tuple(group) for group in groups.values())


Tile = tuple[tuple[int, ...], Region, tuple[int, ...]]
"""Coordinates on the partial axes, the region, and the ranks that hold a copy of this term of this region."""


@lru_cache(maxsize=4096)
def _tiles(layout: Layout, shape: Shape) -> tuple[Tile, ...]:
    """Every distinct (term, region) of a layout with the ranks that hold it, in placement order."""
    tiles: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    placement = layout.placement
    for rank in placement:
        coordinates = placement.coordinates(rank)
        by_kind = [
            tuple(c for c, e in zip(coordinates, layout.sbp, strict=True) if isinstance(e, k)) for k in (Partial, Split)
        ]
        tiles.setdefault((by_kind[0], by_kind[1]), []).append(rank)
    return tuple((term, layout.region(shape, ranks[0]), tuple(ranks)) for (term, _), ranks in tiles.items())


def _partial_owner(
    source: Layout, destination: Layout, ranks: tuple[int, ...], term: tuple[int, ...]
) -> tuple[int, ...]:
    """Coordinates on the destination's partial axes of the one rank (per replica) that gets this term.

    The others start from the reduction's identity. A term stays where it is if its first holder is in the destination,
    so that P -> P, S -> P and B -> P move nothing. Terms of one reduction must be complete before they enter another.
    """
    axes = [axis for axis, entry in enumerate(destination.sbp) if isinstance(entry, Partial)]
    kinds = {entry.reduction for layout in (source, destination) for entry in layout.sbp if isinstance(entry, Partial)}
    home = ranks[0] if len(kinds) == 1 or not term else source.placement.grid[0]
    if home not in destination.placement:
        return (0,) * len(axes)
    coordinates = destination.placement.coordinates(home)
    return tuple(coordinates[axis] for axis in axes)


@lru_cache(maxsize=16384)
def _moves_to(source: Layout, destination: Layout, shape: Shape, rank: int) -> tuple[Move, ...]:
    target = destination.region(shape, rank)
    index = destination.placement.grid.index(rank)
    coordinates = destination.placement.coordinates(rank)
    mine = tuple(c for c, e in zip(coordinates, destination.sbp, strict=True) if isinstance(e, Partial))
    moves = []
    for term, region, holders in _tiles(source, shape):
        if _partial_owner(source, destination, holders, term) != mine:
            continue
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(region, target, strict=True))
        if any(start >= stop for start, stop in common):
            continue
        holder = rank if rank in holders else holders[index % len(holders)]
        moves.append(Move(holder, rank, _relative(common, region), _relative(common, target)))
    return tuple(moves)


def _relative(region: Region, origin: Region) -> Region:
    return tuple((start - base, stop - base) for (start, stop), (base, _) in zip(region, origin, strict=True))


def classic_wire_bytes(source: Sbp, destination: Sbp, logical_bytes: int, num_ranks: int) -> float:
    """Bytes on the wire of a boxing on one axis of one placement, summed over the ranks; the table of the classics.

    S -> S' (p-1)/p |T|; S -> B and P -> S (p-1) |T|; P -> B 2 (p-1) |T|; everything else nothing.
    """
    if source == destination or isinstance(source, Broadcast) or isinstance(destination, Partial):
        return 0.0
    if isinstance(source, Split):
        return (num_ranks - 1) * logical_bytes * (1 / num_ranks if isinstance(destination, Split) else 1)
    return (num_ranks - 1) * logical_bytes * (2 if isinstance(destination, Broadcast) else 1)


def describe_sbp_change(source: Layout, destination: Layout) -> str:
    """``S(0) -> B`` on one placement, ``B@0,1 -> B@2,3`` between two."""
    if source.placement == destination.placement:
        return f"{format_sbp(source.sbp)} -> {format_sbp(destination.sbp)}"
    names = [
        f"{format_sbp(layout.sbp)}@{','.join(map(str, layout.placement.grid))}" for layout in (source, destination)
    ]
    return " -> ".join(names)


__all__ = ["BoxingPlan", "LinkCost", "Move", "classic_wire_bytes", "describe_sbp_change", "plan_boxing"]
