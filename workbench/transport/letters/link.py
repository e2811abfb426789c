"""One rank's end of the two-way link to one peer: two rings in each direction.

A *letter* says where data lies in the sender's memory; the reader copies, or adds, straight out of it. A *receipt*
says that a letter's data has been read, so that its block can be used again; letters are read out of order where tags
say so, and receipts follow.

Each ring has two semaphores, ``filled`` (posted after an entry and the data behind it are written) and ``emptied``
(posted once for every ``_READ_TOGETHER`` entries, after they were read: a post costs as much as an entry). An entry is
read after a take of the first, and overwritten after a take of the second; a block is used again after the take of its
last receipt. This orders all accesses to shared data, on every machine. An entry for which a ring has no room waits in
its writer's own memory: writing never blocks.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import NamedTuple, Protocol

from workbench.transport.letters.arena import Arena
from workbench.transport.letters.board import LETTER, LETTER_SLOT_BYTES, NUM_SLOTS, Board
from workbench.transport.letters.mapped import Mapping
from workbench.transport.letters.semaphores import Semaphores

TAG = struct.Struct("<q")
TAG_BYTES = TAG.size
"""A letter begins with its tag."""
_READ_TOGETHER = 16
"""Divides the number of slots."""


class Letter(NamedTuple):
    """A message that has arrived: its place among the sender's letters, and where its data lies."""

    position: int
    num_bytes: int
    chunk: int
    offset: int
    header: bytes
    wants_receipt: int


def letter_without_receipt(tag: int, chunk: int, offset: int, num_bytes: int, header: bytes) -> bytes:
    """A letter about memory whose readers will be known to have finished in another way."""
    return LETTER.pack(tag, num_bytes, chunk, offset, 0, len(header)) + header


def content_of(letter: Letter) -> bytes:
    """What a letter says beside its tag."""
    return LETTER.pack(0, *letter[1:4], letter.wants_receipt, len(letter.header))[TAG_BYTES:] + letter.header


class Lent(Protocol):
    """Memory of this rank's that peers read, and how many still do."""

    chunk: int
    offset: int
    num_readers: int

    def leave(self) -> None:
        """One reader fewer."""


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


class Loan:
    """A tensor's own memory while peers read it: it may not be written before ``num_readers`` is 0 again."""

    __slots__ = ("chunk", "num_readers", "offset")

    def __init__(self, chunk: int, offset: int) -> None:
        self.chunk, self.offset, self.num_readers = chunk, offset, 0

    def leave(self) -> None:
        """One reader fewer."""
        self.num_readers -= 1


_NO_RECEIPT = Loan(0, 0)
"""Stands for memory of which no receipt is wanted."""


