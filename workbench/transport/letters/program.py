"""What one rank does in an exchange of slices between ranks that can read one another's memory: data, made once.

Sizes and places are worked out when the program is made, in bytes and strides, so that running it is little more than
the copies themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from workbench.core.boxing import BoxingPlan, Move
from workbench.core.layout import Region, Shape
from workbench.core.sbp import Split
from workbench.transport.letters.runs import Runs, runs_of

ONE_STEP_BYTES = 256 * 2**10
"""Up to this size every rank adds up all terms of a sum itself, which saves a meeting."""
WHOLE_BYTES = 64 * 2**10
"""Shards up to this size are offered whole, one plain copy, however little of them is read."""
_WHOLE_SHARE = 0.75
"""A larger shard is offered whole if at least this share of it is read."""


class Part(NamedTuple):
    """Where a region lies in a contiguous tensor."""

    shape: Shape
    strides: Shape
    start: int
    """Bytes before its first element."""
    num_bytes: int
    is_run: bool
    """Whether its elements lie one behind the other."""


class Read(NamedTuple):
    """A slice of one rank's shard."""

    source: int
    part: Part
    shard_bytes: int
    region: Region


class Place(NamedTuple):
    """A part of the new shard, and the slices that are combined there, in order; one is copied."""

    part: Part
    reads: tuple[Read, ...]


class Write(NamedTuple):
    """A slice of this rank's shard and its place in a new shard; its runs, unless they are short."""

    source: Part
    goal: Part
    runs: Runs | None


class Target(NamedTuple):
    """What this rank writes into the new shard of one rank."""

    rank: int
    shard_bytes: int
    writes: tuple[Write, ...]


_Arriving = tuple[Region, tuple[Read, ...]]


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's part of an exchange; ``header`` names the call in messages.

    Attributes:
        sends: which part of this rank's shard every rank reads, as (rank, region, bytes).
        shard_bytes: bytes of this rank's shard.
        offers_whole: whether the shard is offered in one piece where it has to be copied to be read.
        may_lend: whether readers may read the shard where it lies: this rank then waits until they have, so each rank
            that reads from it must be one that it waits for anyway.
        pushes: whether all ranks write into one another's new shards, and no shard is offered.
        targets: what this rank writes then, its own new shard first.
        writers: the other ranks that write into its new shard.
        places: what the new shard is made of; together they fill it.
        out_shape, out_bytes: of the new shard; None on a rank that only sends.
        read_bytes: what this rank reads of others.
        joined_dim, joined_order: the dim along which the places, each of one slice, lie side by side, and in which
            order; None where they do not.
        interleaves: whether each of these slices is a run at its source and none in the new shard.
    """

    dtype: torch.dtype
    reduction: str | None
    header: str
    sends: tuple[tuple[int, Region, int], ...]
    shard_bytes: int
    offers_whole: bool
    may_lend: bool
    pushes: bool
    targets: tuple[Target, ...]
    writers: tuple[int, ...]
    places: tuple[Place, ...]
    out_shape: Shape | None
    out_bytes: int
    read_bytes: int
    joined_dim: int | None
    joined_order: tuple[int, ...]
    interleaves: bool

    @property
    def buffer_bytes(self) -> int:
        """Room for the shard, in whole cache lines."""
        return -(-self.shard_bytes // 64) * 64


def program_of(plan: BoxingPlan, rank: int, dtype: torch.dtype, header: str) -> Program:
    """What ``rank`` does in ``plan``, whose destination holds no terms of sums."""
    if plan.kind == "all-reduce":
        return _sum_in_group(plan, rank, dtype, header)
    sends, arriving = plan.moves_from(rank), plan.moves_to(rank)
    return _program(plan, rank, dtype, header, sends, arriving)


def _sum_in_group(plan: BoxingPlan, rank: int, dtype: torch.dtype, header: str) -> Program:
    """Every rank reads the others' terms whole."""
    group = next(group for group in plan.groups if rank in group)
    whole = tuple((0, size) for size in plan.source.local_shape(plan.shape, rank))
    if math.prod(size for _, size in whole) == 0:
        group = ()
    sends = [Move(rank, peer, whole, whole) for peer in group]
    return _program(plan, rank, dtype, header, sends, [Move(peer, rank, whole, whole) for peer in group])


