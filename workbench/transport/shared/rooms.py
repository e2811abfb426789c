"""Memory that a group of ranks fills together and reads in place: what all of them need is there once.

Every rank writes its parts and tells the others; who has heard of all of them may read. A group has three rooms, which
it uses in turn. Nobody has to say that he has finished reading: what a rank tells of one use says also how many uses it
had let go of by then. When a use has ended here, everybody has begun it, and so has let go of the use before the last,
unless he keeps something for longer: then what the last use has told says so, to all ranks alike, and this once they
must exchange their parts in another way. The same where the last use has not ended here, as nobody knows then.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from workbench.core.layout import Region
from workbench.transport.letters.board import encode_header
from workbench.transport.letters.link import Block, letter_without_receipt
from workbench.transport.letters.mailbox import Mailbox
from workbench.transport.letters.mapped import Mapping, contiguous_strides
from workbench.transport.shared.segment import Segment, is_plain, numpy_kind

_NUM_ROOMS = 3
_ALIGNMENT = 64
_copy_bytes = ctypes.memmove


class Rooms:
    """The rooms of all groups of one rank."""

    def __init__(self, segment: Segment, mailbox: Mailbox) -> None:
        self._segment, self._mailbox = segment, mailbox
        self._rings: dict[tuple[int, ...], Ring] = {}

    def of(self, group: tuple[int, ...]) -> Ring:
        """Those of a group of ranks, this one among them."""
        found = self._rings.get(group)
        if found is None:
            found = self._rings[group] = Ring(group, self._segment, self._mailbox)
        return found


@dataclass(frozen=True, slots=True)
class Room:
    """Where it lies in this process; ``block`` is its owner's."""

    num_bytes: int
    memory: Mapping
    offset: int
    block: Block | None


class Ring:
    """The rooms of one group, and what is known of their uses, which have the same numbers on all ranks."""

    def __init__(self, group: tuple[int, ...], segment: Segment, mailbox: Mailbox) -> None:
        self.group, self.mailbox, self._segment = group, mailbox, segment
        self.others = [mailbox.links[rank] for rank in group if rank != mailbox.rank]
        self._rooms: list[Room | None] = [None] * _NUM_ROOMS
        self._num_begun = 0
        self._held: dict[int, weakref.ref[Any]] = {}
        self._last_ended, self._let_go_by_all = -1, 0

    def begin(
        self,
        wholes: Sequence[Sequence[int]],
        regions: Sequence[Region],
        parts: Sequence[torch.Tensor],
        tag: int,
        header: str,
    ) -> Use:
        """Write this rank's parts, if there is a room for the whole tensors, and tell the others.

        Args:
            wholes: shapes of the whole tensors.
            regions, parts: what this rank has of each, of one dtype, contiguous.
            tag, header: of the letters.
        """
        number = self._num_begun
        self._num_begun += 1
        let_go = min(self._held, default=number)
        dtype, text = parts[0].dtype, encode_header(header)
        offsets, num_bytes = _offsets(wholes, dtype)
        room = self._room(number, num_bytes, tag, text) if self._is_free(number) else None
        use = Use(self, number, let_go, tag, text, list(zip(wholes, offsets, strict=True)), dtype)
        if room is not None:
            use.memory = np.ndarray(num_bytes, np.uint8, room.memory.data, room.offset)
            held = self._held
            held[number] = weakref.ref(use.memory, lambda ref: held.pop(number, None))
            for whole, offset, region, part in zip(wholes, offsets, regions, parts, strict=True):
                _write(room, offset, whole, region, part)
            use.num_bytes = num_bytes
            use.num_to_read = dtype.itemsize * sum(map(math.prod, wholes)) - sum(part.nbytes for part in parts)
        told = letter_without_receipt(tag, 0, let_go, use.num_bytes, text)
        for link in self.others:
            link.send_without_receipt(told)
        return use

    def ended(self, number: int, let_go_by_all: int) -> None:
        """All ranks have told what they had to about a use."""
        self._last_ended, self._let_go_by_all = number, let_go_by_all

    def _is_free(self, number: int) -> bool:
        """Whether all ranks have let go of the use before in the same room, as far as all know."""
        if number < _NUM_ROOMS:
            return True
        return self._last_ended == number - 1 and self._let_go_by_all > number - _NUM_ROOMS

    def _room(self, number: int, num_bytes: int, tag: int, header: bytes) -> Room:
        """The room for a use; a larger one, if need be, of which its owner tells the others."""
        place = number % _NUM_ROOMS
        room = self._rooms[place]
        if room is not None and room.num_bytes >= num_bytes:
            return room
        owner, mailbox, segment = self.group[place % len(self.group)], self.mailbox, self._segment
        if owner == mailbox.rank:
            if room is not None and room.block is not None:
                room.block.leave()
            block = segment.allocate(num_bytes, header)
            for link in self.others:
                link.send_without_receipt(letter_without_receipt(tag | 1, block.chunk, block.offset, num_bytes, header))
            found = Room(num_bytes, segment.chunks[block.chunk], block.offset, block)
        else:
            letter = mailbox.take(owner, tag | 1, header, num_bytes)
            found = Room(num_bytes, mailbox.links[owner].mapping(letter.chunk), letter.offset, None)
        self._rooms[place] = found
        return found