class Link:
    """Both directions between this rank and one peer.

    Attributes:
        arrived: letters that were read from the ring, by tag; their data is still in the sender's memory.
        letter_came, receipt_came: the semaphores to wait for.
        num_read: letters that have been read from the ring.
    """

    def __init__(self, rank: int, peer: int, pid: int, own: Board, theirs: Board, semaphores: Semaphores) -> None:
        self.peer, self.pid, self.theirs = peer, pid, theirs
        self.arrived: dict[int, deque[Letter]] = {}
        self._chunks: dict[int, Mapping] = {}
        self._own_words, self._post, self._try_take = own.words, semaphores.post, semaphores.try_take
        self._sent_word, self._read_word = own.sent_word(peer), own.read_word(peer)
        self._receipts_sent_word, self._receipts_read_word = own.receipts_sent_word(peer), own.receipts_read_word(peer)

        self._letters_out, self._letter_sent = own.letters(peer), own.letters_filled(peer)
        self._letter_was_read = theirs.letters_emptied(rank)
        self._num_sent, self._room_for_letters = 0, NUM_SLOTS
        self._letters_left: deque[tuple[bytes, Lent | None]] = deque()
        self._unread: dict[int, Lent | None] = {}

        self._letters_in, self.letter_came = theirs.letters(rank), theirs.letters_filled(rank)
        self._letter_read = own.letters_emptied(peer)
        self.num_read = 0

        self._receipts_out, self._receipt_sent = own.receipts(peer), own.receipts_filled(peer)
        self._receipt_was_read = theirs.receipts_emptied(rank)
        self._num_receipts_out, self._room_for_receipts = 0, NUM_SLOTS
        self._receipts_left: deque[int] = deque()

        self._receipts_in, self.receipt_came = theirs.receipts(rank), theirs.receipts_filled(rank)
        self._receipt_read = own.receipts_emptied(peer)
        self._num_receipts_in = 0

    def send(
        self,
        tag: int,
        block: Lent | None,
        num_bytes: int,
        header: bytes,
        offset_in_block: int = 0,
        mark: int = 1,
    ) -> None:
        """Send a letter about ``num_bytes`` of ``block`` (None: no data), of which a receipt is wanted.

        ``mark``: any number but 0, which the reader finds in the letter's ``wants_receipt``.
        """
        if block is not None:
            block.num_readers += 1
        chunk, offset = (block.chunk, block.offset + offset_in_block) if block is not None else (0, 0)
        self._send(LETTER.pack(tag, num_bytes, chunk, offset, mark, len(header)) + header, block)

    def send_without_receipt(self, letter: bytes) -> None:
        """Send what ``letter_without_receipt`` has made: ``_send`` in one go, since this is what small boxings do."""
        if self._letters_left or not self._room_for_letters:
            self._send(letter, _NO_RECEIPT)
            return
        self._own_words[self._sent_word] += 1
        at = self._num_sent % NUM_SLOTS * LETTER_SLOT_BYTES
        self._letters_out[at : at + len(letter)] = letter
        self._num_sent += 1
        self._room_for_letters -= 1
        self._post(self._letter_sent)

    def _send(self, letter: bytes, lent: Lent | None) -> None:
        self._own_words[self._sent_word] += 1
        if self._room_for_letters and not self._letters_left:
            self._put(letter, lent)
        else:
            self._letters_left.append((letter, lent))
            self.push()

    def _put(self, letter: bytes, lent: Lent | None) -> None:
        at = self._num_sent % NUM_SLOTS * LETTER_SLOT_BYTES
        self._letters_out[at : at + len(letter)] = letter
        if lent is not _NO_RECEIPT:
            self._unread[self._num_sent] = lent
        self._num_sent += 1
        self._room_for_letters -= 1
        self._post(self._letter_sent)

    def push(self) -> bool:
        """Put letters and receipts into their rings as far as there is room; says whether all letters are in."""
        if self._receipts_left:
            self._push_receipts()
        while self._letters_left:
            if not self._room_for_letters:
                while self._try_take(self._letter_was_read) == 0:
                    self._room_for_letters += _READ_TOGETHER
                if not self._room_for_letters:
                    return False
            self._put(*self._letters_left.popleft())
        return True

    def collect(self) -> bool:
        """Take the peer's receipts, if there are any; blocks that all have read become free."""
        unread, found = self._unread, False
        while unread and self._try_take(self.receipt_came) == 0:
            self.collect_taken()
            found = True
        return found

    def collect_taken(self) -> None:
        """One receipt, when ``receipt_came`` has been taken already."""
        position = self._receipts_in[self._num_receipts_in % NUM_SLOTS]
        self._num_receipts_in += 1
        if self._num_receipts_in % _READ_TOGETHER == 0:
            self._post(self._receipt_read)
        self._own_words[self._receipts_read_word] = self._num_receipts_in
        block = self._unread.pop(position)
        if block is not None:
            block.leave()

    def owes(self, loan: Lent) -> bool:
        """Whether the peer has yet to read something that lies in ``loan``."""
        return any(lent is loan for lent in self._unread.values()) or any(
            lent is loan for _, lent in self._letters_left
        )

    def expect(self, tag: int) -> Letter | None:
        """The next letter with this tag, if it is there; others are kept."""
        letters = self.arrived.get(tag)
        if letters is not None:
            letter = letters.popleft()
            if not letters:
                del self.arrived[tag]
            return letter
        while self._try_take(self.letter_came) == 0:
            found, letter = self._take_out()
            if found == tag:
                return letter
            self.arrived.setdefault(found, deque()).append(letter)
        return None

    def take_announced(self) -> bool:
        """Take the announcement of the next letter of the ring, if there is one."""
        return self._try_take(self.letter_came) == 0

    def is_same(self, letter: bytes) -> bool:
        """Take the next letter of the ring, already announced, if it says exactly this; else it is kept."""
        at = self.num_read % NUM_SLOTS * LETTER_SLOT_BYTES
        if bytes(self._letters_in[at : at + len(letter)]) != letter:
            self.read_taken()
            return False
        self._note_read()
        return True

    def read(self) -> bool:
        """Keep the next letter of the ring, if there is one."""
        if self._try_take(self.letter_came) != 0:
            return False
        self.read_taken()
        return True

    def read_taken(self) -> None:
        """Keep the next letter of the ring, when ``letter_came`` has been taken already."""
        tag, letter = self._take_out()
        self.arrived.setdefault(tag, deque()).append(letter)

    def _take_out(self) -> tuple[int, Letter]:
        number = self.num_read
        at = number % NUM_SLOTS * LETTER_SLOT_BYTES
        tag, num_bytes, chunk, offset, wants_receipt, length = LETTER.unpack_from(self._letters_in, at)
        header = bytes(self._letters_in[at + LETTER.size : at + LETTER.size + length])
        self._note_read()
        return tag, Letter(number, num_bytes, chunk, offset, header, wants_receipt)

    def _note_read(self) -> None:
        self.num_read = self._own_words[self._read_word] = self.num_read + 1
        if self.num_read % _READ_TOGETHER == 0:
            self._post(self._letter_read)

    def acknowledge(self, letter: Letter) -> None:
        """This rank has read what ``letter`` is about."""
        self._own_words[self._receipts_sent_word] += 1
        self._receipts_left.append(letter.position)
        self._push_receipts()

    def _push_receipts(self) -> None:
        while self._receipts_left:
            if not self._room_for_receipts:
                while self._try_take(self._receipt_was_read) == 0:
                    self._room_for_receipts += _READ_TOGETHER
                if not self._room_for_receipts:
                    return
            self._receipts_out[self._num_receipts_out % NUM_SLOTS] = self._receipts_left.popleft()
            self._num_receipts_out += 1
            self._room_for_receipts -= 1
            self._post(self._receipt_sent)

    def mapping(self, chunk: int) -> Mapping:
        """The peer's file that a letter refers to; opened at its first use."""
        found = self._chunks.get(chunk)
        if found is None:
            found = self._chunks[chunk] = Mapping.open(self.pid, *self.theirs.chunk(chunk))
        return found

    @property
    def has_unread(self) -> bool:
        """Whether the peer has yet to read something of this rank's."""
        return bool(self._unread or self._letters_left)

    @property
    def has_files_to_open(self) -> bool:
        """Whether the peer may still have to open a file of this rank, to read a letter."""
        return any(block is not None and block.chunk > 0 for block in self._unread.values())