def _program(
    plan: BoxingPlan, rank: int, dtype: torch.dtype, header: str, sends: Sequence[Move], arriving: Sequence[Move]
) -> Program:
    size, source, destination = dtype.itemsize, plan.source, plan.destination
    receives = rank in destination.placement
    out_shape = destination.local_shape(plan.shape, rank) if receives else None
    places: dict[Region, list[Read]] = {}
    for move in arriving:
        shard = source.local_shape(plan.shape, move.source)
        part = _part(move.source_region, shard, size)
        read = Read(move.source, part, math.prod(shard) * size, move.source_region)
        places.setdefault(move.destination_region, []).append(read)
    crossing = [move for move in sends if move.destination != rank]
    shard_bytes = math.prod(source.local_shape(plan.shape, rank)) * size if rank in source.placement else 0
    regions = {move.source_region: move.num_elements * size for move in crossing}
    is_read_by, reads_from = {move.destination for move in crossing}, {move.source for move in arriving}
    # In one placement all ranks go through their exchanges in the same order; between two, they do not.
    pushes = _pushes(plan)
    is_mutual = set(source.placement) == set(destination.placement) and is_read_by <= reads_from
    ordered = _in_order_of_reading(rank, [(region, tuple(reads)) for region, reads in places.items()])
    joined_dim, joined_order = _joining(ordered, out_shape or ())
    placed = tuple(Place(_part(region, out_shape or (), size), reads) for region, reads in ordered)
    return Program(
        dtype=dtype,
        reduction=plan.reduction,
        header=header,
        sends=tuple((move.destination, move.source_region, move.num_elements * size) for move in crossing),
        shard_bytes=shard_bytes,
        offers_whole=shard_bytes <= WHOLE_BYTES or sum(regions.values()) >= _WHOLE_SHARE * shard_bytes,
        may_lend=is_mutual,
        pushes=pushes,
        targets=_targets(plan, rank, size, sends) if pushes else (),
        writers=tuple(sorted(reads_from - {rank}, key=lambda writer: (writer < rank, writer))),
        places=placed,
        out_shape=out_shape,
        out_bytes=math.prod(out_shape) * size if out_shape is not None else 0,
        read_bytes=sum(r.part.num_bytes for reads in places.values() for r in reads if r.source != rank),
        joined_dim=joined_dim,
        joined_order=joined_order,
        interleaves=joined_dim is not None
        and all(place.reads[0].part.is_run and not place.part.is_run for place in placed),
    )


def _pushes(plan: BoxingPlan) -> bool:
    """Whether the boxing goes from rows to another layout on the same ranks, which all decide alike.

    A slice of rows is one run in any new shard. Small shards are offered: to copy one costs less than to wait.
    """
    ranks = set(plan.source.placement)
    return (
        plan.reduction is None
        and ranks == set(plan.destination.placement)
        and all(entry.dim == 0 for entry in plan.source.sbp if isinstance(entry, Split))
        and math.prod(plan.shape) * plan.itemsize > WHOLE_BYTES * len(ranks)
    )


def _targets(plan: BoxingPlan, rank: int, size: int, sends: Sequence[Move]) -> tuple[Target, ...]:
    """Own slices first, then not all to the same rank."""
    shard = plan.source.local_shape(plan.shape, rank)
    found = []
    for target in sorted({move.destination for move in sends}, key=lambda target: (target < rank, target)):
        new = plan.destination.local_shape(plan.shape, target)
        parts = [
            (_part(move.source_region, shard, size), _part(move.destination_region, new, size))
            for move in sends
            if move.destination == target
        ]
        writes = tuple(Write(*part, runs_of(part[1].shape, part[0].strides, part[1].strides, size)) for part in parts)
        found.append(Target(target, math.prod(new) * size, writes))
    return tuple(found)


def _in_order_of_reading(rank: int, places: list[_Arriving]) -> list[_Arriving]:
    """Copies begin with what this rank has itself, while the others' letters come; then not all at the same rank."""
    if any(len(reads) > 1 for _, reads in places):
        return places
    return sorted(places, key=lambda place: (place[1][0].source < rank, place[1][0].source))


def _joining(places: list[_Arriving], shape: Shape) -> tuple[int | None, tuple[int, ...]]:
    """The dim along which all places lie side by side, and their order along it."""
    if len(places) < 2 or any(len(reads) > 1 for _, reads in places):
        return None, ()
    cut = [dim for dim, size in enumerate(shape) if any(region[dim] != (0, size) for region, _ in places)]
    if len(cut) != 1:
        return None, ()
    return cut[0], tuple(sorted(range(len(places)), key=lambda index: places[index][0][cut[0]]))


def _part(region: Region, shape: Shape, itemsize: int) -> Part:
    strides, step = [0] * len(shape), itemsize
    start, is_run, seen_partial = 0, True, False
    for dim in reversed(range(len(shape))):
        low, high = region[dim]
        strides[dim] = step
        start += low * step
        step *= shape[dim]
        if seen_partial and high - low > 1:
            is_run = False
        seen_partial = seen_partial or high - low != shape[dim]
    sizes = tuple(high - low for low, high in region)
    elements = tuple(stride // itemsize for stride in strides)
    return Part(sizes, elements, start, math.prod(sizes) * itemsize, is_run)