class Use:
    """One use of a room, from the writing of this rank's parts on.

    Attributes:
        memory: the room; None where there is none this time. It is held as long as a tensor lies in it.
        num_bytes: of the room that are used.
        num_to_read: bytes of the others' parts.
    """

    def __init__(
        self,
        ring: Ring,
        number: int,
        let_go: int,
        tag: int,
        header: bytes,
        places: list[tuple[Sequence[int], int]],
        dtype: torch.dtype,
    ) -> None:
        self._ring, self._number, self._let_go, self._tag, self._header = ring, number, let_go, tag, header
        self._places, self._dtype = places, dtype
        self.memory: np.ndarray[Any, Any] | None = None
        self.num_bytes = self.num_to_read = 0

    def end(self) -> list[torch.Tensor]:
        """The whole tensors, when all ranks have written; none where they are not there."""
        ring, mailbox, let_go = self._ring, self._ring.mailbox, self._let_go
        for link in ring.others:
            letter = mailbox.take(link.peer, self._tag, self._header, self.num_bytes)
            let_go = min(let_go, letter.offset)
        ring.ended(self._number, let_go)
        mailbox.read_bytes += self.num_to_read
        memory, self.memory = self.memory, None
        if memory is None:
            return []
        return [_tensor(memory, shape, offset, self._dtype) for shape, offset in self._places]


def _offsets(wholes: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[list[int], int]:
    """Where tensors begin that lie one behind the other, and where the last one ends."""
    offsets, end = [], 0
    for shape in wholes:
        offsets.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _write(room: Room, offset: int, whole: Sequence[int], region: Region, part: torch.Tensor) -> None:
    if not part.numel():
        return
    strides = contiguous_strides(tuple(whole))
    start = offset + part.itemsize * sum(begin * step for (begin, _), step in zip(region, strides, strict=True))
    if tuple(part.shape[1:]) == tuple(whole[1:]) and is_plain(part):
        _copy_bytes(room.memory.address + room.offset + start, part.data_ptr(), part.nbytes)
    else:
        room.memory.strided(room.offset + start, tuple(part.shape), strides, part.dtype).copy_(part.detach())


def _tensor(memory: np.ndarray[Any, Any], shape: Sequence[int], offset: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor with a storage of its own, which holds ``memory``."""
    kind, size = numpy_kind(dtype), math.prod(shape)
    if kind is not None:
        return torch.from_numpy(np.ndarray(tuple(shape), kind, memory, offset))
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory[offset : offset + size * dtype.itemsize], dtype=dtype).view(tuple(shape))


__all__ = ["Rooms", "Use"]
