"""What lies in shared memory beside the data, and one rank's view of the two-way link to one peer.

Every rank has a *board*, written by it alone: who it is, the files of its data, what it waits for, and for every peer
a ring of letters (what this rank has sent to it) and a ring of receipts (which of the peer's letters it has read).

* A letter says where the data lies in the sender's memory; the reader copies, or adds, straight out of it.
* A semaphore per ring counts its entries, and orders memory: an entry and the data behind it are written before the
  post and read after the take; a receipt is posted after the last read, and the sender reuses a block, or a slot of
  the ring, only after it has taken the receipt. Nothing else needs to be ordered.
* The counters and the record of waits are for error messages and for finding deadlocks. They may be seen late, so a
  verdict needs to see the same twice.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from functools import lru_cache
from typing import NamedTuple

from workbench.runtime.transport.arena import Arena
from workbench.runtime.transport.mapped import Mapping
from workbench.runtime.transport.semaphores import SEMAPHORE_BYTES, Semaphores

NUM_SLOTS = 128
"""Letters to one peer that may be unread; more wait in the sender's own memory, so that sending never blocks."""
MAX_CHUNKS = 32
_SLOT_BYTES = 512
_LETTER = struct.Struct("<qqqqq")  # tag, bytes of data, chunk, offset, bytes of header
_MAX_HEADER = _SLOT_BYTES - _LETTER.size
_WAIT = struct.Struct("<qqq")  # number of the record, peer (or -1), bytes of header
_MAX_REASON = 2000

# Words of 8 bytes at the start of a board.
_TOKEN, _STATE, _NUM_CHUNKS, _CHUNKS = 0, 1, 2, 8
_WAIT_AT, _REASON_AT, _PER_PEER_AT = 1024, 2048, 4096
RUNNING, FAILED, LEFT = 0, 1, 2
"""States of a rank."""


class Letter(NamedTuple):
    """A message that has arrived: its place among the sender's letters, and where its data lies."""

    position: int
    num_bytes: int
    chunk: int
    offset: int
    header: bytes


class Wait(NamedTuple):
    """What a rank waits for; ``number`` changes with every wait."""

    number: int
    peer: int
    header: str


class Block:
    """A part of an arena and how many readers it still has, its owner included."""

    __slots__ = ("arena", "chunk", "num_bytes", "num_readers", "offset")

    def __init__(self, arena: Arena, chunk: int, offset: int, num_bytes: int) -> None:
        self.arena, self.chunk, self.offset, self.num_bytes, self.num_readers = arena, chunk, offset, num_bytes, 1

    def leave(self) -> None:
        """One reader fewer; the last one frees the block."""
        self.num_readers -= 1
        if self.num_readers == 0:
            self.arena.free(self.offset, self.num_bytes)


@lru_cache(maxsize=1024)
def encode_header(header: str) -> bytes:
    """The words of a call as they travel: cut where they are long, with a hash of the whole."""
    text = header.encode()
    if len(text) <= _MAX_HEADER:
        return text
    digest = hashlib.blake2b(text, digest_size=6).hexdigest().encode()
    return text[: _MAX_HEADER - len(digest) - 5] + b"... #" + digest


