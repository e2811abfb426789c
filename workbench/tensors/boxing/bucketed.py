"""The exchange of many tensors: fused boxings, sums of gradients, and ZeRO's gathers and scatters are one.

Slices of small tensors for the same rank share a message. Each large slice is a message of its own, because joining it
with others would copy it once more.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from workbench.core.boxing import Move
from workbench.core.tiling import num_elements
from workbench.kernels.blocks import slice_region
from workbench.tensors.boxing.exchange import Exchange, Pieces, assemble_many, combine, new_shard, region_shape
from workbench.tensors.global_tensor import new_placeholder
from workbench.transport.base import PeerTensor, Received, do_nothing, pack

BUCKET_BYTES = 25 * 2**20
"""Bytes of the tensors that share one exchange, approximately."""
AT_A_TIME = 2
"""Exchanges of buckets in progress, where nobody asks for more."""
_ALONE_FROM_BYTES = 2**17
"""A slice of this many bytes is a message of its own."""

T = TypeVar("T")
_Part = tuple[int, Move]
"""The number of a tensor, and one of its slices."""
_Results = dict[int, torch.Tensor]
_Wait = Callable[[], _Results]


def cut_into_buckets(
    items: Iterable[T], kind: Callable[[T], Hashable], size: Callable[[T], int], bucket_bytes: float = BUCKET_BYTES
) -> Iterator[list[T]]:
    """Items of one kind, in their order, in buckets that are full at ``bucket_bytes``.

    >>> list(cut_into_buckets([5, 1, 6, 2, 3], kind=lambda n: n % 2, size=lambda n: n, bucket_bytes=6))
    [[5, 1], [3], [6], [2]]
    """
    kinds: dict[Hashable, list[T]] = {}
    for item in items:
        kinds.setdefault(kind(item), []).append(item)
    for members in kinds.values():
        bucket: list[T] = []
        total = 0
        for item in members:
            bucket.append(item)
            total += size(item)
            if total >= bucket_bytes:
                yield bucket
                bucket, total = [], 0
        if bucket:
            yield bucket


def limit_unfinished(starts: Iterable[Callable[[], Callable[[], T]]], at_most: int) -> Callable[[], list[T]]:
    """Start exchanges, in their order and ``at_most`` at a time: more would only need memory. The returned function
    finishes all, and returns their results.
    """
    waiting = iter(starts)
    started = deque(start() for start in itertools.islice(waiting, at_most))

    def finish() -> list[T]:
        found = []
        while started:
            found.append(started.popleft()())
            started.extend(start() for start in itertools.islice(waiting, 1))
        return found

    return finish


class BoxingWork:
    """Boxings of many tensors in progress: begun when this is made, ended by ``finish``.

    Args:
        exchanges: of one world; all ranks that take part in one make the same work.
        locals_: this rank's shards. Do not write to them before ``finish``.
        tag, header: of the messages; the same on all ranks.
        counts_as: the kind of exchange for the count of traffic.
        into: the new shards, if they exist. They hold what this rank's own shard has of them.
        shares_memory: whether several new shards may lie in one memory. Gathered ones may then lie in memory that ranks
            of one host share, and nobody may write to them.
    """

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        locals_: Sequence[torch.Tensor],
        tag: int,
        header: str,
        *,
        counts_as: str = "fused",
        into: Sequence[torch.Tensor] | None = None,
        shares_memory: bool = False,
    ) -> None:
        self.exchanges, self._locals, self._into, self._shares_memory = exchanges, locals_, into, shares_memory
        self.world, self._tag = exchanges[0].world, tag
        self.sent_bytes = sum(exchange.bytes_sent for exchange in exchanges if not exchange.group)
        started = self.world.traffic.now()
        self._waits: list[_Wait] = []
        kinds: dict[Any, list[int]] = {}
        for i, exchange in enumerate(exchanges):
            start, group = self._way_of(exchange)
            kinds.setdefault((start, exchange.dtype, group, exchange.plan.reduction), []).append(i)
        # Messages of one tag match by their order, and some transports end a sum before they return
        for start, dtype, group, reduction in sorted(kinds, key=lambda kind: kind[0] is not BoxingWork._start_sum):
            numbers = kinds[start, dtype, group, reduction]
            name = f"{header}, {str(dtype).removeprefix('torch.')}"
            self._waits.append(start(self, numbers, dtype, group, reduction, name))
        self.world.traffic.add(counts_as, self.sent_bytes, started)

    def finish(self) -> list[torch.Tensor]:
        """Wait for the new shards."""
        started, found = self.world.traffic.now(), _Results()
        for wait in self._waits:
            found |= wait()
        self._waits, self._locals = [], []
        self.world.traffic.end_exchange(started)
        return [found[i] for i in range(len(self.exchanges))]

    def _way_of(self, exchange: Exchange) -> tuple[Any, tuple[int, ...]]:
        """The method that starts an exchange, and the ranks that take part in it as one group."""
        if exchange.group:
            return BoxingWork._start_sum, exchange.group
        if self.world.transport.has_collectives and (exchange.gathered or exchange.scattered):
            start = BoxingWork._start_gather if exchange.gathered else BoxingWork._start_scatter
            return start, tuple(sorted(exchange.gathered or exchange.scattered))
        # Each gathering looks for free memory, and a replay of a recorded step cannot
        if self._shares_memory and self._into is None and self.world.context.recorder is None and exchange.gathered:
            group = tuple(exchange.gathered)
            if self.world.transport.shares_memory(group):
                return BoxingWork._start_shared, group
        return BoxingWork._start_moves, ()

    def _start_sum(
        self, numbers: list[int], dtype: torch.dtype, group: tuple[int, ...], reduction: str, header: str
    ) -> _Wait:
        terms = [self._locals[i] for i in numbers]
        wait = self.world.transport.start_all_reduce(terms, group, reduction, self._tag, header)
        # The terms are cut into equal slices, not each of them
        self.sent_bytes += 2 * (len(group) - 1) * sum(term.nbytes for term in terms) // len(group)

        def finish() -> _Results:
            return self._split(wait(), numbers)

        return finish

    def _split(self, flat: torch.Tensor, numbers: list[int]) -> _Results:
        """New shards that lie one after the other in a flat tensor."""
        shapes = [self.exchanges[i].target.local_shape for i in numbers]
        shards = [
            part.view(shape) for part, shape in zip(flat.split(list(map(math.prod, shapes))), shapes, strict=True)
        ]
        if not self._shares_memory and len(shards) > 1:
            shards = [shard.clone() for shard in shards]
        return dict(zip(numbers, shards, strict=True))

    def _start_gather(
        self, numbers: list[int], dtype: torch.dtype, group: tuple[int, ...], reduction: None, header: str
    ) -> _Wait:
        regions = [self.exchanges[i].gathered for i in numbers]
        sizes = [sum(num_elements(of_rank[rank]) for of_rank in regions) for rank in group]
        wait = self.world.transport.start_all_gather(pack([self._locals[i] for i in numbers]), sizes, group, header)

        def finish() -> _Results:
            shards = {i: self._new_shard(i, dtype) for i in numbers}
            places = [
                slice_region(shard, of_rank[rank])
                for rank in group
                for shard, of_rank in zip(shards.values(), regions, strict=True)
            ]
            parts = wait().split([place.numel() for place in places])
            terms = [[part.view(place.shape)] for part, place in zip(parts, places, strict=True)]
            combine(places, terms, None, self.world.device)
            return shards

        return finish

    def _start_scatter(
        self, numbers: list[int], dtype: torch.dtype, group: tuple[int, ...], reduction: str, header: str
    ) -> _Wait:
        regions = [(self._locals[i], self.exchanges[i].scattered) for i in numbers]
        terms = [pack([slice_region(local, of_rank[rank]) for local, of_rank in regions]) for rank in group]
        wait = self.world.transport.start_reduce_scatter(terms, group, header)
        return lambda: self._split(wait(), numbers)

    def _start_shared(
        self, numbers: list[int], dtype: torch.dtype, group: tuple[int, ...], reduction: None, header: str
    ) -> _Wait:
        shapes = [self.exchanges[i].target.local_shape for i in numbers]
        regions = [self.exchanges[i].gathered[self.world.rank] for i in numbers]
        parts = [self._locals[i].contiguous() for i in numbers]
        start, name = self.world.transport.start_shared_all_gather, f"{header}, in place"
        is_filled, finish_shared = start(group, shapes, regions, parts, self._tag, name)
        if is_filled:
            return lambda: dict(zip(numbers, finish_shared(), strict=True))
        finish = self._start_moves(numbers, dtype, group, reduction, header)
        return lambda: (finish_shared(), finish())[1]

    def _start_moves(
        self, numbers: list[int], dtype: torch.dtype, group: tuple[int, ...], reduction: str | None, header: str
    ) -> _Wait:
        rank, device, transport = self.world.rank, self.world.device, self.world.transport
        outgoing: dict[int, list[_Part]] = {}
        incoming: dict[int, list[_Part]] = {}
        for i in numbers:
            for move in self.exchanges[i].moves_from:
                if move.destination != rank and move.num_elements:
                    outgoing.setdefault(move.destination, []).append((i, move))
            for move in self.exchanges[i].moves_to:
                if move.source != rank and move.num_elements:
                    incoming.setdefault(move.source, []).append((i, move))
        packed: dict[Any, torch.Tensor] = {}  # what several ranks get is packed once
        sends: list[PeerTensor] = []
        for destination, bundle in _bundles(outgoing, dtype):
            key = tuple((i, move.source_region) for i, move in bundle)
            if key not in packed:
                parts = [slice_region(self._locals[i], region) for i, region in key]
                packed[key] = pack(parts) if len(parts) > 1 else parts[0]
            sends.append((destination, packed[key]))
        expected = list(_bundles(incoming, dtype))
        wanted = [(source, _packed_shape(bundle)) for source, bundle in expected]
        receive: Callable[[], Received] = lambda: ([], do_nothing)  # noqa: E731
        if sends or wanted:
            receive = transport.start_exchange_in_place(sends, wanted, dtype, self._tag, header)

        def finish() -> _Results:
            messages, release = receive()
            arrived = {  # one slice of each tensor from each rank
                (i, source): piece
                for (source, bundle), message in zip(expected, messages, strict=True)
                for (i, _), piece in zip(bundle, _unpacked(message, bundle), strict=True)
            }
            shards = {i: self._new_shard(i, dtype) for i in numbers}
            assemble_many([(shard, self._pieces(i, arrived)) for i, shard in shards.items()], reduction, device)
            release()
            return shards

        return finish

    def _new_shard(self, i: int, dtype: torch.dtype) -> torch.Tensor:
        if self._into is not None:
            return self._into[i]
        target = self.exchanges[i].target
        if target.is_placeholder:
            return new_placeholder(target.shape, dtype, self.world.device)
        return new_shard(target, dtype, self.world.device)

    def _pieces(self, i: int, arrived: dict[tuple[int, int], torch.Tensor]) -> Pieces:
        """The slices of a new shard, in the order of their sum."""
        pieces = Pieces()
        for move in self.exchanges[i].moves_to:
            if move.num_elements and move.source != self.world.rank:
                pieces.append((move, arrived[i, move.source]))
            elif move.num_elements and self._into is None:
                pieces.append((move, slice_region(self._locals[i], move.source_region)))
        return pieces


def _bundles(by_rank: dict[int, list[_Part]], dtype: torch.dtype) -> Iterator[tuple[int, list[_Part]]]:
    """The parts that share a message to or from a rank, the same on both ends."""
    for rank, parts in by_rank.items():
        small: list[_Part] = []
        for part in parts:
            if part[1].num_elements * dtype.itemsize >= _ALONE_FROM_BYTES:
                yield rank, [part]
            else:
                small.append(part)
        if small:
            yield rank, small


def _packed_shape(bundle: list[_Part]) -> tuple[int, ...]:
    if len(bundle) == 1:
        return region_shape(bundle[0][1].source_region)
    return (sum(move.num_elements for _, move in bundle),)


def _unpacked(message: torch.Tensor, bundle: list[_Part]) -> list[torch.Tensor]:
    if len(bundle) == 1:
        return [message]
    pieces = message.split([move.num_elements for _, move in bundle])
    return [piece.view(region_shape(move.source_region)) for piece, (_, move) in zip(pieces, bundle, strict=True)]
