"""Runs one rank's part of an exchange: offer the shard, read the others' slices straight into the new one.

A shard that lies in the segment is lent: the others read it in place, and this rank waits until they have, because its
owner may write to it right after. All else is copied into a block, and nobody waits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from workbench.transport.letters.board import encode_header
from workbench.transport.letters.link import Block, Letter, Loan
from workbench.transport.letters.mailbox import Mailbox
from workbench.transport.letters.mapped import contiguous_strides
from workbench.transport.letters.program import Part, Place, Program
from workbench.transport.letters.runs import copy_runs, runs_of
from workbench.transport.reducing import combine
from workbench.transport.shared.segment import LENT_FROM_BYTES, Segment, is_plain

_copy_bytes = ctypes.memmove


def pull(segment: Segment, mailbox: Mailbox, program: Program, local: torch.Tensor, tag: int) -> torch.Tensor | None:
    """The new shard of this rank; None if it only sends."""
    header = encode_header(program.header)
    loan = _offer(segment, mailbox, program, local, tag, header) if program.sends else None
    out = None
    if program.out_shape is not None:
        out = segment.empty(program.out_shape, program.dtype)
        if program.interleaves:
            _join(mailbox, program, local, tag, header, out)
        else:
            _fill(mailbox, program, local, tag, header, out)
        mailbox.read_bytes += program.read_bytes
    if loan is not None:
        mailbox.settle(loan, [send[0] for send in program.sends], header)
    return out


def _offer(
    segment: Segment, mailbox: Mailbox, program: Program, local: torch.Tensor, tag: int, header: bytes
) -> Loan | None:
    """Tell everyone who reads from this rank's shard where it is, or where a copy of it is."""
    num_bytes, links = program.shard_bytes, mailbox.links
    if program.may_lend and num_bytes >= LENT_FROM_BYTES:
        lies = segment.locate(local, num_bytes)
        if lies is not None:
            loan = Loan(*lies)
            for rank, _, _ in program.sends:
                links[rank].send(tag, loan, num_bytes, header)
            return loan
    if program.offers_whole:
        block = segment.allocate(num_bytes, header)
        if is_plain(local):
            _copy_bytes(segment.chunks[block.chunk].address + block.offset, local.data_ptr(), num_bytes)
        else:
            segment.view(block, local.shape, program.dtype).copy_(local.detach())
        for rank, _, _ in program.sends:
            links[rank].send(tag, block, num_bytes, header)
        block.leave()
        return None
    blocks: dict[object, Block | None] = {}
    for rank, region, part_bytes in program.sends:
        if region not in blocks:
            blocks[region] = segment.publish(_slice(local, region), header)
        links[rank].send(tag, blocks[region], part_bytes, header)
    for part in blocks.values():
        if part is not None:
            part.leave()
    return None


def _fill(mailbox: Mailbox, program: Program, local: torch.Tensor, tag: int, header: bytes, out: torch.Tensor) -> None:
    """Place by place, as the letters come."""
    at = out.data_ptr()
    for place in program.places:
        if len(place.reads) == 1:
            _copy(mailbox, program, local, tag, header, place, out, at)
        else:
            _combine(mailbox, program, local, tag, header, place, out)


def _join(mailbox: Mailbox, program: Program, local: torch.Tensor, tag: int, header: bytes, out: torch.Tensor) -> None:
    """Row by row out of all shards at once: each source is read, and the new shard written, from start to end."""
    letters: list[tuple[int, Letter]] = []
    slices: list[torch.Tensor] = []
    for place in program.places:
        read = place.reads[0]
        if read.source == mailbox.rank:
            slices.append(_slice(local, read.region))
            continue
        letter = mailbox.take(read.source, tag, header, read.shard_bytes, read.part.num_bytes)
        letters.append((read.source, letter))
        slices.append(mailbox.lent(read, letter, program.dtype))
    assert program.joined_dim is not None
    torch.cat([slices[index] for index in program.joined_order], program.joined_dim, out=out)
    _acknowledge(mailbox, letters)


def _copy(
    mailbox: Mailbox,
    program: Program,
    local: torch.Tensor,
    tag: int,
    header: bytes,
    place: Place,
    out: torch.Tensor,
    at: int,
) -> None:
    read, goal, size = place.reads[0], place.part, program.dtype.itemsize
    if read.source == mailbox.rank:
        runs = runs_of(goal.shape, read.part.strides, goal.strides, size) if is_plain(local) else None
        if runs is not None:
            copy_runs(runs, local.data_ptr() + read.part.start, at + goal.start)
        else:
            _view(out, goal).copy_(_slice(local, read.region))
        return
    letter = mailbox.take(read.source, tag, header, read.shard_bytes, read.part.num_bytes)
    is_whole, link = letter.num_bytes == read.shard_bytes, mailbox.links[read.source]
    strides, start = (read.part.strides, read.part.start) if is_whole else (contiguous_strides(goal.shape), 0)
    runs = runs_of(goal.shape, strides, goal.strides, size)
    if runs is not None:
        copy_runs(runs, link.mapping(letter.chunk).address + letter.offset + start, at + goal.start)
    else:
        _view(out, goal).copy_(mailbox.lent(read, letter, program.dtype))
    if letter.wants_receipt:
        link.acknowledge(letter)


def _combine(
    mailbox: Mailbox, program: Program, local: torch.Tensor, tag: int, header: bytes, place: Place, out: torch.Tensor
) -> None:
    assert program.reduction is not None
    letters: list[tuple[int, Letter]] = []
    terms: list[torch.Tensor] = []
    for read in place.reads:
        if read.source == mailbox.rank:
            terms.append(_slice(local, read.region))
            continue
        letter = mailbox.take(read.source, tag, header, read.shard_bytes, read.part.num_bytes)
        letters.append((read.source, letter))
        terms.append(mailbox.lent(read, letter, program.dtype))
    goal = out if place.part.num_bytes == program.out_bytes else _view(out, place.part)
    combine(terms, goal, program.reduction)
    _acknowledge(mailbox, letters)


def _acknowledge(mailbox: Mailbox, letters: Sequence[tuple[int, Letter]]) -> None:
    for source, letter in letters:
        if letter.wants_receipt:
            mailbox.links[source].acknowledge(letter)


def _view(out: torch.Tensor, part: Part) -> torch.Tensor:
    return out.as_strided(part.shape, part.strides, part.start // out.element_size())


def _slice(tensor: torch.Tensor, region: Sequence[tuple[int, int]]) -> torch.Tensor:
    tensor = tensor.detach()
    for dim, (start, stop) in enumerate(region):
        if stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor
