"""Transfers of one rank over ``ipc``: it sends through its own pool and reads from its peers' pools.

A transfer is a block in a pool, a message with its place, and the number of the event after which the data is there.
The reader sends an ack when its device has finished the work submitted so far; then the sender can reuse the block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from workbench.transport.base import PeerTensor, memory_key
from workbench.transport.ipc.events import EventWaiter, LocalEvents, PeerEvents
from workbench.transport.ipc.pool import RETIRE_TAG, PeerMemory, Pool, release_all
from workbench.transport.messaging.endpoint import Endpoint
from workbench.transport.messaging.link import Block, Link, Message


class Peer(NamedTuple):
    """A rank's view of a peer.

    Attributes:
        chunk_kind: ``ON_DEVICE`` or ``ON_HOST``: the memory through which this rank sends to the peer.
    """

    link: Link
    opened: PeerMemory
    events: PeerEvents
    chunk_kind: int


class _Deferred(NamedTuple):
    """Acks to peers and own blocks to release when event ``event_number`` of this rank's device is done."""

    event_number: int
    messages: list[tuple[int, Message]]
    blocks: list[Block]


class Transfers:
    """The transfers of one rank.

    Attributes:
        sent_bytes: bytes of this rank's data that were published to peers.
    """

    def __init__(
        self, rank: int, pool: Pool, events: LocalEvents, peers: Mapping[int, Peer], waiter: EventWaiter
    ) -> None:
        self.pool, self.events, self.peers = pool, events, dict(peers)
        self.links = {peer: found.link for peer, found in peers.items()}
        self.sent_bytes = 0
        self._device, self._waiter, self._endpoint = pool.device, waiter, Endpoint(rank, self.links, waiter)
        self._deferred: deque[_Deferred] = deque()

    @property
    def owes_acks(self) -> bool:
        """Whether a peer waits for an ack of this rank."""
        return bool(self._deferred)

    def send(self, sends: Sequence[PeerTensor], tag: int, header: bytes) -> None:
        self.make_progress()
        sends = [(destination, resolve_flags(tensor)) for destination, tensor in sends]
        blocks: dict[Any, Block | None] = {}  # copy a tensor for several ranks once
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        keys = []
        for destination, tensor in sends:
            chunk_kind = self.peers[destination].chunk_kind
            keys.append(key := (chunk_kind, memory_key(tensor)))
            if key not in blocks and tensor.numel():
                blocks[key] = block = self.pool.allocate(tensor.nbytes, chunk_kind, header)
                copies.append((self.pool.view(block, tensor.shape, tensor.dtype), tensor))
            blocks.setdefault(key, None)
        event_number = self.publish(copies, header)
        for (destination, tensor), key in zip(sends, keys, strict=True):
            self.notify(destination, tag, blocks[key], tensor.nbytes, header, 0, event_number)
        release_all(blocks.values())

    def publish(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], header: bytes) -> int:
        """Copy into the pool, one launch per dtype; returns the number of the event after the copies."""
        if not copies:
            return 1
        for dtype in dict.fromkeys(target.dtype for target, _ in copies):
            targets, sources = zip(*(pair for pair in copies if pair[0].dtype == dtype), strict=True)
            self._device.copy(targets, sources, [1] * len(targets), "none")
        event_number = self.events.record()
        if not self.events.are_shared:
            self._waiter.wait_for_event(self.events, event_number, header)
        return event_number

    def notify(
        self, peer: int, tag: int, block: Block | None, num_bytes: int, header: bytes, skipped: int, event_number: int
    ) -> None:
        if block is not None:
            self.pool.add_reader(block, peer)
        self.sent_bytes += num_bytes
        self.links[peer].send(tag, block, num_bytes, header, skipped, event_number)

    def receive(self, wanted: Sequence[tuple[int, int]], tag: int, header: bytes) -> list[tuple[int, Message]]:
        """Receive a message of each source with this number of bytes, and wait until the data is there."""
        messages = [(source, self._endpoint.receive(source, tag, header, num_bytes)) for source, num_bytes in wanted]
        for source, message in messages:
            self._close_retired(source)
            if message.num_bytes:
                peer = self.peers[source]
                self._waiter.wait_for_event(peer.events, message.wants_ack, header, peer.link)
        return messages

    def view(self, source: int, message: Message, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.peers[source].opened.view(message.chunk, message.offset, shape, dtype)

    def release_later(self, messages: list[tuple[int, Message]], blocks: Sequence[Block] = ()) -> None:
        """Send acks for ``messages`` and release ``blocks`` when the work submitted so far has ended."""
        if messages or blocks:
            self._deferred.append(_Deferred(self.events.record(), messages, list(blocks)))
        self.release_finished()

    def release_finished(self) -> None:
        while self._deferred and self.events.is_done(self._deferred[0].event_number):
            _, messages, blocks = self._deferred.popleft()
            for source, message in messages:
                self.links[source].acknowledge(message)
            release_all(blocks)

    def make_progress(self) -> None:
        """Send due acks, take arrived messages and acks, and close and retire chunks."""
        self.release_finished()
        for peer, link in self.links.items():
            while link.queue_next():
                pass
            link.collect_acks()
            self._close_retired(peer)
        self.pool.retire_idle(self.links)

    def _close_retired(self, peer: int) -> None:
        """Close chunks that the peer has retired; this rank has finished reading them."""
        found = self.peers[peer]
        while RETIRE_TAG in found.link.arrived:
            message = found.link.try_receive(RETIRE_TAG)
            assert message is not None
            found.opened.close(message.chunk)
            found.link.acknowledge(message)


def resolve_flags(tensor: torch.Tensor) -> torch.Tensor:
    """The detached tensor with conjugate and negative bits resolved, which kernels ignore."""
    tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
