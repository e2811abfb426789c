"""Runs one rank's part of an exchange the other way round: ranks say where their new shards lie, the others fill them.

So no shard has to be copied to be sent, wherever it lies. A rank waits for two letters of every peer: where its new
shard lies, and that it has written.

Behind a large copy the caches are full of data, and whatever Python does takes several times as long. So all that a
boxing does beside copying is made once and kept: if it comes again in the same places, letters are compared, not read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from workbench.core.layout import balanced_bounds
from workbench.transport.letters.board import encode_header
from workbench.transport.letters.link import TAG, TAG_BYTES, Block, Letter, content_of, letter_without_receipt
from workbench.transport.letters.mailbox import Mailbox
from workbench.transport.letters.mapped import Mapping
from workbench.transport.letters.program import Program, Write
from workbench.transport.letters.runs import views_of
from workbench.transport.shared.segment import Segment, is_plain

BLOCK_BYTES = 512 * 2**10
"""A block of the shard goes to all ranks before the next one does: what is read for one of them brings what lies beside
it into the cache, for the others."""
_MAX_PREPARED = 64
_Views = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""Of a slice's runs, here and there."""


class Pushes:
    """What one rank has prepared for its boxings of large rows."""

    def __init__(self, segment: Segment, mailbox: Mailbox) -> None:
        self._segment, self._mailbox = segment, mailbox
        self._prepared: dict[Program, Push] = {}

    def of(self, program: Program) -> Push:
        """The program, prepared."""
        found = self._prepared.get(program)
        if found is None:
            if len(self._prepared) == _MAX_PREPARED:
                self._prepared.clear()
            found = self._prepared[program] = Push(program, self._segment, self._mailbox)
        return found


class Push:
    """One boxing, what its ranks said when it came last, and views of the places of that time."""

    def __init__(self, program: Program, segment: Segment, mailbox: Mailbox) -> None:
        self.program, self._segment, self._mailbox = program, segment, mailbox
        links = mailbox.links
        self._header = encode_header(program.header)
        self._writers = [links[rank] for rank in program.writers]
        self._targets = [(links[target.rank], target) for target in program.targets if target.rank != mailbox.rank]
        partners = [*program.writers, *(target.rank for _, target in self._targets)]
        self._partners = [links[rank] for rank in dict.fromkeys(partners)]
        self._written = letter_without_receipt(0, 0, 0, 0, self._header)[TAG_BYTES:]
        self._room, self._place = b"", (-1, -1)
        self._said: list[bytes | None] = [None] * len(self._targets)
        self._rooms: list[Letter | None] = [None] * len(self._targets)
        self._source, self._views = 0, list[_Views]()
        self._short: list[tuple[Write, torch.Tensor]] = []

    def run(self, local: torch.Tensor, tag: int) -> torch.Tensor:
        """The new shard."""
        program, segment, mailbox = self.program, self._segment, self._mailbox
        assert program.out_shape is not None
        block = segment.room_for_tensor(program.out_bytes)
        # There may be no room for the new shard where the others reach it: then they write into a block.
        room = segment.allocate(program.out_bytes, self._header) if block is None else block
        self._tell_room(room, TAG.pack(tag | 1))
        shard = local if is_plain(local) else local.detach().resolve_conj().resolve_neg().contiguous()
        self._write(shard, tag | 1, room)
        written = TAG.pack(tag) + self._written
        for link in self._partners:
            link.send_without_receipt(written)
        if block is not None:
            out = segment.tensor_in(block, program.out_shape, program.dtype)
        for link in self._partners:
            if not mailbox.takes_same(link, written, self._header):
                mailbox.take(link.peer, tag, self._header, 0)
        mailbox.read_bytes += program.read_bytes
        if block is None:
            out = segment.view(room, program.out_shape, program.dtype).clone()
            room.leave()
        return out

    def _tell_room(self, room: Block, tag: bytes) -> None:
        """Tell the writers where the new shard lies."""
        if self._place != (room.chunk, room.offset):
            self._place, self._views = (room.chunk, room.offset), []
            letter = letter_without_receipt(0, *self._place, self.program.out_bytes, self._header)
            self._room = letter[TAG_BYTES:]
        letter = tag + self._room
        for link in self._writers:
            link.send_without_receipt(letter)

    def _write(self, shard: torch.Tensor, tag: int, room: Block) -> None:
        """Fill in this rank's slices when all places are known, block behind block of its shard."""
        mailbox, tag_bytes = self._mailbox, TAG.pack(tag)
        for number, (link, target) in enumerate(self._targets):
            said = self._said[number]
            if said is None or not mailbox.takes_same(link, tag_bytes + said, self._header):
                letter = mailbox.take(target.rank, tag, self._header, target.shard_bytes)
                if content_of(letter) != said:
                    self._said[number], self._rooms[number], self._views = content_of(letter), letter, []
        if self._source != shard.data_ptr():
            self._source, self._views = shard.data_ptr(), []
        for taken, given in self._views or self._find_views(room):
            given[...] = taken
        for write, place in self._short:
            start = shard.storage_offset() + write.source.start // shard.element_size()
            place.copy_(shard.detach().as_strided(write.source.shape, write.source.strides, start))

    def _find_views(self, room: Block) -> list[_Views]:
        """Of the slices' runs here and there; of those whose runs are short, the places alone."""
        own = [(target, room) for target in self.program.targets if target.rank == self._mailbox.rank]
        others = [(target, letter) for (_, target), letter in zip(self._targets, self._rooms, strict=True)]
        self._short = []
        views: list[_Views] = []
        for target, lies in [*own, *others]:
            assert lies is not None
            memory = self._memory(target.rank, lies.chunk)
            for write in target.writes:
                goal = write.goal
                if write.runs is None:
                    place = memory.strided(lies.offset + goal.start, goal.shape, goal.strides, self.program.dtype)
                    self._short.append((write, place))
                else:
                    places = self._source + write.source.start, memory.address + lies.offset + goal.start
                    views.append(views_of(write.runs, *places))
        self._views = _block_by_block(views, -(-self.program.shard_bytes // BLOCK_BYTES))
        return self._views

    def _memory(self, rank: int, chunk: int) -> Mapping:
        return self._segment.chunks[chunk] if rank == self._mailbox.rank else self._mailbox.links[rank].mapping(chunk)


def _block_by_block(views: list[_Views], num_blocks: int) -> list[_Views]:
    """The same copies, each cut into as many parts, in the order of the shard."""
    cuts = [balanced_bounds(len(given), num_blocks) for _, given in views]
    return [
        (taken[start:stop], given[start:stop])
        for bounds in zip(*cuts, strict=True)
        for (taken, given), (start, stop) in zip(views, bounds, strict=True)
        if start < stop
    ]
