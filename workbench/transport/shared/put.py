"""Run one rank's part of an exchange by put: each rank announces its new shard, and its peers write into it.

No shard is copied only to be sent, wherever it lies. A rank waits for two messages of every peer: the place of the
peer's new shard, and the notice that the peer has written.

A large copy leaves the caches full of data, so the Python code after it runs several times slower. Everything besides
the copies is therefore prepared once and kept: when a boxing repeats in the same places, the rank compares messages
instead of parsing them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from workbench.core.layout import balanced_bounds
from workbench.transport.messaging.endpoint import Endpoint
from workbench.transport.messaging.link import TAG, TAG_BYTES, Block, Message, message_place, pack_without_ack
from workbench.transport.messaging.shared_memory import SharedMemory
from workbench.transport.messaging.strided_copy import copy_views
from workbench.transport.messaging.transfer_plan import TransferPlan, Write
from workbench.transport.shared.segment import Segment, is_byte_copyable

BLOCK_BYTES = 512 * 2**10
"""Each block of the shard goes to all ranks before the next block, so that the cache lines read for one rank serve the
others too."""
_MAX_PREPARED = 64
_Views = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""The runs of a slice in this rank's shard and in the new shard."""


class PutCache:
    """The prepared puts of one rank, by plan."""

    def __init__(self, segment: Segment, endpoint: Endpoint) -> None:
        self._segment, self._endpoint = segment, endpoint
        self._prepared: dict[TransferPlan, Put] = {}

    def of(self, plan: TransferPlan) -> Put:
        """The prepared put of a plan."""
        found = self._prepared.get(plan)
        if found is None:
            if len(self._prepared) == _MAX_PREPARED:
                self._prepared.clear()
            found = self._prepared[plan] = Put(plan, self._segment, self._endpoint)
        return found


class Put:
    """One boxing with the last messages of its ranks and the views of the places that they name."""

    def __init__(self, plan: TransferPlan, segment: Segment, endpoint: Endpoint) -> None:
        self.plan, self._segment, self._endpoint = plan, segment, endpoint
        links = endpoint.links
        self._writers = [links[rank] for rank in plan.writers]
        self._targets = [(links[target.rank], target) for target in plan.put_targets if target.rank != endpoint.rank]
        partners = [*plan.writers, *(target.rank for _, target in self._targets)]
        self._partners = [links[rank] for rank in dict.fromkeys(partners)]
        self._header, self._written = b"", b""
        self._destination, self._location = b"", (-1, -1)
        self._last_places: list[bytes | None] = [None] * len(self._targets)
        self._destinations: list[Message | None] = [None] * len(self._targets)
        self._source, self._views = 0, list[_Views]()
        self._short: list[tuple[Write, torch.Tensor]] = []

    def run(self, local: torch.Tensor, tag: int, header: bytes) -> torch.Tensor:
        """Return the new shard."""
        plan, segment, endpoint = self.plan, self._segment, self._endpoint
        assert plan.out_shape is not None
        if header != self._header:
            self._header, self._destination = header, b""
            self._written = pack_without_ack(0, 0, 0, 0, header)[TAG_BYTES:]
        tensor_block = segment.allocate_for_tensor(plan.out_bytes)
        # If the segment has no space for the new shard, peers write into a message block.
        block = segment.allocate(plan.out_bytes, self._header) if tensor_block is None else tensor_block
        self._send_destination(block, TAG.pack(tag | 1))
        shard = local if is_byte_copyable(local) else local.detach().resolve_conj().resolve_neg().contiguous()
        self._write(shard, tag | 1, block)
        written = TAG.pack(tag) + self._written
        for link in self._partners:
            link.send_without_ack(written)
        if tensor_block is not None:
            out = segment.tensor_in_block(tensor_block, plan.out_shape, plan.dtype)
        for link in self._partners:
            if not endpoint.receive_if_equal(link, written, self._header):
                endpoint.receive(link.peer, tag, self._header, 0)
        endpoint.read_bytes += plan.read_bytes
        if tensor_block is None:
            out = segment.view(block, plan.out_shape, plan.dtype).clone()
            block.release()
        return out

    def _send_destination(self, block: Block, tag: bytes) -> None:
        """Send the place of the new shard to its writers."""
        if self._location != (block.chunk, block.offset):
            self._location, self._views, self._destination = (block.chunk, block.offset), [], b""
        if not self._destination:
            message = pack_without_ack(0, *self._location, self.plan.out_bytes, self._header)
            self._destination = message[TAG_BYTES:]
        message = tag + self._destination
        for link in self._writers:
            link.send_without_ack(message)

    def _write(self, shard: torch.Tensor, tag: int, block: Block) -> None:
        """Write this rank's slices, block by block of its shard, once all destinations are known."""
        endpoint, tag_bytes = self._endpoint, TAG.pack(tag)
        for number, (link, target) in enumerate(self._targets):
            last = self._last_places[number]
            if last is None or not endpoint.receive_if_equal(link, tag_bytes + last + self._header, self._header):
                message = endpoint.receive(target.rank, tag, self._header, target.shard_bytes)
                found = message_place(message)
                if found != last:
                    self._last_places[number], self._destinations[number], self._views = found, message, []
        if self._source != shard.data_ptr():
            self._source, self._views = shard.data_ptr(), []
        for taken, given in self._views or self._find_views(block):
            given[...] = taken
        for write, place in self._short:
            start = shard.storage_offset() + write.source.start // shard.element_size()
            place.copy_(shard.detach().as_strided(write.source.shape, write.source.strides, start))

    def _find_views(self, block: Block) -> list[_Views]:
        """Views of the slices' runs on both sides; for slices with short runs, the destinations alone."""
        own = [(target, block) for target in self.plan.put_targets if target.rank == self._endpoint.rank]
        others = [(target, message) for (_, target), message in zip(self._targets, self._destinations, strict=True)]
        self._short = []
        views: list[_Views] = []
        for target, location in [*own, *others]:
            assert location is not None
            memory = self._memory(target.rank, location.chunk)
            for write in target.writes:
                destination = write.destination
                if write.copy is None:
                    place = memory.strided(
                        location.offset + destination.start, destination.shape, destination.strides, self.plan.dtype
                    )
                    self._short.append((write, place))
                else:
                    places = self._source + write.source.start, memory.address + location.offset + destination.start
                    views.append(copy_views(write.copy, *places))
        self._views = _block_by_block(views, -(-self.plan.shard_bytes // BLOCK_BYTES))
        return self._views

    def _memory(self, rank: int, chunk: int) -> SharedMemory:
        return self._segment.chunks[chunk] if rank == self._endpoint.rank else self._endpoint.links[rank].memory(chunk)


def _block_by_block(views: list[_Views], num_blocks: int) -> list[_Views]:
    """The same copies, each cut into ``num_blocks`` parts, in the order of the shard."""
    cuts = [balanced_bounds(len(given), num_blocks) for _, given in views]
    return [
        (taken[start:stop], given[start:stop])
        for bounds in zip(*cuts, strict=True)
        for (taken, given), (start, stop) in zip(views, bounds, strict=True)
        if start < stop
    ]
