"""One rank's mapped memory: blocks for messages, and tensors whose storage is a block.

A tensor that lies here needs no copy to be read by a peer. Its block comes back when its storage dies, whoever held
the last view of it; the memory stays mapped as long as any tensor lies in it, also when the world has ended.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from workbench.errors import WorldError
from workbench.transport.letters.arena import Arena
from workbench.transport.letters.board import MAX_CHUNKS, Board, decode_header
from workbench.transport.letters.link import Block, Link
from workbench.transport.letters.mapped import Mapping, available_bytes
from workbench.transport.letters.runs import copy_runs, packing_runs

LENT_FROM_BYTES = 64 * 2**10 + 1
"""Smaller tensors are copied to be read: that is faster than to wait until the readers have finished."""
_LARGEST_STEP_BYTES = 256 * 2**20
_CHUNKS_FOR_MESSAGES = 12
_SHARE_FOR_TENSORS = 0.25
_IDLE_ALLOCATIONS = 256
"""A chunk in which nothing lies gives its pages back if it was not needed for so many allocations."""


class _Lease(weakref.ref["np.ndarray[Any, Any]"]):
    """Notices that a storage has let go of its memory."""

    __slots__ = ("address", "block")
    address: int
    block: Block


class Segment:
    """Chunks of memory that peers can read; more are added when messages or tensors need them.

    The last ``reserved_bytes`` of the first chunk are left to others.
    """

    def __init__(
        self, rank: int, board: Board, links: Iterable[Link], first_chunk: Mapping, reserved_bytes: int
    ) -> None:
        self.rank, self._board, self._links = rank, board, tuple(links)
        self.chunks = [first_chunk]
        self.arenas = [Arena(first_chunk.size - reserved_bytes)]
        self._leases: dict[int, _Lease] = {}
        self._returned: deque[Block] = deque()  # storages may die in any thread
        self._grows_for_tensors = True
        self._num_allocations = 0
        self._last_use = [0]
        self._take_back = _taker(self._leases, self._returned)

    @property
    def idle_bytes(self) -> int:
        """What no tensor owns of this memory."""
        owned = sum(lease.block.num_bytes for lease in list(self._leases.values()))
        return sum(chunk.size for chunk in self.chunks) - owned

    def allocate(self, num_bytes: int, header: bytes) -> Block:
        """A block for a message; more memory if need be.

        Raises:
            WorldError: there is no more.
        """
        return self._find_room(num_bytes) or self._grow(num_bytes, decode_header(header))

    def publish(self, tensor: torch.Tensor, header: bytes) -> Block | None:
        """A block with the elements of ``tensor`` one behind the other; None for no elements."""
        if tensor.numel() == 0:
            return None
        block = self.allocate(tensor.nbytes, header)
        runs = packing_runs(tensor)
        if runs is not None:
            copy_runs(runs, tensor.data_ptr(), self.chunks[block.chunk].address + block.offset)
        else:
            self.view(block, tensor.shape, tensor.dtype).copy_(tensor.detach())
        return block

    def view(self, block: Block, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The memory of a block as a tensor; it does not keep the block."""
        return self.chunks[block.chunk].tensor(block.offset, tuple(shape), dtype)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with memory of this segment; of ordinary memory where it is small or there is too little room."""
        num_bytes = math.prod(shape) * dtype.itemsize
        block = self.room_for_tensor(num_bytes) if num_bytes >= LENT_FROM_BYTES else None
        return torch.empty(shape, dtype=dtype) if block is None else self.tensor_in(block, shape, dtype)

    def tensor_in(self, block: Block, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that fills a block of ``room_for_tensor``; the block comes back with the tensor's storage."""
        chunk = self.chunks[block.chunk]
        kind, memory = numpy_kind(dtype), chunk.data
        # One call of torch's where numpy has the dtype: behind a large copy every other one takes 20 us.
        if kind is None:
            held = np.ndarray(block.num_bytes, np.uint8, memory, block.offset)
            tensor = torch.frombuffer(held, dtype=dtype).resize_(shape)
        else:
            held = np.ndarray(shape, kind, memory, block.offset)
            tensor = torch.from_numpy(held)
        lease = _Lease(held, self._take_back)
        lease.block, lease.address = block, chunk.address + block.offset
        self._leases[lease.address] = lease
        return tensor

    def locate(self, tensor: torch.Tensor, num_bytes: int) -> tuple[int, int] | None:
        """Chunk and offset of a tensor that lies here, its elements as they are and one behind the other."""
        address = tensor.data_ptr()
        for number, chunk in enumerate(self.chunks):
            offset = address - chunk.address
            if offset >= 0 and offset + num_bytes <= chunk.size:
                return (number, offset) if is_plain(tensor) else None
        return None

    def close(self) -> None:
        """Close the files; the memory goes with the last tensor in it."""
        for chunk in self.chunks:
            chunk.close()

    def _find_room(self, num_bytes: int) -> Block | None:
        self._num_allocations += 1
        if self._num_allocations % _IDLE_ALLOCATIONS == 0:
            self._release_idle_chunks()
        again = None  # what has become free last is warm, and needs no search
        while self._returned:
            block = self._returned.pop()
            if again is None and block.num_bytes == num_bytes:
                again = block
            else:
                block.leave()
        if again is not None:
            self._last_use[again.chunk] = self._num_allocations
            return again
        for link in self._links:
            link.collect()
        for chunk, arena in enumerate(self.arenas):
            offset = arena.allocate(num_bytes)
            if offset is not None:
                self._last_use[chunk] = self._num_allocations
                if self.chunks[chunk].is_released and not self._has_again(chunk):
                    arena.free(offset, num_bytes)
                    continue
                return Block(arena, chunk, offset, num_bytes)
        return None

    def _release_idle_chunks(self) -> None:
        """One large tensor must not hold memory for ever."""
        for number, (chunk, arena) in enumerate(zip(self.chunks, self.arenas, strict=True)):
            is_idle = self._num_allocations - self._last_use[number] >= _IDLE_ALLOCATIONS
            if number and is_idle and arena.is_empty and not chunk.is_released:
                chunk.release()

    def _has_again(self, number: int) -> bool:
        try:
            self.chunks[number].reserve_again(f"rank {self.rank}: data for other ranks")
        except WorldError:
            return False
        return True

    def room_for_tensor(self, num_bytes: int) -> Block | None:
        """A block for a tensor, with more memory if need be; None where there is too little."""
        block = self._find_room(num_bytes)
        if block is not None or not self._grows_for_tensors:
            return block
        room = available_bytes() * _SHARE_FOR_TENSORS
        if len(self.chunks) < MAX_CHUNKS - _CHUNKS_FOR_MESSAGES and self._next_size(num_bytes) <= room:
            try:
                return self._grow(num_bytes, "tensors")
            except WorldError:
                pass
        self._grows_for_tensors = False  # messages need what is left
        return None

    def _next_size(self, num_bytes: int) -> int:
        """A further chunk is as large as all before it, within reason, so that few are needed."""
        has = sum(chunk.size for chunk in self.chunks)
        return -(-max(num_bytes, min(has, _LARGEST_STEP_BYTES)) // 2**20) * 2**20

    def _grow(self, num_bytes: int, what: str) -> Block:
        if len(self.chunks) == MAX_CHUNKS:
            raise WorldError(
                f"rank {self.rank} in {what}: the shared memory has {MAX_CHUNKS} parts, no more can be added. "
                "Box fewer tensors at a time, or set WORKBENCH_TRANSPORT=gloo."
            )
        size = self._next_size(num_bytes)
        mapping = Mapping.create(size, f"rank {self.rank} in {what}: data for other ranks")
        self._board.add_chunk(mapping)
        self.chunks.append(mapping)
        self.arenas.append(Arena(size))
        self._last_use.append(self._num_allocations)
        offset = self.arenas[-1].allocate(num_bytes)
        assert offset is not None
        return Block(self.arenas[-1], len(self.chunks) - 1, offset, num_bytes)


@cache
def numpy_kind(dtype: torch.dtype) -> np.dtype[Any] | None:
    """What numpy calls a dtype; None if it has none such (bfloat16)."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its elements one behind the other, not conjugated or negated by a flag."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _taker(leases: dict[int, _Lease], returned: deque[Block]) -> Callable[[_Lease], None]:
    """What a lease calls when it ends; it does not hold the segment."""

    def take_back(lease: _Lease) -> None:
        del leases[lease.address]
        returned.append(lease.block)

    return take_back
