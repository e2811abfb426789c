"""The control page of a rank: shared memory beside the data, written by this rank alone.

A page holds the rank's identity, the files of its data, its state, the record of its current wait, and its ends of the
rings (see ``link``) with their semaphores. Words that no semaphore orders may be seen late. They serve error texts and
the search for deadlocks, which acts only on a state that it has seen twice.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import NamedTuple

from workbench.transport.messaging.semaphores import SEMAPHORE_BYTES, Semaphores
from workbench.transport.messaging.shared_memory import SharedMemory

NUM_SLOTS = 128
"""Entries of a ring."""
MAX_CHUNKS = 48
RUNNING, FAILED, LEFT = 0, 1, 2
"""States of a rank."""

MESSAGE_SLOT_BYTES = 512
MESSAGE_STRUCT = struct.Struct("<qqqqqq")
"""Tag, bytes of data, chunk, offset, whether an ack is wanted (not 0), bytes of the header that follows."""
ACK_SLOT_BYTES = 8
_MAX_HEADER = MESSAGE_SLOT_BYTES - MESSAGE_STRUCT.size
_SEMAPHORES_PER_PEER = 4
_WORDS_PER_PEER = 4

_WAIT = struct.Struct("<qqqq")  # number of the record, peer (or -1), whether for an ack, bytes of header
_MAX_WAIT = 900
_MAX_REASON = 2000
# Indices of 8-byte words at the start of a page; offsets in bytes of the wait record, the reason, the area per peer.
_TOKEN, _STATE, _NUM_CHUNKS, _CHUNKS = 0, 1, 2, 8
_WAIT_AT, _REASON_AT, _PER_PEER_AT = 1024, 2048, 4096


class WaitRecord(NamedTuple):
    """The current wait of a rank; ``number`` changes with every wait."""

    number: int
    peer: int
    for_ack: bool
    header: str


@lru_cache(maxsize=1024)
def encode_header(header: str) -> bytes:
    """The header of a call in bytes; a long one is cut and ends with a hash of the whole."""
    text = header.encode()
    if len(text) <= _MAX_HEADER:
        return text
    digest = hashlib.blake2b(text, digest_size=6).hexdigest().encode()
    return text[: _MAX_HEADER - len(digest) - 5] + b"... #" + digest


def decode_header(header: bytes) -> str:
    """The header as text, for error messages."""
    return header.decode(errors="replace")


class ControlPage:
    """The control page of this rank or of a peer."""

    def __init__(self, memory: SharedMemory, world_size: int) -> None:
        self.memory, self.world_size = memory, world_size
        self.words = memory.data.cast("q")
        self._semaphores_at = _PER_PEER_AT + -(-8 * _WORDS_PER_PEER * world_size // SEMAPHORE_BYTES) * SEMAPHORE_BYTES
        self._acks_at = self._semaphores_at + world_size * _SEMAPHORES_PER_PEER * SEMAPHORE_BYTES
        self._messages_at = self._acks_at + world_size * NUM_SLOTS * ACK_SLOT_BYTES

    @staticmethod
    def size_for(world_size: int) -> int:
        """Size of a page, in bytes."""
        rings = NUM_SLOTS * (ACK_SLOT_BYTES + MESSAGE_SLOT_BYTES)
        per_peer = 8 * _WORDS_PER_PEER + _SEMAPHORES_PER_PEER * SEMAPHORE_BYTES + rings
        return -(-(_PER_PEER_AT + SEMAPHORE_BYTES + world_size * per_peer) // 4096) * 4096

    def initialise(self, token: int, semaphores: Semaphores) -> None:
        """Prepare this rank's own page."""
        self.words[_TOKEN] = token
        self.write_wait(-1, b"")
        for number in range(self.world_size * _SEMAPHORES_PER_PEER):
            semaphores.initialise(self._semaphore(0, number))

    @property
    def token(self) -> int:
        """The random number that identifies this page."""
        return self.words[_TOKEN]

    def filled(self, peer: int, of_acks: bool = False) -> int:
        """Address of the semaphore that counts messages to ``peer``, or acks for it."""
        return self._semaphore(peer, 2 * of_acks)

    def emptied(self, peer: int, of_acks: bool = False) -> int:
        """Address of the semaphore that counts messages from ``peer``, or acks, that this rank has taken out of the
        ring.
        """
        return self._semaphore(peer, 2 * of_acks + 1)

    def messages(self, peer: int) -> memoryview:
        """The ring of messages to ``peer``."""
        start = self._messages_at + peer * NUM_SLOTS * MESSAGE_SLOT_BYTES
        return self.memory.data[start : start + NUM_SLOTS * MESSAGE_SLOT_BYTES]

    def acks(self, peer: int) -> memoryview:
        """The ring of acks for ``peer``, in words."""
        start = self._acks_at // 8 + peer * NUM_SLOTS
        return self.words[start : start + NUM_SLOTS]

    def sent_word(self, peer: int, of_acks: bool = False) -> int:
        """Index of the word that counts messages to ``peer``, or acks, with those that are not in the ring yet."""
        return _PER_PEER_AT // 8 + 2 * of_acks * self.world_size + peer

    def read_word(self, peer: int, of_acks: bool = False) -> int:
        """Index of the word that counts messages of ``peer``, or acks, that this rank has taken."""
        return _PER_PEER_AT // 8 + (2 * of_acks + 1) * self.world_size + peer

    def add_chunk(self, memory: SharedMemory) -> None:
        """Publish a file of data, before any message refers to it."""
        number = self.words[_NUM_CHUNKS]
        self.words[_CHUNKS + 2 * number], self.words[_CHUNKS + 2 * number + 1] = memory.file, memory.size
        self.words[_NUM_CHUNKS] = number + 1

    def chunk(self, number: int) -> tuple[int, int]:
        """File number and size of a chunk."""
        return self.words[_CHUNKS + 2 * number], self.words[_CHUNKS + 2 * number + 1]

    @property
    def state(self) -> int:
        """RUNNING, FAILED or LEFT."""
        return self.words[_STATE]

    def end(self, state: int, reason: str = "") -> None:
        """Publish that this rank takes no part any more: FAILED or LEFT, with the reason."""
        text = reason.encode()[:_MAX_REASON]
        self.memory.data[_REASON_AT + 8 : _REASON_AT + 8 + len(text)] = text
        self.words[_REASON_AT // 8] = len(text)
        self.words[_STATE] = state

    @property
    def reason(self) -> str:
        """Why the rank has failed."""
        length = min(self.words[_REASON_AT // 8], _MAX_REASON)
        return bytes(self.memory.data[_REASON_AT + 8 : _REASON_AT + 8 + length]).decode(errors="replace")

    def write_wait(self, peer: int, header: bytes, for_ack: bool = False) -> None:
        """Publish that this rank waits for a message, or an ack, of ``peer``; -1: it does not wait."""
        number, header = self.words[_WAIT_AT // 8], header[:_MAX_WAIT]
        self.memory.data[_WAIT_AT + _WAIT.size : _WAIT_AT + _WAIT.size + len(header)] = header
        _WAIT.pack_into(self.memory.data, _WAIT_AT, number + 1, peer, for_ack, len(header))

    def wait(self) -> WaitRecord | None:
        """The current wait of this rank; None if it does not wait."""
        number, peer, for_ack, length = _WAIT.unpack_from(self.memory.data, _WAIT_AT)
        if peer < 0:
            return None
        text = self.memory.data[_WAIT_AT + _WAIT.size : _WAIT_AT + _WAIT.size + min(length, _MAX_WAIT)]
        return WaitRecord(number, peer, bool(for_ack), decode_header(bytes(text)))

    def _semaphore(self, peer: int, which: int) -> int:
        return self.memory.address + self._semaphores_at + (peer * _SEMAPHORES_PER_PEER + which) * SEMAPHORE_BYTES
