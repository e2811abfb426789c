"""Runs one rank's part of an exchange the other way round: ranks say where their new shards lie, the others fill them.

So no shard has to be copied to be sent, wherever it lies. What ranks wait for is the same as with ``pulling``: a letter
of every peer, then that it has finished.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from workbench.runtime.transport.letters.board import encode_header
from workbench.runtime.transport.letters.link import Block, Lent, Letter, Link, Loan
from workbench.runtime.transport.letters.mailbox import Mailbox
from workbench.runtime.transport.letters.mapped import Mapping
from workbench.runtime.transport.letters.program import Program, Write
from workbench.runtime.transport.letters.runs import views_of
from workbench.runtime.transport.shared.segment import Segment, is_plain


def push(segment: Segment, mailbox: Mailbox, program: Program, local: torch.Tensor, tag: int) -> torch.Tensor:
    """The new shard of this rank."""
    header, links = encode_header(program.header), mailbox.links
    assert program.out_shape is not None
    out, block = segment.empty_in_block(program.out_shape, program.dtype)
    room: Lent
    if block is not None:
        room = Loan(block.chunk, block.offset)
    else:  # ordinary memory, which the others do not reach
        room = segment.allocate(program.out_bytes, header)
    for rank in program.writers:
        links[rank].send(tag, room, program.out_bytes, header)
    letters = _write(segment, mailbox, program, local, tag, header, room)
    for link, letter in letters:
        link.acknowledge(letter)
    mailbox.settle(room, program.writers, header)
    mailbox.read_bytes += program.read_bytes
    if isinstance(room, Block):
        out.copy_(segment.view(room, program.out_shape, program.dtype))
        room.leave()
    return out


def _write(
    segment: Segment,
    mailbox: Mailbox,
    program: Program,
    local: torch.Tensor,
    tag: int,
    header: bytes,
    room: Lent,
) -> list[tuple[Link, Letter]]:
    """Fill in this rank's slices when all places are known: copy behind copy, see ``views_of``."""
    links = mailbox.links
    shard = local if is_plain(local) else local.detach().contiguous().resolve_conj().resolve_neg()
    letters: list[tuple[Link, Letter]] = []
    views: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
    for target in program.targets:
        if target.rank == mailbox.rank:
            memory, offset = segment.chunks[room.chunk], room.offset
        else:
            link = links[target.rank]
            letter = mailbox.take(target.rank, tag, header, target.shard_bytes)
            letters.append((link, letter))
            memory, offset = link.mapping(letter.chunk), letter.offset
        for write in target.writes:
            if write.runs is None:
                _write_short_runs(write, shard, memory, offset)
            else:
                places = shard.data_ptr() + write.source.start, memory.address + offset + write.goal.start
                views.append(views_of(write.runs, *places))
    for taken, given in views:
        given[...] = taken
    return letters


def _write_short_runs(write: Write, shard: torch.Tensor, memory: Mapping, offset: int) -> None:
    source, goal, _ = write
    start = shard.storage_offset() + source.start // shard.element_size()
    place = memory.strided(offset + goal.start, goal.shape, goal.strides, shard.dtype)
    place.copy_(shard.detach().as_strided(source.shape, source.strides, start))