class Board:
    """A rank's board, its own or a peer's: the offsets of everything on it."""

    def __init__(self, mapping: Mapping, world_size: int) -> None:
        self.mapping, self.world_size = mapping, world_size
        self.words = mapping.data.cast("q")
        self._semaphores_at = _PER_PEER_AT + -(-16 * world_size // SEMAPHORE_BYTES) * SEMAPHORE_BYTES
        self._receipts_at = self._semaphores_at + 2 * world_size * SEMAPHORE_BYTES
        self._letters_at = self._receipts_at + world_size * NUM_SLOTS * 8

    @staticmethod
    def size_for(world_size: int) -> int:
        """Bytes of a board."""
        per_peer = 16 + SEMAPHORE_BYTES + 2 * SEMAPHORE_BYTES + NUM_SLOTS * (8 + _SLOT_BYTES)
        return -(-(_PER_PEER_AT + SEMAPHORE_BYTES + world_size * per_peer) // 4096) * 4096

    def initialise(self, token: int, semaphores: Semaphores) -> None:
        """Prepare this rank's own board."""
        self.words[_TOKEN] = token
        self.words[_WAIT_AT // 8 + 1] = -1
        for peer in range(self.world_size):
            semaphores.initialise(self.letter_semaphore(peer))
            semaphores.initialise(self.receipt_semaphore(peer))

    def letter_semaphore(self, peer: int) -> int:
        """Address of the semaphore that counts letters to ``peer``."""
        return self.mapping.address + self._semaphores_at + 2 * peer * SEMAPHORE_BYTES

    def receipt_semaphore(self, peer: int) -> int:
        """Address of the semaphore that counts receipts for ``peer``."""
        return self.letter_semaphore(peer) + SEMAPHORE_BYTES

    def letters(self, peer: int) -> memoryview:
        """The ring of letters to ``peer``."""
        start = self._letters_at + peer * NUM_SLOTS * _SLOT_BYTES
        return self.mapping.data[start : start + NUM_SLOTS * _SLOT_BYTES]

    def receipts(self, peer: int) -> memoryview:
        """The ring of receipts for ``peer``, as words."""
        start = self._receipts_at // 8 + peer * NUM_SLOTS
        return self.words[start : start + NUM_SLOTS]

    def sent_word(self, peer: int) -> int:
        """Index of the word that says how many letters this rank has sent to ``peer``, waiting ones included."""
        return _PER_PEER_AT // 8 + peer

    def read_word(self, peer: int) -> int:
        """Index of the word that says how many letters of ``peer`` this rank has taken."""
        return _PER_PEER_AT // 8 + self.world_size + peer

    @property
    def token(self) -> int:
        """The random number that tells this board from any other file."""
        return self.words[_TOKEN]

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

    def write_wait(self, peer: int, header: bytes) -> None:
        """Say that this rank waits for ``peer``; -1: for nobody."""
        number = self.words[_WAIT_AT // 8]
        self.mapping.data[_WAIT_AT + _WAIT.size : _WAIT_AT + _WAIT.size + len(header)] = header
        _WAIT.pack_into(self.mapping.data, _WAIT_AT, number + 1, peer, len(header))

    def wait(self) -> Wait | None:
        """What this rank waits for, if it does."""
        number, peer, length = _WAIT.unpack_from(self.mapping.data, _WAIT_AT)
        if peer < 0:
            return None
        text = self.mapping.data[_WAIT_AT + _WAIT.size : _WAIT_AT + _WAIT.size + min(length, _MAX_HEADER)]
        return Wait(number, peer, bytes(text).decode(errors="replace"))


class Link:
    """Both directions between this rank and one peer.

    Attributes:
        arrived: letters that were read from the ring, by tag; their data is still in the sender's memory.
        chunks: the peer's files of data that this rank has mapped.
    """

    def __init__(self, rank: int, peer: int, pid: int, own: Board, theirs: Board, semaphores: Semaphores) -> None:
        self.rank, self.peer, self.pid, self.theirs = rank, peer, pid, theirs
        self.arrived: dict[int, deque[Letter]] = {}
        self.chunks: dict[int, Mapping] = {}
        self._own, self._post, self._try_take = own, semaphores.post, semaphores.try_take
        self._letters_out, self._letters_in = own.letters(peer), theirs.letters(rank)
        self._receipts_out, self._receipts_in = own.receipts(peer), theirs.receipts(rank)
        self._letter_sent, self._receipt_sent = own.letter_semaphore(peer), own.receipt_semaphore(peer)
        self.letter_came, self._receipt_came = theirs.letter_semaphore(rank), theirs.receipt_semaphore(rank)
        self._sent_word, self._read_word = own.sent_word(peer), own.read_word(peer)
        self._num_sent = self._num_read = self._num_receipts_out = self._num_receipts_in = 0
        self._unread: dict[int, Block | None] = {}
        self._backlog: deque[tuple[int, Block | None, int, bytes]] = deque()

    def send(self, tag: int, block: Block | None, num_bytes: int, header: bytes) -> None:
        """Send a letter about ``block`` (None: no data); never waits."""
        if block is not None:
            block.num_readers += 1
        self._own.words[self._sent_word] += 1
        self._backlog.append((tag, block, num_bytes, header))
        self.push()

    def push(self) -> bool:
        """Put letters into the ring as far as there is room; says whether all are in."""
        backlog = self._backlog
        while backlog:
            if self._num_sent - self._num_receipts_in >= NUM_SLOTS:
                self.collect()
                if self._num_sent - self._num_receipts_in >= NUM_SLOTS:
                    return False
            tag, block, num_bytes, header = backlog.popleft()
            at = self._num_sent % NUM_SLOTS * _SLOT_BYTES
            chunk, offset = (block.chunk, block.offset) if block is not None else (0, 0)
            _LETTER.pack_into(self._letters_out, at, tag, num_bytes, chunk, offset, len(header))
            self._letters_out[at + _LETTER.size : at + _LETTER.size + len(header)] = header
            self._unread[self._num_sent] = block
            self._num_sent += 1
            self._post(self._letter_sent)
        return True

    def collect(self) -> None:
        """Take the peer's receipts; blocks that all have read become free."""
        while self._unread and self._try_take(self._receipt_came) == 0:
            position = self._receipts_in[self._num_receipts_in % NUM_SLOTS]
            self._num_receipts_in += 1
            block = self._unread.pop(position)
            if block is not None:
                block.leave()

    def read(self) -> bool:
        """Take the next letter out of the ring, if there is one."""
        if self._try_take(self.letter_came) != 0:
            return False
        self.read_taken()
        return True

    def read_taken(self) -> None:
        """The same when the semaphore has been taken already."""
        at = self._num_read % NUM_SLOTS * _SLOT_BYTES
        tag, num_bytes, chunk, offset, length = _LETTER.unpack_from(self._letters_in, at)
        header = bytes(self._letters_in[at + _LETTER.size : at + _LETTER.size + length])
        self.arrived.setdefault(tag, deque()).append(Letter(self._num_read, num_bytes, chunk, offset, header))
        self._num_read += 1
        self._own.words[self._read_word] = self._num_read

    def acknowledge(self, letter: Letter) -> None:
        """This rank has read what ``letter`` is about."""
        self._receipts_out[self._num_receipts_out % NUM_SLOTS] = letter.position
        self._num_receipts_out += 1
        self._post(self._receipt_sent)

    def mapping(self, chunk: int) -> Mapping:
        """The peer's file that a letter refers to; opened at its first use."""
        found = self.chunks.get(chunk)
        if found is None:
            found = self.chunks[chunk] = Mapping.open(self.pid, *self.theirs.chunk(chunk))
        return found

    @property
    def has_files_to_open(self) -> bool:
        """Whether the peer may still have to open a file of this rank, to read a letter."""
        return any(block is not None and block.chunk > 0 for block in self._unread.values())
