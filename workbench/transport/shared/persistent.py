"""Small exchanges that the same ranks repeat: fixed buffers on every rank, and no acks.

A rank writes its shard into one of two buffers, alternately, and sends a message to each reader. Before it writes to a
buffer again it has received, for the exchange in between, a message of every reader, sent after that reader had read
this buffer. Hence the exchange must be mutual. Buffers do not move, so their views are made once: an exchange of a few
kilobytes costs one copy, one message to each rank, one from each, and one torch operation.
"""

from __future__ import annotations

import ctypes

import torch

from workbench.transport.messaging.block_allocator import BlockAllocator
from workbench.transport.messaging.endpoint import Endpoint
from workbench.transport.messaging.link import TAG, Link, Message, message_place, pack_without_ack
from workbench.transport.messaging.shared_memory import SharedMemory
from workbench.transport.messaging.transfer_plan import Read, TransferPlan
from workbench.transport.reduction import reduce_into, reduce_terms
from workbench.transport.shared.segment import MIN_IN_PLACE_BYTES, Segment, is_byte_copyable

PERSISTENT_BYTES = 2 * 2**20
"""Size of the area for these buffers, at the end of a rank's first chunk."""
_copy_bytes = ctypes.memmove


class PersistentExchanges:
    """The persistent exchanges of one rank, by plan; the least recently run ones make room for new ones."""

    def __init__(self, segment: Segment, endpoint: Endpoint) -> None:
        self._segment, self._endpoint = segment, endpoint
        self._allocator = BlockAllocator(PERSISTENT_BYTES)
        self._found: dict[TransferPlan, PersistentExchange] = {}

    def of(self, plan: TransferPlan) -> PersistentExchange | None:
        """The exchange of a plan; None where there is no room for its buffers."""
        found = self._found.get(plan)
        if found is None and plan.may_read_in_place and 0 < plan.shard_bytes < MIN_IN_PLACE_BYTES:
            offset = self._allocator.allocate(2 * plan.buffer_bytes)
            if offset is None:
                self._drop_oldest()
                offset = self._allocator.allocate(2 * plan.buffer_bytes)
            if offset is not None:
                chunk = self._segment.chunks[0]
                start = chunk.size - PERSISTENT_BYTES + offset
                found = self._found[plan] = PersistentExchange(plan, self._segment, self._endpoint, chunk, start)
        return found

    def _drop_oldest(self) -> None:
        """Free buffers that nobody still reads: every reader has sent a later message."""
        base = self._segment.chunks[0].size - PERSISTENT_BYTES
        idle = sorted((s for s in self._found.values() if s.is_idle), key=lambda exchange: exchange.last_run)
        for exchange in idle[: max(1, len(idle) // 2)]:
            self._allocator.free(exchange.start - base, 2 * exchange.plan.buffer_bytes)
            del self._found[exchange.plan]


class PersistentExchange:
    """The two buffers of one plan, and views of the slices that are read from them and from the peers' buffers."""

    def __init__(
        self, plan: TransferPlan, segment: Segment, endpoint: Endpoint, chunk: SharedMemory, start: int
    ) -> None:
        self.plan, self.start, self.last_run = plan, start, 0
        self._segment, self._endpoint, self._chunk = segment, endpoint, chunk
        self._turn = 0
        self._readers = [endpoint.links[rank] for rank, _, _ in plan.sends]
        reads = [read for output in plan.outputs for read in output.reads if read.source != endpoint.rank]
        self._reads = [(read, endpoint.links[read.source]) for read in reads]
        self._messages: list[list[Message | None]] = [[None] * len(reads), [None] * len(reads)]
        self._places: list[list[bytes | None]] = [[None] * len(reads), [None] * len(reads)]
        self._views: list[list[list[torch.Tensor]]] = [[], []]
        self._num_read: list[int] = []

    @property
    def is_idle(self) -> bool:
        """Whether every peer has sent a later message since the last run."""
        return all(link.num_read > count for (_, link), count in zip(self._reads, self._num_read, strict=False))

    def run(self, local: torch.Tensor, tag: int, header: bytes) -> torch.Tensor:
        """Return the new shard."""
        plan, endpoint = self.plan, self._endpoint
        self._turn = turn = 1 - self._turn
        offset = self.start + turn * plan.buffer_bytes
        if is_byte_copyable(local):
            _copy_bytes(self._chunk.address + offset, local.data_ptr(), plan.shard_bytes)
        else:
            self._chunk.tensor(offset, tuple(local.shape), plan.dtype).copy_(local.detach())
        sent = pack_without_ack(tag, 0, offset, plan.shard_bytes, header)
        for link in self._readers:
            link.send_without_ack(sent)
        to_acknowledge = self._receive(tag, header, turn)
        result = self._assemble(self._views[turn] or self._make_views(turn, offset))
        for link, message in to_acknowledge:
            link.acknowledge(message)
        self._num_read = [link.num_read for _, link in self._reads]
        self.last_run = endpoint.num_received_messages
        endpoint.read_bytes += plan.read_bytes
        return result

    def _receive(self, tag: int, header: bytes, turn: int) -> list[tuple[Link, Message]]:
        """Wait for the messages of all peers; return those that want acks.

        A message holds the place of its sender's shard, which is the same in every second run. So it is compared with
        the one that has the place of that run, and parsed only if the two differ.
        """
        to_acknowledge: list[tuple[Link, Message]] = []
        places, endpoint, tag_bytes = self._places[turn], self._endpoint, TAG.pack(tag)
        for number, (read, link) in enumerate(self._reads):
            place = places[number]
            if place is not None and endpoint.receive_if_equal(link, tag_bytes + place + header, header):
                continue
            message = endpoint.receive(read.source, tag, header, read.shard_bytes, read.slice.num_bytes)
            if message.wants_ack:
                to_acknowledge.append((link, message))
            found = None if message.wants_ack else message_place(message)
            if found is None or found != place:
                places[number], self._messages[turn][number], self._views[turn] = found, message, []
        return to_acknowledge

    def _assemble(self, views: list[list[torch.Tensor]]) -> torch.Tensor:
        plan = self.plan
        if plan.out_bytes < MIN_IN_PLACE_BYTES:
            if plan.concat_dim is not None:
                return torch.cat(views[0], plan.concat_dim).contiguous()
            if len(views) == 1:
                return reduce_terms(views[0], plan.reduction)
        assert plan.out_shape is not None
        out = self._segment.empty(plan.out_shape, plan.dtype)
        if plan.concat_dim is not None:
            return torch.cat(views[0], plan.concat_dim, out=out)
        if len(views) == 1:
            reduce_into(views[0], out, plan.reduction)
            return out
        for output, terms in zip(plan.outputs, views, strict=True):
            part = output.slice
            target = out.as_strided(part.shape, part.strides, part.start // plan.dtype.itemsize)
            reduce_into(terms, target, plan.reduction)
        return out

    def _make_views(self, turn: int, offset: int) -> list[list[torch.Tensor]]:
        """Views of the slices, by output in the order of reduction, or all in the order of concatenation."""
        messages = iter(self._messages[turn])
        views = [
            [self._own(read, offset) if read.source == self._endpoint.rank else self._view(read, next(messages))
             for read in output.reads]
            for output in self.plan.outputs
        ]  # fmt: skip
        if self.plan.concat_dim is not None:
            views = [[views[index][0] for index in self.plan.concat_order]]
        self._views[turn] = views
        return views

    def _own(self, read: Read, offset: int) -> torch.Tensor:
        part = read.slice
        return self._chunk.strided(offset + part.start, part.shape, part.strides, self.plan.dtype)

    def _view(self, read: Read, message: Message | None) -> torch.Tensor:
        assert message is not None
        return self._endpoint.slice_view(read, message, self.plan.dtype)
