"""One rank's endpoint: receives messages by source and tag, and views the memory they refer to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from workbench.errors import CollectiveAborted
from workbench.transport.messaging.control_page import decode_header
from workbench.transport.messaging.link import Link, Message, SendBuffer
from workbench.transport.messaging.transfer_plan import Read
from workbench.transport.messaging.waiter import Waiter


class Endpoint:
    """One rank's links, with blocking receives over them.

    Attributes:
        read_bytes: bytes of other ranks' data that this rank has read.
        num_received_messages: messages that this rank has received.
    """

    def __init__(self, rank: int, links: Mapping[int, Link], waiter: Waiter) -> None:
        self.rank, self.links, self._waiter = rank, links, waiter
        self.read_bytes = 0
        self.num_received_messages = 0

    def receive_if_equal(self, link: Link, message: bytes, header: bytes) -> bool:
        """Wait for the next message of a peer and consume it if its bytes equal ``message``; else keep it.

        A repeated message need not be parsed, which would cost several times as much after a wait.

        Raises:
            CollectiveAborted: the peer sends no message any more.
        """
        if link.arrived or not (link.acquire_next() or self._waiter.acquire_message(link, header)):
            return False
        if not link.consume_if_equal(message):
            return False
        self.num_received_messages += 1
        return True

    def receive(self, source: int, tag: int, header: bytes, *sizes: int) -> Message:
        """Wait for the next message of ``source`` with this tag. It must have this header and one of these sizes.

        Raises:
            CollectiveAborted: the peer sends no message any more, or the message belongs to another call.
        """
        link = self.links[source]
        message = link.try_receive(tag)
        while message is None:
            message = self._waiter.wait_for_message(link, tag, header)
        self.num_received_messages += 1
        if message.header != header or message.num_bytes not in sizes:
            theirs, ours = decode_header(message.header), decode_header(header)
            expected = " or ".join(map(str, sorted(set(sizes))))
            raise CollectiveAborted(
                f"ranks diverged: rank {self.rank} called {ours} and expects {expected} bytes while rank {source} "
                f"called {theirs} and sent {message.num_bytes}. All ranks must run the same program."
            )
        return message

    def view(self, source: int, message: Message, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The data of a message as a contiguous tensor in the memory of ``source``."""
        if message.num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        return self.links[source].memory(message.chunk).tensor(message.offset, tuple(shape), dtype)

    def slice_view(self, read: Read, message: Message, dtype: torch.dtype) -> torch.Tensor:
        """The slice ``read`` of a shard; the message refers to the whole shard or to a copy of the slice."""
        memory, part = self.links[read.source].memory(message.chunk), read.slice
        if message.num_bytes != read.shard_bytes:
            return memory.tensor(message.offset, part.shape, dtype)
        return memory.strided(message.offset + part.start, part.shape, part.strides, dtype)

    def wait_for_acks(self, buffer: SendBuffer, readers: Iterable[int], header: bytes) -> None:
        """Return when all ``readers`` have acknowledged the messages about ``buffer``."""
        for reader in readers:
            link = self.links[reader]
            while buffer.num_readers and link.awaits_ack(buffer):
                if not link.collect_acks():
                    self._waiter.wait_for_ack(link, header)
