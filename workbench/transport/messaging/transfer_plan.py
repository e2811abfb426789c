"""One rank's part of an exchange of slices between ranks that read one another's memory, as data.

A plan is made once per boxing and holds sizes and offsets in bytes and strides, so that executing it costs little more
than the copies.
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
from workbench.transport.messaging.strided_copy import StridedCopy, strided_copy

ONE_SHOT_BYTES = 256 * 2**10
"""Up to this size each rank reduces all terms itself, which saves one round of messages."""
WHOLE_SHARD_BYTES = 64 * 2**10
"""A shard up to this size is published whole, in one plain copy, however little of it is read."""
_WHOLE_SHARE = 0.75
"""A larger shard is published whole if peers read at least this share of it."""


class StridedSlice(NamedTuple):
    """The place of a region in a contiguous tensor."""

    shape: Shape
    strides: Shape
    start: int
    """Offset of its first element, in bytes."""
    num_bytes: int
    is_contiguous: bool
    """Whether its elements are consecutive in memory."""


class Read(NamedTuple):
    """A slice of one rank's shard."""

    source: int
    slice: StridedSlice
    shard_bytes: int
    region: Region


class OutputSlice(NamedTuple):
    """A part of the new shard and the slices that are reduced into it, in order; a single slice is copied."""

    slice: StridedSlice
    reads: tuple[Read, ...]


class Write(NamedTuple):
    """A slice of this rank's shard and its place in a new shard; ``copy`` is None where its runs are short."""

    source: StridedSlice
    destination: StridedSlice
    copy: StridedCopy | None


class PutTarget(NamedTuple):
    """What this rank writes into the new shard of one rank."""

    rank: int
    shard_bytes: int
    writes: tuple[Write, ...]


