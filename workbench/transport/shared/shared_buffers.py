"""Buffers that a group of ranks fills together and reads in place, so that a host holds one copy for all of them.

Each rank writes its parts and sends a message to its peers; it reads after it has all their messages. A group has three
buffers and leases them in turn. Readers need no ack: each message carries the number of leases that its sender has
released. When a lease has ended on this rank, every rank has begun it, hence has released the lease before the previous
one, unless it still holds a tensor there. In that case, or if the previous lease has not ended, all ranks find the same
numbers, and none of them uses a buffer this time: they exchange their parts in another way.
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
from workbench.transport.messaging.control_page import encode_header
from workbench.transport.messaging.endpoint import Endpoint
from workbench.transport.messaging.link import Block, pack_without_ack
from workbench.transport.messaging.shared_memory import SharedMemory, contiguous_strides
from workbench.transport.shared.segment import Segment, is_byte_copyable, numpy_dtype

_NUM_BUFFERS = 3
_ALIGNMENT = 64
_copy_bytes = ctypes.memmove


class SharedBuffers:
    """The buffers of all groups of one rank."""

    def __init__(self, segment: Segment, endpoint: Endpoint) -> None:
        self._segment, self._endpoint = segment, endpoint
        self._rings: dict[tuple[int, ...], BufferRing] = {}

    def of(self, group: tuple[int, ...]) -> BufferRing:
        """The buffers of a group that contains this rank."""
        found = self._rings.get(group)
        if found is None:
            found = self._rings[group] = BufferRing(group, self._segment, self._endpoint)
        return found


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """The place of a buffer in this process; ``block`` is None except on the owner."""

    num_bytes: int
    memory: SharedMemory
    offset: int
    block: Block | None


class BufferRing:
    """The buffers of one group and the state of their leases, which have the same numbers on all ranks."""

    def __init__(self, group: tuple[int, ...], segment: Segment, endpoint: Endpoint) -> None:
        self.group, self.endpoint, self._segment = group, endpoint, segment
        self.others = [endpoint.links[rank] for rank in group if rank != endpoint.rank]
        self._buffers: list[SharedBuffer | None] = [None] * _NUM_BUFFERS
        self._num_begun = 0
        self._held: dict[int, weakref.ref[Any]] = {}
        self._last_ended, self._released_by_all = -1, 0

    def begin(
        self,
        full_shapes: Sequence[Sequence[int]],
        regions: Sequence[Region],
        parts: Sequence[torch.Tensor],
        tag: int,
        header: str,
    ) -> Lease:
        """Write this rank's parts, if a buffer is free, and send a message to the peers.

        Args:
            full_shapes: shapes of the full tensors.
            regions, parts: this rank's part of each tensor, contiguous and of one dtype.
            tag, header: tag and header of the messages.
        """
        number = self._num_begun
        self._num_begun += 1
        num_released = min(self._held, default=number)
        dtype, text = parts[0].dtype, encode_header(header)
        offsets, num_bytes = _offsets(full_shapes, dtype)
        buffer = self._buffer(number, num_bytes, tag, text) if self._is_free(number) else None
        lease = Lease(self, number, num_released, tag, text, list(zip(full_shapes, offsets, strict=True)), dtype)
        if buffer is not None:
            lease.memory = np.ndarray(num_bytes, np.uint8, buffer.memory.data, buffer.offset)
            held = self._held
            held[number] = weakref.ref(lease.memory, lambda ref: held.pop(number, None))
            for whole, offset, region, part in zip(full_shapes, offsets, regions, parts, strict=True):
                _write(buffer, offset, whole, region, part)
            lease.num_bytes = num_bytes
            lease.num_to_read = dtype.itemsize * sum(map(math.prod, full_shapes)) - sum(part.nbytes for part in parts)
        done = pack_without_ack(tag, 0, num_released, lease.num_bytes, text)
        for link in self.others:
            link.send_without_ack(done)
        return lease

    def ended(self, number: int, released_by_all: int) -> None:
        """Note that all ranks have sent their messages of lease ``number``."""
        self._last_ended, self._released_by_all = number, released_by_all

    def _is_free(self, number: int) -> bool:
        """Whether all ranks are known to have released the previous lease of the same buffer."""
        if number < _NUM_BUFFERS:
            return True
        return self._last_ended == number - 1 and self._released_by_all > number - _NUM_BUFFERS

    def _buffer(self, number: int, num_bytes: int, tag: int, header: bytes) -> SharedBuffer:
        """The buffer for a lease. If it is too small, its owner makes a larger one and sends its place to the peers."""
        place = number % _NUM_BUFFERS
        buffer = self._buffers[place]
        if buffer is not None and buffer.num_bytes >= num_bytes:
            return buffer
        owner, endpoint, segment = self.group[place % len(self.group)], self.endpoint, self._segment
        if owner == endpoint.rank:
            if buffer is not None and buffer.block is not None:
                buffer.block.release()
            block = segment.allocate(num_bytes, header)
            for link in self.others:
                link.send_without_ack(pack_without_ack(tag | 1, block.chunk, block.offset, num_bytes, header))
            found = SharedBuffer(num_bytes, segment.chunks[block.chunk], block.offset, block)
        else:
            message = endpoint.receive(owner, tag | 1, header, num_bytes)
            found = SharedBuffer(num_bytes, endpoint.links[owner].memory(message.chunk), message.offset, None)
        self._buffers[place] = found
        return found


class Lease:
    """One lease of a buffer, after this rank has written its parts.

    Attributes:
        memory: the buffer; None where none was free. Tensors in it keep it alive.
        num_bytes: bytes of the buffer in use.
        num_to_read: bytes of the peers' parts.
    """

    def __init__(
        self,
        ring: BufferRing,
        number: int,
        num_released: int,
        tag: int,
        header: bytes,
        tensors: list[tuple[Sequence[int], int]],
        dtype: torch.dtype,
    ) -> None:
        self._ring, self._number, self._num_released, self._tag, self._header = ring, number, num_released, tag, header
        self._tensors, self._dtype = tensors, dtype
        self.memory: np.ndarray[Any, Any] | None = None
        self.num_bytes = self.num_to_read = 0

    def end(self) -> list[torch.Tensor]:
        """Wait until all ranks have written; return the full tensors, or an empty list where no buffer was free."""
        ring, endpoint, num_released = self._ring, self._ring.endpoint, self._num_released
        for link in ring.others:
            message = endpoint.receive(link.peer, self._tag, self._header, self.num_bytes)
            num_released = min(num_released, message.offset)
        ring.ended(self._number, num_released)
        endpoint.read_bytes += self.num_to_read
        memory, self.memory = self.memory, None
        if memory is None:
            return []
        return [_tensor(memory, shape, offset, self._dtype) for shape, offset in self._tensors]


def _offsets(full_shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> tuple[list[int], int]:
    """Offsets of tensors that are stored one after the other, and the end of the last one, in bytes."""
    offsets, end = [], 0
    for shape in full_shapes:
        offsets.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _write(buffer: SharedBuffer, offset: int, whole: Sequence[int], region: Region, part: torch.Tensor) -> None:
    if not part.numel():
        return
    strides = contiguous_strides(tuple(whole))
    start = offset + part.itemsize * sum(begin * step for (begin, _), step in zip(region, strides, strict=True))
    if tuple(part.shape[1:]) == tuple(whole[1:]) and is_byte_copyable(part):
        _copy_bytes(buffer.memory.address + buffer.offset + start, part.data_ptr(), part.nbytes)
    else:
        buffer.memory.strided(buffer.offset + start, tuple(part.shape), strides, part.dtype).copy_(part.detach())


def _tensor(memory: np.ndarray[Any, Any], shape: Sequence[int], offset: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor with a storage of its own, which keeps ``memory`` alive."""
    numpy_type, size = numpy_dtype(dtype), math.prod(shape)
    if numpy_type is not None:
        return torch.from_numpy(np.ndarray(tuple(shape), numpy_type, memory, offset))
    if not size:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory[offset : offset + size * dtype.itemsize], dtype=dtype).view(tuple(shape))
