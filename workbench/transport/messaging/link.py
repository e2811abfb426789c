"""One rank's end of the two-way link to one peer: two rings in each direction.

A *message* holds the place of data in the sender's memory; the reader copies, or reduces, straight out of it. An *ack*
tells the sender that the data of a message has been read, so that its block can be used again. Messages with different
tags may be read out of order; their acks follow in the order of reading.

Each ring has two semaphores. ``filled`` is posted after an entry and its data are written; ``emptied`` is posted once
for every ``_READS_PER_POST`` entries that were read, because a post costs as much as an entry. A rank reads an entry
after it has acquired ``filled``, and overwrites it after it has acquired ``emptied``; it reuses a block after it has
acquired the last ack. This orders all accesses to shared data, on every machine. An entry that finds its ring full is
queued in its writer's own memory: writing never blocks.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import NamedTuple, Protocol

from workbench.transport.messaging.block_allocator import BlockAllocator
from workbench.transport.messaging.control_page import MESSAGE_SLOT_BYTES, MESSAGE_STRUCT, NUM_SLOTS, ControlPage
from workbench.transport.messaging.semaphores import Semaphores
from workbench.transport.messaging.shared_memory import SharedMemory

TAG = struct.Struct("<q")
TAG_BYTES = TAG.size
"""A message begins with its tag."""
_READS_PER_POST = 16
"""Divides the number of slots."""


class Message(NamedTuple):
    """A message that has arrived: its number among the sender's messages, and the place of its data."""

    position: int
    num_bytes: int
    chunk: int
    offset: int
    header: bytes
    wants_ack: int


def pack_without_ack(tag: int, chunk: int, offset: int, num_bytes: int, header: bytes) -> bytes:
    """A message about memory that needs no ack: its sender learns in another way that it has been read."""
    return MESSAGE_STRUCT.pack(tag, num_bytes, chunk, offset, 0, len(header)) + header


def message_place(message: Message) -> bytes:
    """The bytes of a message between its tag and its header."""
    return MESSAGE_STRUCT.pack(0, *message[1:4], message.wants_ack, len(message.header))[TAG_BYTES:]


class SendBuffer(Protocol):
    """Memory of this rank that peers read, with the number of its readers."""

    chunk: int
    offset: int
    num_readers: int

    def release(self) -> None:
        """Remove one reader."""


class Block:
    """An allocated block with the number of its readers, its owner included."""

    __slots__ = ("allocator", "chunk", "num_bytes", "num_readers", "offset")

    def __init__(self, allocator: BlockAllocator, chunk: int, offset: int, num_bytes: int) -> None:
        self.allocator, self.chunk, self.offset = allocator, chunk, offset
        self.num_bytes, self.num_readers = num_bytes, 1

    def release(self) -> None:
        """Remove one reader; the last one frees the block."""
        self.num_readers -= 1
        if self.num_readers == 0:
            self.allocator.free(self.offset, self.num_bytes)


class InPlaceBuffer:
    """A tensor's own memory while peers read it: nobody may write to it before ``num_readers`` is 0."""

    __slots__ = ("chunk", "num_readers", "offset")

    def __init__(self, chunk: int, offset: int) -> None:
        self.chunk, self.offset, self.num_readers = chunk, offset, 0

    def release(self) -> None:
        """Remove one reader."""
        self.num_readers -= 1


_NO_ACK = InPlaceBuffer(0, 0)
"""Marks a message without ack."""


