"""Small exchanges that their ranks run together again and again: fixed memory on every rank, and no receipts.

A rank writes its shard into one of two buffers in turn and sends a letter to each reader. When it comes to a buffer
again it has, for the exchange in between, had a letter from every reader, who sent it after reading this buffer: that
is why the exchange must be mutual. Since the places are fixed, views of them are made once, and an exchange of a few
kilobytes is one copy, one letter to each rank, one from each, and one torch operation.
"""

from __future__ import annotations

import ctypes

import torch

from workbench.transport.letters.arena import Arena
from workbench.transport.letters.board import encode_header
from workbench.transport.letters.link import TAG_BYTES, Letter, Link, content_of, letter_without_receipt
from workbench.transport.letters.mailbox import Mailbox
from workbench.transport.letters.mapped import Mapping
from workbench.transport.letters.program import Program, Read
from workbench.transport.reducing import combine, combined
from workbench.transport.shared.segment import LENT_FROM_BYTES, Segment, is_plain

STEADY_BYTES = 2 * 2**20
"""How much of a rank's first chunk, at its end, is for these buffers."""
_copy_bytes = ctypes.memmove


class SteadyPrograms:
    """The buffers of one rank's programs; those not run for longest make room for new ones."""

    def __init__(self, segment: Segment, mailbox: Mailbox) -> None:
        self._segment, self._mailbox = segment, mailbox
        self._arena = Arena(STEADY_BYTES)
        self._found: dict[Program, Steady] = {}

    def of(self, program: Program) -> Steady | None:
        """The program's buffers; None where it can have none now."""
        found = self._found.get(program)
        if found is None and program.may_lend and 0 < program.shard_bytes < LENT_FROM_BYTES:
            offset = self._arena.allocate(2 * program.buffer_bytes)
            if offset is None:
                self._drop_oldest()
                offset = self._arena.allocate(2 * program.buffer_bytes)
            if offset is not None:
                chunk = self._segment.chunks[0]
                start = chunk.size - STEADY_BYTES + offset
                found = self._found[program] = Steady(program, self._segment, self._mailbox, chunk, start)
        return found

    def _drop_oldest(self) -> None:
        """Free what nobody can still be reading: every reader has sent a later letter since."""
        base = self._segment.chunks[0].size - STEADY_BYTES
        idle = sorted((s for s in self._found.values() if s.is_idle), key=lambda steady: steady.last_run)
        for steady in idle[: max(1, len(idle) // 2)]:
            self._arena.free(steady.start - base, 2 * steady.program.buffer_bytes)
            del self._found[steady.program]


class Steady:
    """Two buffers of one program, and views of what is read from them and from the others'."""

    def __init__(self, program: Program, segment: Segment, mailbox: Mailbox, chunk: Mapping, start: int) -> None:
        self.program, self.start, self.last_run = program, start, 0
        self._segment, self._mailbox, self._chunk = segment, mailbox, chunk
        self._header = encode_header(program.header)
        self._turn = 0
        self._readers = [mailbox.links[rank] for rank, _, _ in program.sends]
        reads = [read for place in program.places for read in place.reads if read.source != mailbox.rank]
        self._reads = [(read, mailbox.links[read.source]) for read in reads]
        self._letters: list[list[Letter | None]] = [[None] * len(reads), [None] * len(reads)]
        self._contents: list[list[bytes | None]] = [[None] * len(reads), [None] * len(reads)]
        self._views: list[list[list[torch.Tensor]]] = [[], []]
        self._num_read: list[int] = []

    @property
    def is_idle(self) -> bool:
        """Whether all readers have gone on since the last run."""
        return all(link.num_read > count for (_, link), count in zip(self._reads, self._num_read, strict=False))

    def run(self, local: torch.Tensor, tag: int) -> torch.Tensor:
        """The new shard."""
        program, mailbox = self.program, self._mailbox
        self._turn = turn = 1 - self._turn
        offset = self.start + turn * program.buffer_bytes
        if is_plain(local):
            _copy_bytes(self._chunk.address + offset, local.data_ptr(), program.shard_bytes)
        else:
            self._chunk.tensor(offset, tuple(local.shape), program.dtype).copy_(local.detach())
        message = letter_without_receipt(tag, 0, offset, program.shard_bytes, self._header)
        for link in self._readers:
            link.send_without_receipt(message)
        kept = self._take(tag, message, turn)
        result = self._put_together(self._views[turn] or self._make_views(turn, offset))
        for link, letter in kept:
            link.acknowledge(letter)
        self._num_read = [link.num_read for _, link in self._reads]
        self.last_run = mailbox.num_taken
        mailbox.read_bytes += program.read_bytes
        return result

    def _take(self, tag: int, message: bytes, turn: int) -> list[tuple[Link, Letter]]:
        """Return when all letters have come, with those that want receipts.

        A rank's letter says where its shard lies, which is the same whenever it is this turn: so it is compared with
        what came then, and read only if it says something else.
        """
        kept: list[tuple[Link, Letter]] = []
        contents, mailbox, tag_bytes = self._contents[turn], self._mailbox, message[:TAG_BYTES]
        for number, (read, link) in enumerate(self._reads):
            content = contents[number]
            if content is not None and mailbox.takes_same(link, tag_bytes + content, self._header):
                continue
            letter = mailbox.take(read.source, tag, self._header, read.shard_bytes, read.part.num_bytes)
            if letter.wants_receipt:
                kept.append((link, letter))
            says = None if letter.wants_receipt else content_of(letter)
            if says is None or says != content:
                contents[number], self._letters[turn][number], self._views[turn] = says, letter, []
        return kept

    def _put_together(self, views: list[list[torch.Tensor]]) -> torch.Tensor:
        program = self.program
        if program.out_bytes < LENT_FROM_BYTES:
            if program.joined_dim is not None:
                return torch.cat(views[0], program.joined_dim).contiguous()
            if len(views) == 1:
                return combined(views[0], program.reduction)
        assert program.out_shape is not None
        out = self._segment.empty(program.out_shape, program.dtype)
        if program.joined_dim is not None:
            return torch.cat(views[0], program.joined_dim, out=out)
        if len(views) == 1:
            combine(views[0], out, program.reduction)
            return out
        for place, terms in zip(program.places, views, strict=True):
            part = place.part
            goal = out.as_strided(part.shape, part.strides, part.start // program.dtype.itemsize)
            combine(terms, goal, program.reduction)
        return out

    def _make_views(self, turn: int, offset: int) -> list[list[torch.Tensor]]:
        """Views of the slices, by place, in the order in which they are combined; or all in the order of joining."""
        letters = iter(self._letters[turn])
        views = [
            [self._own(read, offset) if read.source == self._mailbox.rank else self._view(read, next(letters))
             for read in place.reads]
            for place in self.program.places
        ]  # fmt: skip
        if self.program.joined_dim is not None:
            views = [[views[index][0] for index in self.program.joined_order]]
        self._views[turn] = views
        return views

    def _own(self, read: Read, offset: int) -> torch.Tensor:
        part = read.part
        return self._chunk.strided(offset + part.start, part.shape, part.strides, self.program.dtype)

    def _view(self, read: Read, letter: Letter | None) -> torch.Tensor:
        assert letter is not None
        return self._mailbox.lent(read, letter, self.program.dtype)
