"""Shared memory between CPU ranks of one host: readers copy, or reduce, straight out of the sender's memory.

A sender copies its data into a block of its own shared memory and sends a message with its place; it never waits. The
receiver reads the block in place and sends an ack; the block is free after the acks of all readers. An all-reduce works
the same way: each rank publishes its term and reads the terms of its peers in the order of the group, so that all ranks
get the same bits. Large rows are not published: their owners write them into the new shards of their peers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from workbench.core.boxing import LinkCost
from workbench.core.layout import Region
from workbench.transport.base import PeerShape, PeerTensor, Received, Transport, memory_key
from workbench.transport.messaging.control_page import ControlPage, encode_header
from workbench.transport.messaging.endpoint import Endpoint
from workbench.transport.messaging.link import Block, Link, Message
from workbench.transport.messaging.message_transport import MessageTransport, closes_on_error
from workbench.transport.messaging.semaphores import Semaphores
from workbench.transport.messaging.shared_memory import SharedMemory
from workbench.transport.messaging.transfer_plan import ONE_SHOT_BYTES, TransferPlan
from workbench.transport.messaging.waiter import Waiter
from workbench.transport.network.hang_detector import acks_key
from workbench.transport.reduction import group_tag
from workbench.transport.shared.all_reduce import AllReduce
from workbench.transport.shared.get import get
from workbench.transport.shared.persistent import PERSISTENT_BYTES, PersistentExchanges
from workbench.transport.shared.put import PutCache
from workbench.transport.shared.segment import Segment
from workbench.transport.shared.shared_buffers import SharedBuffers

FIRST_CHUNK_BYTES = 8 * 2**20 + PERSISTENT_BYTES
"""Memory for data that every rank starts with; the segment grows in larger and larger steps."""
_LAST_MESSAGES_S, _QUEUED_MESSAGES_S, _LOOK_S = 1.0, 10.0, 2e-3


class SharedTransport(MessageTransport, Transport):
    """One rank's end of the shared memory; ``selection.connect`` makes it.

    ``cost`` is a constant, like every transport's: all ranks must derive the same decisions from it.
    """

    name, scope = "shared", "host"
    cost = LinkCost(latency_s=40e-6, bandwidth_bytes_per_s=5e9, one_shot_bytes=ONE_SHOT_BYTES)

    def __init__(
        self,
        rank: int,
        page: ControlPage,
        links: dict[int, Link],
        first_chunk: SharedMemory,
        semaphores: Semaphores,
        timeout_s: float,
    ) -> None:
        super().__init__(rank, page, links, Waiter(rank, page, links, semaphores, timeout_s))
        self._segment = Segment(rank, page, links.values(), first_chunk, reserved_bytes=PERSISTENT_BYTES)
        self._endpoint = Endpoint(rank, links, self.waiter)
        self._puts = PutCache(self._segment, self._endpoint)
        self._persistent = PersistentExchanges(self._segment, self._endpoint)
        self._buffers = SharedBuffers(self._segment, self._endpoint)

    def shares_memory(self, ranks: Collection[int]) -> bool:
        return True

    def overlaps(self, ranks: Collection[int]) -> bool:
        """Ranks copy and add by themselves, when they wait."""
        return False

    @property
    def idle_bytes(self) -> int:
        """Bytes of shared memory that this rank has allocated, without those that tensors own."""
        return self._segment.idle_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of other ranks' data that this rank has read so far."""
        return self._endpoint.read_bytes

    @closes_on_error
    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str
    ) -> Callable[[], None]:
        text = encode_header(header)
        self._send(sends, tag << 1, text)
        return lambda: self._receive(receives, tag, text)

    @closes_on_error
    def _receive(self, receives: Sequence[PeerTensor], tag: int, text: bytes) -> None:
        for source, out in receives:
            message = self._endpoint.receive(source, tag << 1, text, out.nbytes)
            if message.num_bytes:
                out.copy_(self._endpoint.view(source, message, out.shape, out.dtype))
            self._acknowledge(source, message)

    @closes_on_error
    def start_exchange_in_place(
        self, sends: Sequence[PeerTensor], wanted: Sequence[PeerShape], dtype: torch.dtype, tag: int, header: str
    ) -> Callable[[], Received]:
        text = encode_header(header)
        self._send(sends, tag << 1, text)
        return lambda: self._receive_in_place(wanted, dtype, tag << 1, text)

    @closes_on_error
    def _receive_in_place(self, wanted: Sequence[PeerShape], dtype: torch.dtype, tag: int, text: bytes) -> Received:
        messages: list[tuple[int, Message]] = []
        pieces: list[torch.Tensor] = []
        for source, shape in wanted:
            message = self._endpoint.receive(source, tag, text, math.prod(shape) * dtype.itemsize)
            messages.append((source, message))
            pieces.append(self._endpoint.view(source, message, shape, dtype))

        def release() -> None:
            for source, message in messages:
                self._acknowledge(source, message)

        return pieces, release

    @closes_on_error
    def execute(self, plan: TransferPlan, local: torch.Tensor, tag: int, header: str) -> torch.Tensor | None:
        text = encode_header(header)
        if plan.puts:
            return self._puts.of(plan).run(local, tag << 1, text)
        persistent = self._persistent.of(plan)
        if persistent is not None:
            return persistent.run(local, tag << 1, text)
        return get(self._segment, self._endpoint, plan, local, tag << 1, text)

    @closes_on_error
    def start_shared_all_gather(
        self,
        group: tuple[int, ...],
        full_shapes: Sequence[Sequence[int]],
        regions: Sequence[Region],
        parts: Sequence[torch.Tensor],
        tag: int,
        header: str,
    ) -> tuple[bool, Callable[[], list[torch.Tensor]]]:
        lease = self._buffers.of(group).begin(full_shapes, regions, parts, tag << 1, header)
        return lease.memory is not None, lambda: self._run(lease.end)

    @closes_on_error
    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        number = group_tag(tag, group) << 1
        reduction_ = AllReduce(self._segment, self._endpoint, tensors, group, reduction, number, encode_header(header))
        return lambda: self._run(reduction_.finish)

    def sent_counts(self) -> dict[str, tuple[int, list[int]]]:
        """Messages and acks that this rank has sent, by peer, in the form of ``WaitStatus.sent``."""
        words, page = self._page.words, self._page
        messages: dict[str, tuple[int, list[int]]] = {str(p): (words[page.sent_word(p)], []) for p in self._links}
        return messages | {acks_key(p): (words[page.sent_word(p, of_acks=True)], []) for p in self._links}

    def _free(self) -> None:
        self.waiter.close()
        self._page.memory.close()
        self._segment.close()

    def _let_peers_read(self) -> None:
        """Send the last messages, and wait for their readers: nobody can open this rank's files after it has ended."""
        end = time.perf_counter() + _QUEUED_MESSAGES_S
        for link in self._links.values():
            while not link.send_queued() and time.perf_counter() < end and not self.waiter.is_gone(link):
                time.sleep(_LOOK_S)
        end = time.perf_counter() + _LAST_MESSAGES_S
        for link in self._links.values():
            while link.has_files_to_open and time.perf_counter() < end and not self.waiter.is_gone(link):
                time.sleep(_LOOK_S)
                link.collect_acks()

    def _send(self, sends: Sequence[PeerTensor], tag: int, header: bytes) -> None:
        published: dict[Any, Block | None] = {}  # copy a tensor for several ranks once
        for destination, tensor in sends:
            if (key := memory_key(tensor)) not in published:
                published[key] = self._segment.publish(tensor, header)
            self._links[destination].send(tag, published[key], tensor.nbytes, header)
        for block in published.values():
            if block is not None:
                block.release()

    def _acknowledge(self, source: int, message: Message) -> None:
        self._endpoint.read_bytes += message.num_bytes
        self._links[source].acknowledge(message)
