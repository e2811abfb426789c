"""One rank's shared memory segment: blocks for messages, and tensors whose storage is a block.

Peers read a tensor in the segment without a copy. Its block is free again when its storage dies, whichever thread held
the last view. Memory stays mapped while a tensor lies in it, also after the world has ended.
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
from workbench.transport.messaging.block_allocator import BlockAllocator
from workbench.transport.messaging.control_page import MAX_CHUNKS, ControlPage, decode_header
from workbench.transport.messaging.link import Block, Link
from workbench.transport.messaging.shared_memory import SharedMemory, available_bytes
from workbench.transport.messaging.strided_copy import copy_strided, packing_copy

MIN_IN_PLACE_BYTES = 64 * 2**10 + 1
"""Smaller tensors are copied for their readers: the copy costs less than a wait for the acks."""
_LARGEST_STEP_BYTES = 256 * 2**20
_CHUNKS_FOR_MESSAGES = 12
_SHARE_FOR_TENSORS = 0.25
"""Of the memory that is available, what the segment may grow by for tensors at one time."""
_IDLE_ALLOCATIONS = 256
"""An empty chunk returns its pages to the system after this many allocations that did not use it."""


class _StorageRef(weakref.ref["np.ndarray[Any, Any]"]):
    """A weak reference that returns the block of a storage when the storage dies."""

    __slots__ = ("address", "block")
    address: int
    block: Block


class Segment:
    """Chunks of memory that peers can read; the segment grows when messages or tensors need more.

    The last ``reserved_bytes`` of the first chunk belong to the persistent exchanges.
    """

    def __init__(
        self, rank: int, page: ControlPage, links: Iterable[Link], first_chunk: SharedMemory, reserved_bytes: int
    ) -> None:
        self.rank, self._page, self._links = rank, page, tuple(links)
        self.chunks = [first_chunk]
        self.allocators = [BlockAllocator(first_chunk.size - reserved_bytes)]
        self._storages: dict[int, _StorageRef] = {}
        self._reclaimed: deque[Block] = deque()  # storages may die in any thread
        self._grows_for_tensors = True
        self._num_allocations = 0
        self._last_use = [0]
        self._reclaim = _make_reclaim(self._storages, self._reclaimed)

    @property
    def idle_bytes(self) -> int:
        """Bytes of the segment that no tensor owns."""
        owned = sum(storage.block.num_bytes for storage in list(self._storages.values()))
        return sum(chunk.size for chunk in self.chunks) - owned

    def allocate(self, num_bytes: int, header: bytes) -> Block:
        """A block for a message; the segment grows where needed.

        Raises:
            WorldError: the system has too little memory, or the segment has too many chunks.
        """
        return self._find_room(num_bytes) or self._grow(num_bytes, decode_header(header))

    def publish(self, tensor: torch.Tensor, header: bytes) -> Block | None:
        """A block with a contiguous copy of ``tensor``; None for a tensor without elements."""
        if tensor.numel() == 0:
            return None
        block = self.allocate(tensor.nbytes, header)
        copy = packing_copy(tensor)
        if copy is not None:
            copy_strided(copy, tensor.data_ptr(), self.chunks[block.chunk].address + block.offset)
        else:
            self.view(block, tensor.shape, tensor.dtype).copy_(tensor.detach())
        return block

    def view(self, block: Block, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The memory of a block as a tensor, which does not keep the block alive."""
        return self.chunks[block.chunk].tensor(block.offset, tuple(shape), dtype)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in this segment, or in ordinary memory where it is small or the segment has no room."""
        num_bytes = math.prod(shape) * dtype.itemsize
        block = self.allocate_for_tensor(num_bytes) if num_bytes >= MIN_IN_PLACE_BYTES else None
        return torch.empty(shape, dtype=dtype) if block is None else self.tensor_in_block(block, shape, dtype)

    def tensor_in_block(self, block: Block, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that fills a block of ``allocate_for_tensor``; the block is free again when its storage dies."""
        chunk = self.chunks[block.chunk]
        numpy_type, memory = numpy_dtype(dtype), chunk.data
        # A single torch call where numpy has the dtype: after a large copy each further call takes 20 us.
        if numpy_type is None:
            held = np.ndarray(block.num_bytes, np.uint8, memory, block.offset)
            tensor = torch.frombuffer(held, dtype=dtype).resize_(shape)
        else:
            held = np.ndarray(shape, numpy_type, memory, block.offset)
            tensor = torch.from_numpy(held)
        storage = _StorageRef(held, self._reclaim)
        storage.block, storage.address = block, chunk.address + block.offset
        self._storages[storage.address] = storage
        return tensor

    def locate(self, tensor: torch.Tensor, num_bytes: int) -> tuple[int, int] | None:
        """Chunk and offset of a tensor in this segment; None for others, and for those that need a packing copy."""
        address = tensor.data_ptr()
        for number, chunk in enumerate(self.chunks):
            offset = address - chunk.address
            if offset >= 0 and offset + num_bytes <= chunk.size:
                return (number, offset) if is_byte_copyable(tensor) else None
        return None

    def close(self) -> None:
        """Close the files; the memory is freed with the last tensor in it."""
        for chunk in self.chunks:
            chunk.close()

    def _find_room(self, num_bytes: int) -> Block | None:
        self._num_allocations += 1
        if self._num_allocations % _IDLE_ALLOCATIONS == 0:
            self._release_idle_chunks()
        again = None  # the block that was freed last is warm, and needs no search
        while self._reclaimed:
            block = self._reclaimed.pop()
            if again is None and block.num_bytes == num_bytes:
                again = block
            else:
                block.release()
        if again is not None:
            self._last_use[again.chunk] = self._num_allocations
            return again
        for link in self._links:
            link.collect_acks()
        for chunk, allocator in enumerate(self.allocators):
            offset = allocator.allocate(num_bytes)
            if offset is not None:
                self._last_use[chunk] = self._num_allocations
                if self.chunks[chunk].is_released and not self._reserve_again(chunk):
                    allocator.free(offset, num_bytes)
                    continue
                return Block(allocator, chunk, offset, num_bytes)
        return None

    def _release_idle_chunks(self) -> None:
        """Return the pages of empty chunks, so that one large tensor does not hold memory for ever."""
        for number, (chunk, allocator) in enumerate(zip(self.chunks, self.allocators, strict=True)):
            is_idle = self._num_allocations - self._last_use[number] >= _IDLE_ALLOCATIONS
            if number and is_idle and allocator.is_empty and not chunk.is_released:
                chunk.release_pages()

    def _reserve_again(self, number: int) -> bool:
        try:
            self.chunks[number].reserve_pages(f"rank {self.rank}: data for other ranks")
        except WorldError:
            return False
        return True

    def allocate_for_tensor(self, num_bytes: int) -> Block | None:
        """A block for a tensor; the segment grows where needed. None where there is too little memory."""
        block = self._find_room(num_bytes)
        if block is not None or not self._grows_for_tensors:
            return block
        room = available_bytes() * _SHARE_FOR_TENSORS
        if len(self.chunks) < MAX_CHUNKS - _CHUNKS_FOR_MESSAGES and self._next_size(num_bytes) <= room:
            try:
                return self._grow(num_bytes, "tensors")
            except WorldError:
                pass
        self._grows_for_tensors = False  # keep the remaining memory for messages
        return None

    def _next_size(self, num_bytes: int) -> int:
        """A new chunk is as large as all before it, up to a limit, so that few are needed."""
        has = sum(chunk.size for chunk in self.chunks)
        return -(-max(num_bytes, min(has, _LARGEST_STEP_BYTES)) // 2**20) * 2**20

    def _grow(self, num_bytes: int, what: str) -> Block:
        if len(self.chunks) == MAX_CHUNKS:
            raise WorldError(
                f"rank {self.rank} in {what}: the shared memory has {MAX_CHUNKS} parts, no more can be added. "
                "Box fewer tensors at a time, or set WORKBENCH_TRANSPORT=gloo."
            )
        size = self._next_size(num_bytes)
        memory = SharedMemory.create(size, f"rank {self.rank} in {what}: data for other ranks")
        self._page.add_chunk(memory)
        self.chunks.append(memory)
        self.allocators.append(BlockAllocator(size))
        self._last_use.append(self._num_allocations)
        offset = self.allocators[-1].allocate(num_bytes)
        assert offset is not None
        return Block(self.allocators[-1], len(self.chunks) - 1, offset, num_bytes)


@cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """The numpy dtype of a torch dtype; None where numpy has none (bfloat16)."""
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        return None


def is_byte_copyable(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a tensor are its elements in order: contiguous, with no conjugate or negative bit set."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _make_reclaim(storages: dict[int, _StorageRef], reclaimed: deque[Block]) -> Callable[[_StorageRef], None]:
    """The callback of a storage that dies; it does not keep the segment alive."""

    def reclaim(storage: _StorageRef) -> None:
        del storages[storage.address]
        reclaimed.append(storage.block)

    return reclaim
