"""The device memory through which a rank sends, and the memory of peers that it has opened.

A rank copies all data that it sends into a block of its own pool, on the device, and the receivers read it there. A
rank opens a peer's chunk once and keeps it open. A chunk that was empty for a while is *retired*: the ranks that may
have opened it get a message, close it, and send an ack; then it is freed. After the end of a world, chunks that a peer
may still have open are freed when all peers have closed them or have ended (``free_deferred``).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from workbench.errors import WorldError
from workbench.transport.ipc.device import Device, DeviceMemory
from workbench.transport.ipc.handles import MAX_CHUNKS, ON_DEVICE, ON_HOST, ChunkEntry, HandleTable
from workbench.transport.messaging.block_allocator import BlockAllocator
from workbench.transport.messaging.control_page import decode_header
from workbench.transport.messaging.link import Block, Link
from workbench.transport.messaging.shared_memory import SharedMemory
from workbench.transport.peer_processes import PeerProcesses

FIRST_CHUNK_BYTES = 16 * 2**20
_LARGEST_STEP_BYTES = 256 * 2**20
_PAGE_BYTES = 2 * 2**20
"""A chunk fills whole pages of the device: smaller allocations share a page, and a handle exposes the whole page."""
_IDLE_ALLOCATIONS = 256
"""An empty chunk is retired after this many allocations that did not use it."""
RETIRE_TAG = -(1 << 61)
"""Tag of messages that ask a peer to close a chunk."""
_RETIRE = b"retired memory"


@dataclass
class _OwnChunk:
    """A chunk of this rank, with the number of the last allocation in it."""

    kind: int
    memory: DeviceMemory
    allocator: BlockAllocator
    host_memory: SharedMemory | None = None
    readers: set[int] = field(default_factory=set)
    last_use: int = 0
    is_retired: bool = False


class Pool:
    """The chunks of this rank; the pool grows when messages need more."""

    def __init__(self, rank: int, device: Device, handle_table: HandleTable) -> None:
        self.rank, self.device, self._handle_table = rank, device, handle_table
        self._chunks: dict[int, _OwnChunk] = {}
        self._num_allocations = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(own.allocator.size for own in self._chunks.values())

    def allocate(self, num_bytes: int, kind: int, header: bytes) -> Block:
        """A block; the pool grows where needed.

        Raises:
            WorldError: the device or the host has too little memory, or the pool has too many chunks.
        """
        self._num_allocations += 1
        for number, own in self._chunks.items():
            if own.kind != kind or own.is_retired:
                continue
            offset = own.allocator.allocate(num_bytes)
            if offset is not None:
                own.last_use = self._num_allocations
                return Block(own.allocator, number, offset, num_bytes)
        number = self.grow(num_bytes, kind, f"rank {self.rank} in {decode_header(header)}: data for other ranks")
        allocator = self._chunks[number].allocator
        offset = allocator.allocate(num_bytes)
        assert offset is not None
        return Block(allocator, number, offset, num_bytes)

    def grow(self, num_bytes: int, kind: int, what: str) -> int:
        """Add a chunk, as large as all before it up to a limit; returns its number."""
        number = next((n for n in range(MAX_CHUNKS) if n not in self._chunks), None)
        if number is None:
            raise WorldError(
                f"{what}: the memory for exchanges has {MAX_CHUNKS} parts, no more can be added. Box fewer tensors at "
                "a time, or set WORKBENCH_TRANSPORT=nccl or gloo."
            )
        has = sum(own.allocator.size for own in self._chunks.values() if own.kind == kind)
        size = -(-max(num_bytes, min(has, _LARGEST_STEP_BYTES), FIRST_CHUNK_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        if kind == ON_HOST:
            host_memory = SharedMemory.create(size, what)
            try:
                self.device.pin(host_memory.address, size)
            except WorldError:
                host_memory.close()
                raise
            memory, chunk = _as_device_memory(host_memory), ChunkEntry(kind, size, host_memory.file, b"")
        else:
            host_memory, memory = None, self.device.allocate(size, what)
            chunk = ChunkEntry(kind, size, 0, self._handle_of(memory))
        self._handle_table.write_chunk(number, chunk)
        self._chunks[number] = _OwnChunk(
            kind, memory, BlockAllocator(size), host_memory, last_use=self._num_allocations
        )
        return number

    def start_of(self, number: int, num_bytes: int) -> torch.Tensor:
        """The first bytes of a chunk."""
        return self._chunks[number].memory.data[:num_bytes]

    def _handle_of(self, memory: DeviceMemory) -> bytes:
        """The handle of device memory; empty where the system does not share it, which readers report."""
        with suppress(WorldError):
            return self.device.export(memory)
        return b""

    def view(self, block: Block, shape: Sequence[int], dtype: torch.dtype, skipped: int = 0) -> torch.Tensor:
        """A contiguous tensor in a block at ``skipped`` bytes, which does not keep the block alive."""
        return tensor_at(self._chunks[block.chunk].memory, block.offset + skipped, shape, dtype)

    def add_reader(self, block: Block, peer: int) -> None:
        """Note that a peer opens the chunk of this block."""
        self._chunks[block.chunk].readers.add(peer)

    def retire_idle(self, links: Mapping[int, Link]) -> None:
        """Retire idle chunks, so that one large tensor does not hold memory for ever."""
        for number, own in list(self._chunks.items()):
            is_idle = self._num_allocations - own.last_use >= _IDLE_ALLOCATIONS
            if number and is_idle and own.allocator.is_empty and not own.is_retired:
                own.is_retired = True
                notice = _RetireNotice(self, number)
                for peer in own.readers:
                    links[peer].send(RETIRE_TAG, notice, 0, _RETIRE)
                notice.release()

    def forget(self, number: int) -> None:
        """Free a retired chunk after all peers have closed it."""
        _free(self.device, self._chunks.pop(number))

    def free_when_unused(self, peers: Mapping[int, HandleTable], processes: PeerProcesses) -> None:
        """Free all chunks as soon as no peer has any of them open."""
        with _freeing:
            _deferred_frees.append(_DeferredFree(self.device, list(self._chunks.values()), dict(peers), processes))
        self._chunks = {}
        free_deferred()


class _RetireNotice:
    """The ``SendBuffer`` of a retired chunk: ``release`` counts the ranks that have closed it."""

    def __init__(self, pool: Pool, number: int) -> None:
        self.chunk, self.offset, self.num_readers = number, 0, 1
        self._pool = pool

    def release(self) -> None:
        """Remove one rank; the last one frees the chunk."""
        self.num_readers -= 1
        if self.num_readers == 0:
            self._pool.forget(self.chunk)


@dataclass
class _DeferredFree:
    """Chunks of a world that has ended, and the ranks that may still have them open."""

    device: Device
    chunks: list[_OwnChunk]
    peers: dict[int, HandleTable]
    processes: PeerProcesses

    def try_to_free(self) -> bool:
        """Free the chunks if no peer can have them open; returns whether they are freed."""
        if not all(peer.has_closed or self.processes.has_ended(rank) for rank, peer in self.peers.items()):
            return False
        for own in self.chunks:
            _free(self.device, own)
        self.processes.close()
        return True


_deferred_frees: list[_DeferredFree] = []
_freeing = threading.Lock()
"""Simulated ranks are threads."""


def free_deferred() -> int:
    """Free the chunks of earlier worlds that no peer has open; returns how many worlds still have some."""
    with _freeing:
        _deferred_frees[:] = [deferred for deferred in _deferred_frees if not deferred.try_to_free()]
        return len(_deferred_frees)


class PeerMemory:
    """The chunks of one peer that this rank has opened."""

    def __init__(self, device: Device, pid: int, handle_table: HandleTable) -> None:
        self.handle_table = handle_table
        self._device, self._pid = device, pid
        self._memory: dict[int, tuple[DeviceMemory, SharedMemory | None]] = {}

    def view(self, number: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor in the peer's memory.

        Raises:
            WorldError: this rank cannot access it.
        """
        if math.prod(shape) == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device.torch_device)
        found = self._memory.get(number)
        if found is None:
            found = self._memory[number] = self._open(self.handle_table.chunk(number))
        return tensor_at(found[0], offset, shape, dtype)

    def close(self, number: int) -> None:
        """Close a chunk, after this rank's work on it has ended."""
        found = self._memory.pop(number, None)
        if found is None:
            return
        memory, host_memory = found
        if host_memory is None:
            self._device.close(memory)
        else:
            self._device.unpin(memory.address)

    def close_all(self) -> None:
        """Close all chunks."""
        for number in list(self._memory):
            self.close(number)

    def _open(self, chunk: ChunkEntry) -> tuple[DeviceMemory, SharedMemory | None]:
        if chunk.kind == ON_DEVICE:
            if not chunk.handle:
                raise WorldError("its device memory has no handle for other processes")
            return self._device.open(chunk.handle, chunk.num_bytes), None
        host_memory = SharedMemory.open(self._pid, chunk.file, chunk.num_bytes)
        self._device.pin(host_memory.address, chunk.num_bytes)
        return _as_device_memory(host_memory), host_memory


def tensor_at(memory: DeviceMemory, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor in a piece of memory, at ``offset`` bytes."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return memory.data[offset : offset + num_bytes].view(dtype).view(tuple(shape))


def release_all(blocks: Iterable[Block | None]) -> None:
    """Release the owner's part of each block."""
    for block in blocks:
        if block is not None:
            block.release()


def _as_device_memory(host_memory: SharedMemory) -> DeviceMemory:
    return DeviceMemory(host_memory.address, host_memory.tensor(0, (host_memory.size,), torch.uint8))


def _free(device: Device, own: _OwnChunk) -> None:
    if own.host_memory is None:
        device.free(own.memory)
    else:
        device.unpin(own.memory.address)
        own.host_memory.close()