_Arriving = tuple[Region, tuple[Read, ...]]


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """One rank's part of an exchange.

    Attributes:
        sends: the parts of this rank's shard that other ranks read, as (rank, region, bytes).
        shard_bytes: bytes of this rank's shard.
        publishes_whole: whether a shard that must be copied for its readers is copied whole.
        may_read_in_place: whether peers may read the shard where it lies. This rank then waits for all readers, so
            each reader must be a rank that it waits for anyway.
        puts: whether every rank writes into its peers' new shards instead of publishing its own shard.
        put_targets: what this rank writes in that case, its own new shard first.
        writers: the other ranks that write into this rank's new shard.
        outputs: the parts of the new shard; together they fill it.
        out_shape, out_bytes: shape and size of the new shard; the shape is None on a rank that only sends.
        read_bytes: bytes of other ranks' data that this rank reads.
        concat_dim, concat_order: the dim along which the outputs are concatenated, and their order; the dim is None
            where the outputs are no plain concatenation.
        interleaves: whether each of these slices is contiguous in its source and none is in the new shard.
    """

    dtype: torch.dtype
    reduction: str | None
    sends: tuple[tuple[int, Region, int], ...]
    shard_bytes: int
    publishes_whole: bool
    may_read_in_place: bool
    puts: bool
    put_targets: tuple[PutTarget, ...]
    writers: tuple[int, ...]
    outputs: tuple[OutputSlice, ...]
    out_shape: Shape | None
    out_bytes: int
    read_bytes: int
    concat_dim: int | None
    concat_order: tuple[int, ...]
    interleaves: bool

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a buffer for the shard, in whole cache lines."""
        return -(-self.shard_bytes // 64) * 64


def plan_transfer(plan: BoxingPlan, rank: int, dtype: torch.dtype) -> TransferPlan:
    """The part of ``rank`` in ``plan``, whose destination is not a partial sum."""
    if plan.kind == "all-reduce":
        return _sum_in_group(plan, rank, dtype)
    sends, arriving = plan.moves_from(rank), plan.moves_to(rank)
    return _make_plan(plan, rank, dtype, sends, arriving)


def _sum_in_group(plan: BoxingPlan, rank: int, dtype: torch.dtype) -> TransferPlan:
    """Every rank reads the whole terms of its peers."""
    group = next(group for group in plan.groups if rank in group)
    whole = tuple((0, size) for size in plan.source.local_shape(plan.shape, rank))
    if math.prod(size for _, size in whole) == 0:
        group = ()
    sends = [Move(rank, peer, whole, whole) for peer in group]
    return _make_plan(plan, rank, dtype, sends, [Move(peer, rank, whole, whole) for peer in group])


def _make_plan(
    plan: BoxingPlan, rank: int, dtype: torch.dtype, sends: Sequence[Move], arriving: Sequence[Move]
) -> TransferPlan:
    size, source, destination = dtype.itemsize, plan.source, plan.destination
    receives = rank in destination.placement
    out_shape = destination.local_shape(plan.shape, rank) if receives else None
    outputs: dict[Region, list[Read]] = {}
    for move in arriving:
        shard = source.local_shape(plan.shape, move.source)
        part = _slice_in(move.source_region, shard, size)
        read = Read(move.source, part, math.prod(shard) * size, move.source_region)
        outputs.setdefault(move.destination_region, []).append(read)
    outgoing = [move for move in sends if move.destination != rank]
    shard_bytes = math.prod(source.local_shape(plan.shape, rank)) * size if rank in source.placement else 0
    regions = {move.source_region: move.num_elements * size for move in outgoing}
    is_read_by, reads_from = {move.destination for move in outgoing}, {move.source for move in arriving}
    # The ranks of one placement run their exchanges in the same order; those of two placements do not.
    puts = _uses_put(plan)
    is_mutual = set(source.placement) == set(destination.placement) and is_read_by <= reads_from
    ordered = _in_order_of_reading(rank, [(region, tuple(reads)) for region, reads in outputs.items()])
    concat_dim, concat_order = _concat_order(ordered, out_shape or ())
    output_slices = tuple(OutputSlice(_slice_in(region, out_shape or (), size), reads) for region, reads in ordered)
    return TransferPlan(
        dtype=dtype,
        reduction=plan.reduction,
        sends=tuple((move.destination, move.source_region, move.num_elements * size) for move in outgoing),
        shard_bytes=shard_bytes,
        publishes_whole=shard_bytes <= WHOLE_SHARD_BYTES or sum(regions.values()) >= _WHOLE_SHARE * shard_bytes,
        may_read_in_place=is_mutual,
        puts=puts,
        put_targets=_put_targets(plan, rank, size, sends) if puts else (),
        writers=tuple(sorted(reads_from - {rank}, key=lambda writer: (writer < rank, writer))),
        outputs=output_slices,
        out_shape=out_shape,
        out_bytes=math.prod(out_shape) * size if out_shape is not None else 0,
        read_bytes=sum(r.slice.num_bytes for reads in outputs.values() for r in reads if r.source != rank),
        concat_dim=concat_dim,
        concat_order=concat_order,
        interleaves=concat_dim is not None
        and all(output.reads[0].slice.is_contiguous and not output.slice.is_contiguous for output in output_slices),
    )


def _uses_put(plan: BoxingPlan) -> bool:
    """Whether the boxing turns rows into another layout on the same ranks; every rank decides the same.

    A slice of rows is contiguous in any new shard. Small shards are published: a copy costs less than a wait.
    """
    ranks = set(plan.source.placement)
    return (
        plan.reduction is None
        and ranks == set(plan.destination.placement)
        and all(entry.dim == 0 for entry in plan.source.sbp if isinstance(entry, Split))
        and math.prod(plan.shape) * plan.itemsize > WHOLE_SHARD_BYTES * len(ranks)
    )


def _put_targets(plan: BoxingPlan, rank: int, size: int, sends: Sequence[Move]) -> tuple[PutTarget, ...]:
    """This rank's own slices come first; then each rank starts with another peer."""
    shard = plan.source.local_shape(plan.shape, rank)
    found = []
    for target in sorted({move.destination for move in sends}, key=lambda target: (target < rank, target)):
        new = plan.destination.local_shape(plan.shape, target)
        parts = [
            (_slice_in(move.source_region, shard, size), _slice_in(move.destination_region, new, size))
            for move in sends
            if move.destination == target
        ]
        writes = tuple(
            Write(*part, strided_copy(part[1].shape, part[0].strides, part[1].strides, size)) for part in parts
        )
        found.append(PutTarget(target, math.prod(new) * size, writes))
    return tuple(found)


def _in_order_of_reading(rank: int, outputs: list[_Arriving]) -> list[_Arriving]:
    """This rank's own slices come first, while messages arrive; then each rank starts with another peer."""
    if any(len(reads) > 1 for _, reads in outputs):
        return outputs
    return sorted(outputs, key=lambda output: (output[1][0].source < rank, output[1][0].source))


def _concat_order(outputs: list[_Arriving], shape: Shape) -> tuple[int | None, tuple[int, ...]]:
    """The dim along which all outputs are concatenated, and their order along it."""
    if len(outputs) < 2 or any(len(reads) > 1 for _, reads in outputs):
        return None, ()
    cut = [dim for dim, size in enumerate(shape) if any(region[dim] != (0, size) for region, _ in outputs)]
    if len(cut) != 1:
        return None, ()
    return cut[0], tuple(sorted(range(len(outputs)), key=lambda index: outputs[index][0][cut[0]]))


def _slice_in(region: Region, shape: Shape, itemsize: int) -> StridedSlice:
    strides, step = [0] * len(shape), itemsize
    start, is_contiguous, seen_partial = 0, True, False
    for dim in reversed(range(len(shape))):
        low, high = region[dim]
        strides[dim] = step
        start += low * step
        step *= shape[dim]
        if seen_partial and high - low > 1:
            is_contiguous = False
        seen_partial = seen_partial or high - low != shape[dim]
    sizes = tuple(high - low for low, high in region)
    elements = tuple(stride // itemsize for stride in strides)
    return StridedSlice(sizes, elements, start, math.prod(sizes) * itemsize, is_contiguous)
