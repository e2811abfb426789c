"""What lies in shared memory beside the data: one board per rank, written by it alone.

A board says who the rank is, in which files its data lies, whether it has failed, and what it waits for; it holds the
rank's ends of the rings (see ``link``) and their semaphores. What rank and peers say here in plain words, without a
semaphore, may be seen late: it serves messages and the search for deadlocks, where a verdict needs to see the same
twice.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import NamedTuple

from workbench.transport.letters.mapped import Mapping
from workbench.transport.letters.semaphores import SEMAPHORE_BYTES, Semaphores

NUM_SLOTS = 128
"""Entries of a ring."""
MAX_CHUNKS = 48
RUNNING, FAILED, LEFT = 0, 1, 2
"""States of a rank."""

LETTER_SLOT_BYTES = 512
LETTER = struct.Struct("<qqqqqq")
"""Tag, bytes of data, chunk, offset, whether it wants a receipt, bytes of the header that follows."""
RECEIPT_SLOT_BYTES = 8
_MAX_HEADER = LETTER_SLOT_BYTES - LETTER.size
_SEMAPHORES_PER_PEER = 4
_WORDS_PER_PEER = 4

_WAIT = struct.Struct("<qqqq")  # number of the record, peer (or -1), whether for a receipt, bytes of header
_MAX_WAIT = 900
_MAX_REASON = 2000
# Words of 8 bytes at the start of a board; then, in bytes, the record of the wait, the reason, what there is per peer.
_TOKEN, _STATE, _NUM_CHUNKS, _CHUNKS = 0, 1, 2, 8
_WAIT_AT, _REASON_AT, _PER_PEER_AT = 1024, 2048, 4096


class Wait(NamedTuple):
    """What a rank waits for; ``number`` changes with every wait."""

    number: int
    peer: int
    for_receipt: bool
    header: str


@lru_cache(maxsize=1024)
def encode_header(header: str) -> bytes:
    """The words of a call as they travel: cut where they are long, with a hash of the whole."""
    text = header.encode()
    if len(text) <= _MAX_HEADER:
        return text
    digest = hashlib.blake2b(text, digest_size=6).hexdigest().encode()
    return text[: _MAX_HEADER - len(digest) - 5] + b"... #" + digest


def decode_header(header: bytes) -> str:
    """What ``encode_header`` was given, for people."""
    return header.decode(errors="replace")


class Board:
    """A rank's board, its own or a peer's."""

    def __init__(self, mapping: Mapping, world_size: int) -> None:
        self.mapping, self.world_size = mapping, world_size
        self.words = mapping.data.cast("q")
        self._semaphores_at = _PER_PEER_AT + -(-8 * _WORDS_PER_PEER * world_size // SEMAPHORE_BYTES) * SEMAPHORE_BYTES
        self._receipts_at = self._semaphores_at + world_size * _SEMAPHORES_PER_PEER * SEMAPHORE_BYTES
        self._letters_at = self._receipts_at + world_size * NUM_SLOTS * RECEIPT_SLOT_BYTES

    @staticmethod
    def size_for(world_size: int) -> int:
        """Bytes of a board."""
        rings = NUM_SLOTS * (RECEIPT_SLOT_BYTES + LETTER_SLOT_BYTES)
        per_peer = 8 * _WORDS_PER_PEER + _SEMAPHORES_PER_PEER * SEMAPHORE_BYTES + rings
        return -(-(_PER_PEER_AT + SEMAPHORE_BYTES + world_size * per_peer) // 4096) * 4096

    def initialise(self, token: int, semaphores: Semaphores) -> None:
        """Prepare this rank's own board."""
        self.words[_TOKEN] = token
        self.write_wait(-1, b"")
        for number in range(self.world_size * _SEMAPHORES_PER_PEER):
            semaphores.initialise(self._semaphore(0, number))

    @property
    def token(self) -> int:
        """The random number that tells this board from any other file."""
        return self.words[_TOKEN]

    def letters_filled(self, peer: int) -> int:
        """Address of the semaphore that counts letters to ``peer``."""
        return self._semaphore(peer, 0)

    def letters_emptied(self, peer: int) -> int:
        """Address of the semaphore that counts letters from ``peer`` that are out of their ring."""
        return self._semaphore(peer, 1)

    def receipts_filled(self, peer: int) -> int:
        """Address of the semaphore that counts receipts for ``peer``."""
        return self._semaphore(peer, 2)

    def receipts_emptied(self, peer: int) -> int:
        """Address of the semaphore that counts receipts from ``peer`` that are out of their ring."""
        return self._semaphore(peer, 3)

    def letters(self, peer: int) -> memoryview:
        """The ring of letters to ``peer``."""
        start = self._letters_at + peer * NUM_SLOTS * LETTER_SLOT_BYTES
        return self.mapping.data[start : start + NUM_SLOTS * LETTER_SLOT_BYTES]

    def receipts(self, peer: int) -> memoryview:
        """The ring of receipts for ``peer``, as words."""
        start = self._receipts_at // 8 + peer * NUM_SLOTS
        return self.words[start : start + NUM_SLOTS]

    def sent_word(self, peer: int) -> int:
        """Index of the word that says how many letters this rank has for ``peer``, those not in the ring yet too."""
        return _PER_PEER_AT // 8 + peer

    def read_word(self, peer: int) -> int:
        """Index of the word that says how many letters of ``peer`` this rank has taken."""
        return _PER_PEER_AT // 8 + self.world_size + peer

    def receipts_sent_word(self, peer: int) -> int:
        """Index of the word that says how many receipts this rank has for ``peer``."""
        return _PER_PEER_AT // 8 + 2 * self.world_size + peer

    def receipts_read_word(self, peer: int) -> int:
        """Index of the word that says how many receipts of ``peer`` this rank has taken."""
        return _PER_PEER_AT // 8 + 3 * self.world_size + peer

    def add_chunk(self, mapping: Mapping) -> None:
        """Publish a file of data; letters that refer to it come later."""
        number = self.words[_NUM_CHUNKS]
        self.words[_CHUNKS + 2 * number], self.words[_CHUNKS + 2 * number + 1] = mapping.file, mapping.size
        self.words[_NUM_CHUNKS] = number + 1

    def chunk(self, number: int) -> tuple[int, int]:
        """File number and size of a chunk."""
        return self.words[_CHUNKS + 2 * number], self.words[_CHUNKS + 2 * number + 1]

    @property
    def state(self) -> int:
        """RUNNING, FAILED or LEFT."""
        return self.words[_STATE]

    def end(self, state: int, reason: str = "") -> None:
        """Tell peers that wait for this rank that it will not come."""
        text = reason.encode()[:_MAX_REASON]
        self.mapping.data[_REASON_AT + 8 : _REASON_AT + 8 + len(text)] = text
        self.words[_REASON_AT // 8] = len(text)
        self.words[_STATE] = state

    @property
    def reason(self) -> str:
        """Why the rank has failed."""
        length = min(self.words[_REASON_AT // 8], _MAX_REASON)
        return bytes(self.mapping.data[_REASON_AT + 8 : _REASON_AT + 8 + length]).decode(errors="replace")

    def write_wait(self, peer: int, header: bytes, for_receipt: bool = False) -> None:
        """Say that this rank waits for a letter, or for a receipt, of ``peer``; -1: for nobody."""
        number, header = self.words[_WAIT_AT // 8], header[:_MAX_WAIT]
        self.mapping.data[_WAIT_AT + _WAIT.size : _WAIT_AT + _WAIT.size + len(header)] = header
        _WAIT.pack_into(self.mapping.data, _WAIT_AT, number + 1, peer, for_receipt, len(header))

    def wait(self) -> Wait | None:
        """What this rank waits for, if it does."""
        number, peer, for_receipt, length = _WAIT.unpack_from(self.mapping.data, _WAIT_AT)
        if peer < 0:
            return None
        text = self.mapping.data[_WAIT_AT + _WAIT.size : _WAIT_AT + _WAIT.size + min(length, _MAX_WAIT)]
        return Wait(number, peer, bool(for_receipt), decode_header(bytes(text)))

    def _semaphore(self, peer: int, which: int) -> int:
        return self.mapping.address + self._semaphores_at + (peer * _SEMAPHORES_PER_PEER + which) * SEMAPHORE_BYTES