class Link:
    """Both directions between this rank and one peer.

    Attributes:
        arrived: messages taken out of the ring, by tag; their data is still in the sender's memory.
        message_semaphore, ack_semaphore: semaphores that count incoming messages and acks.
        num_read: messages taken out of the ring.
    """

    def __init__(
        self, rank: int, peer: int, pid: int, own: ControlPage, theirs: ControlPage, semaphores: Semaphores
    ) -> None:
        self.peer, self.pid, self.theirs = peer, pid, theirs
        self.arrived: dict[int, deque[Message]] = {}
        self._chunks: dict[int, SharedMemory] = {}
        self._own_words, self._post, self._try_acquire = own.words, semaphores.post, semaphores.try_acquire
        self._sent_word, self._read_word = own.sent_word(peer), own.read_word(peer)
        self._acks_sent_word, self._acks_read_word = own.sent_word(peer, True), own.read_word(peer, True)

        self._messages_out, self._message_sent = own.messages(peer), own.filled(peer)
        self._message_was_read = theirs.emptied(rank)
        self._num_sent, self._room_for_messages = 0, NUM_SLOTS
        self._queued_messages: deque[tuple[bytes, SendBuffer | None]] = deque()
        self._unread: dict[int, SendBuffer | None] = {}

        self._messages_in, self.message_semaphore = theirs.messages(rank), theirs.filled(rank)
        self._message_read = own.emptied(peer)
        self.num_read = 0

        self._acks_out, self._ack_sent = own.acks(peer), own.filled(peer, of_acks=True)
        self._ack_was_read = theirs.emptied(rank, of_acks=True)
        self._num_acks_out, self._room_for_acks = 0, NUM_SLOTS
        self._queued_acks: deque[int] = deque()

        self._acks_in, self.ack_semaphore = theirs.acks(rank), theirs.filled(rank, of_acks=True)
        self._ack_read = own.emptied(peer, of_acks=True)
        self._num_acks_in = 0

    def send(
        self,
        tag: int,
        block: SendBuffer | None,
        num_bytes: int,
        header: bytes,
        offset_in_block: int = 0,
        event_number: int = 1,
    ) -> None:
        """Send a message about ``num_bytes`` of ``block`` (None: no data) and expect an ack.

        ``event_number``: any number except 0; the reader finds it in ``Message.wants_ack``.
        """
        if block is not None:
            block.num_readers += 1
        chunk, offset = (block.chunk, block.offset + offset_in_block) if block is not None else (0, 0)
        self._send(MESSAGE_STRUCT.pack(tag, num_bytes, chunk, offset, event_number, len(header)) + header, block)

    def send_without_ack(self, message: bytes) -> None:
        """Send a message of ``pack_without_ack``. This inlines ``_send``: it is the hot path of small boxings."""
        if self._queued_messages or not self._room_for_messages:
            self._send(message, _NO_ACK)
            return
        self._own_words[self._sent_word] += 1
        at = self._num_sent % NUM_SLOTS * MESSAGE_SLOT_BYTES
        self._messages_out[at : at + len(message)] = message
        self._num_sent += 1
        self._room_for_messages -= 1
        self._post(self._message_sent)

    def _send(self, message: bytes, buffer: SendBuffer | None) -> None:
        self._own_words[self._sent_word] += 1
        if self._room_for_messages and not self._queued_messages:
            self._write_slot(message, buffer)
        else:
            self._queued_messages.append((message, buffer))
            self.send_queued()

    def _write_slot(self, message: bytes, buffer: SendBuffer | None) -> None:
        at = self._num_sent % NUM_SLOTS * MESSAGE_SLOT_BYTES
        self._messages_out[at : at + len(message)] = message
        if buffer is not _NO_ACK:
            self._unread[self._num_sent] = buffer
        self._num_sent += 1
        self._room_for_messages -= 1
        self._post(self._message_sent)

    def send_queued(self) -> bool:
        """Move queued messages and acks into their rings while there is room; returns whether no message is left."""
        if self._queued_acks:
            self._send_queued_acks()
        while self._queued_messages:
            if not self._room_for_messages:
                while self._try_acquire(self._message_was_read) == 0:
                    self._room_for_messages += _READS_PER_POST
                if not self._room_for_messages:
                    return False
            self._write_slot(*self._queued_messages.popleft())
        return True

    def collect_acks(self) -> bool:
        """Take all acks that have arrived and release their blocks; returns whether there were any."""
        unread, found = self._unread, False
        while unread and self._try_acquire(self.ack_semaphore) == 0:
            self.read_ack()
            found = True
        return found

    def read_ack(self) -> None:
        """Take one ack, after ``ack_semaphore`` was acquired."""
        position = self._acks_in[self._num_acks_in % NUM_SLOTS]
        self._num_acks_in += 1
        if self._num_acks_in % _READS_PER_POST == 0:
            self._post(self._ack_read)
        self._own_words[self._acks_read_word] = self._num_acks_in
        block = self._unread.pop(position)
        if block is not None:
            block.release()

    def awaits_ack(self, buffer: SendBuffer) -> bool:
        """Whether the peer has not acknowledged all messages about ``buffer``."""
        return any(unread is buffer for unread in self._unread.values()) or any(
            queued is buffer for _, queued in self._queued_messages
        )

    def try_receive(self, tag: int) -> Message | None:
        """The next message with this tag, if it has arrived; messages with other tags are kept."""
        messages = self.arrived.get(tag)
        if messages is not None:
            message = messages.popleft()
            if not messages:
                del self.arrived[tag]
            return message
        while self._try_acquire(self.message_semaphore) == 0:
            found, message = self._pop()
            if found == tag:
                return message
            self.arrived.setdefault(found, deque()).append(message)
        return None

    def acquire_next(self) -> bool:
        """Acquire the semaphore of the next message in the ring; returns whether there is one."""
        return self._try_acquire(self.message_semaphore) == 0

    def consume_if_equal(self, message: bytes) -> bool:
        """Consume the acquired message if its bytes equal ``message``; else keep it for ``try_receive``."""
        at = self.num_read % NUM_SLOTS * MESSAGE_SLOT_BYTES
        if bytes(self._messages_in[at : at + len(message)]) != message:
            self.queue_acquired()
            return False
        self._count_read()
        return True

    def queue_next(self) -> bool:
        """Take the next message out of the ring and keep it; returns whether there was one."""
        if self._try_acquire(self.message_semaphore) != 0:
            return False
        self.queue_acquired()
        return True

    def queue_acquired(self) -> None:
        """Take the next message out of the ring and keep it, after ``message_semaphore`` was acquired."""
        tag, message = self._pop()
        self.arrived.setdefault(tag, deque()).append(message)

    def _pop(self) -> tuple[int, Message]:
        number = self.num_read
        at = number % NUM_SLOTS * MESSAGE_SLOT_BYTES
        tag, num_bytes, chunk, offset, wants_ack, length = MESSAGE_STRUCT.unpack_from(self._messages_in, at)
        header = bytes(self._messages_in[at + MESSAGE_STRUCT.size : at + MESSAGE_STRUCT.size + length])
        self._count_read()
        return tag, Message(number, num_bytes, chunk, offset, header, wants_ack)

    def _count_read(self) -> None:
        self.num_read = self._own_words[self._read_word] = self.num_read + 1
        if self.num_read % _READS_PER_POST == 0:
            self._post(self._message_read)

    def acknowledge(self, message: Message) -> None:
        """Send an ack: this rank has read the data of ``message``."""
        self._own_words[self._acks_sent_word] += 1
        self._queued_acks.append(message.position)
        self._send_queued_acks()

    def _send_queued_acks(self) -> None:
        while self._queued_acks:
            if not self._room_for_acks:
                while self._try_acquire(self._ack_was_read) == 0:
                    self._room_for_acks += _READS_PER_POST
                if not self._room_for_acks:
                    return
            self._acks_out[self._num_acks_out % NUM_SLOTS] = self._queued_acks.popleft()
            self._num_acks_out += 1
            self._room_for_acks -= 1
            self._post(self._ack_sent)

    def memory(self, chunk: int) -> SharedMemory:
        """The peer's file with this number; opened on first use."""
        found = self._chunks.get(chunk)
        if found is None:
            found = self._chunks[chunk] = SharedMemory.open(self.pid, *self.theirs.chunk(chunk))
        return found

    @property
    def has_unread(self) -> bool:
        """Whether the peer has not acknowledged all messages of this rank."""
        return bool(self._unread or self._queued_messages)

    @property
    def has_files_to_open(self) -> bool:
        """Whether the peer may still need to open a file of this rank to read a message."""
        return any(block is not None and block.chunk > 0 for block in self._unread.values())
