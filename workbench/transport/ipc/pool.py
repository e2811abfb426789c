"""Memory on a device through which a rank sends, and what it has opened of the others'.

Whatever is sent is copied into a block of the rank's own pool, on the device, and read there by whoever it is for. A
rank opens a peer's chunk once and keeps it. A chunk in which nothing has lain for a while is *retired*: the ranks that
may have opened it get a letter, close it, and send a receipt; only then is it freed. When a world ends, memory of which
somebody may still have a piece open is kept aside until everybody has said otherwise, or has died (``reap``).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass, field

import torch

from workbench.errors import WorldError
from workbench.transport.ipc.catalogue import MAX_CHUNKS, ON_DEVICE, ON_HOST, Catalogue, Chunk
from workbench.transport.ipc.device import Device, Memory
from workbench.transport.letters.arena import Arena
from workbench.transport.letters.board import decode_header
from workbench.transport.letters.link import Block, Link
from workbench.transport.letters.mapped import Mapping
from workbench.transport.processes import Processes

FIRST_CHUNK_BYTES = 16 * 2**20
_LARGEST_STEP_BYTES = 256 * 2**20
_PAGE_BYTES = 2 * 2**20
"""A chunk fills whole pages of the device: smaller pieces share one, and a handle opens all of it to others."""
_IDLE_ALLOCATIONS = 256
"""A chunk in which nothing lies is retired if it was not needed for so many allocations."""
RETIRE_TAG = -(1 << 61)
"""Tag of letters that say: close this chunk."""
_RETIRE = b"memory that is given back"


@dataclass
class _Own:
    """A chunk of this rank's, and when it was last needed."""

    kind: int
    memory: Memory
    arena: Arena
    mapping: Mapping | None = None
    readers: set[int] = field(default_factory=set)
    last_use: int = 0
    is_retired: bool = False


class Pool:
    """This rank's chunks; more are added when messages need them.

    Attributes:
        why_not_shared: what the system said when memory of the device was to be exported; empty if it was.
    """

    def __init__(self, rank: int, device: Device, catalogue: Catalogue) -> None:
        self.rank, self.device, self._catalogue = rank, device, catalogue
        self._chunks: dict[int, _Own] = {}
        self._num_allocations = 0
        self.why_not_shared = ""

    @property
    def num_bytes(self) -> int:
        """What this rank has made and not given back."""
        return sum(own.arena.size for own in self._chunks.values())

    @property
    def num_bytes_in_use(self) -> int:
        """What lies in blocks."""
        return sum(own.arena.num_bytes_in_use for own in self._chunks.values())

    def allocate(self, num_bytes: int, kind: int, header: bytes) -> Block:
        """A block; more memory if need be.

        Raises:
            WorldError: there is no more.
        """
        self._num_allocations += 1
        for number, own in self._chunks.items():
            if own.kind != kind or own.is_retired:
                continue
            offset = own.arena.allocate(num_bytes)
            if offset is not None:
                own.last_use = self._num_allocations
                return Block(own.arena, number, offset, num_bytes)
        number = self.grow(num_bytes, kind, f"rank {self.rank} in {decode_header(header)}: data for other ranks")
        arena = self._chunks[number].arena
        offset = arena.allocate(num_bytes)
        assert offset is not None
        return Block(arena, number, offset, num_bytes)

    def grow(self, num_bytes: int, kind: int, what: str) -> int:
        """Add a chunk, as large as all before it within reason; its number."""
        number = next((n for n in range(MAX_CHUNKS) if n not in self._chunks), None)
        if number is None:
            raise WorldError(
                f"{what}: the memory for exchanges has {MAX_CHUNKS} parts, no more can be added. Box fewer tensors at "
                "a time, or set WORKBENCH_TRANSPORT=nccl or gloo."
            )
        has = sum(own.arena.size for own in self._chunks.values() if own.kind == kind)
        size = -(-max(num_bytes, min(has, _LARGEST_STEP_BYTES), FIRST_CHUNK_BYTES) // _PAGE_BYTES) * _PAGE_BYTES
        if kind == ON_HOST:
            mapping = Mapping.create(size, what)
            try:
                self.device.pin(mapping.address, size)
            except WorldError:
                mapping.close()
                raise
            memory, chunk = _host_memory(mapping), Chunk(kind, size, mapping.file, b"")
        else:
            mapping, memory = None, self.device.allocate(size, what)
            chunk = Chunk(kind, size, 0, self._handle_of(memory))
        self._catalogue.write_chunk(number, chunk)
        self._chunks[number] = _Own(kind, memory, Arena(size), mapping, last_use=self._num_allocations)
        return number

    def start_of(self, number: int, num_bytes: int) -> torch.Tensor:
        """The first bytes of a chunk."""
        return self._chunks[number].memory.data[:num_bytes]

    def _handle_of(self, memory: Memory) -> bytes:
        """Empty where this system does not share device memory: readers will say so."""
        try:
            return self.device.export(memory)
        except WorldError as error:
            self.why_not_shared = str(error)
            return b""

    def view(self, block: Block, shape: Sequence[int], dtype: torch.dtype, skipped: int = 0) -> torch.Tensor:
        """A contiguous tensor in a block, from ``skipped`` bytes on; it does not keep the block."""
        return tensor_at(self._chunks[block.chunk].memory, block.offset + skipped, shape, dtype)

    def note_reader(self, block: Block, peer: int) -> None:
        """Remember that a peer opens the chunk that this block lies in."""
        self._chunks[block.chunk].readers.add(peer)

    def retire_idle(self, links: MappingOf[int, Link]) -> None:
        """Begin to give back what was not needed for long: one large tensor must not hold memory for ever."""
        for number, own in list(self._chunks.items()):
            is_idle = self._num_allocations - own.last_use >= _IDLE_ALLOCATIONS
            if number and is_idle and own.arena.is_empty and not own.is_retired:
                own.is_retired = True
                notice = _Notice(self, number)
                for peer in own.readers:
                    links[peer].send(RETIRE_TAG, notice, 0, _RETIRE)
                notice.leave()

    def forget(self, number: int) -> None:
        """Free a retired chunk, which all have closed."""
        _free(self.device, self._chunks.pop(number))

    def bury(self, peers: MappingOf[int, Catalogue], processes: Processes) -> None:
        """Free everything as soon as no other rank has any of it open."""
        with _reaping:
            _graves.append(_Grave(self.device, list(self._chunks.values()), dict(peers), processes))
        self._chunks = {}
        reap()


class _Notice:
    """Stands for the chunk that is to be closed: ``leave`` counts the ranks that have."""

    def __init__(self, pool: Pool, number: int) -> None:
        self.chunk, self.offset, self.num_readers = number, 0, 1
        self._pool = pool

    def leave(self) -> None:
        """One rank fewer."""
        self.num_readers -= 1
        if self.num_readers == 0:
            self._pool.forget(self.chunk)


@dataclass
class _Grave:
    """Memory of a world that has ended, and the ranks that may still have it open."""

    device: Device
    chunks: list[_Own]
    peers: dict[int, Catalogue]
    processes: Processes

    def try_to_free(self) -> bool:
        """Whether all is freed."""
        if not all(peer.has_closed or self.processes.has_ended(rank) for rank, peer in self.peers.items()):
            return False
        for own in self.chunks:
            _free(self.device, own)
        self.processes.close()
        return True


_graves: list[_Grave] = []
_reaping = threading.Lock()
"""Simulated ranks are threads."""


def reap() -> int:
    """Free what earlier worlds have left, as far as nobody has it open; how many still have some."""
    with _reaping:
        _graves[:] = [grave for grave in _graves if not grave.try_to_free()]
        return len(_graves)


class Opened:
    """The chunks of one peer that this rank has opened."""

    def __init__(self, device: Device, pid: int, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._device, self._pid = device, pid
        self._memory: dict[int, tuple[Memory, Mapping | None]] = {}

    def __len__(self) -> int:
        return len(self._memory)

    def view(self, number: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor in the peer's memory.

        Raises:
            WorldError: this rank cannot reach it.
        """
        if math.prod(shape) == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self._device.torch_device)
        found = self._memory.get(number)
        if found is None:
            found = self._memory[number] = self._open(self.catalogue.chunk(number))
        return tensor_at(found[0], offset, shape, dtype)

    def close(self, number: int) -> None:
        """Let go of a chunk; this rank's work on it has ended."""
        found = self._memory.pop(number, None)
        if found is None:
            return
        memory, mapping = found
        if mapping is None:
            self._device.close(memory)
        else:
            self._device.unpin(memory.address)

    def close_all(self) -> None:
        """Let go of everything."""
        for number in list(self._memory):
            self.close(number)

    def _open(self, chunk: Chunk) -> tuple[Memory, Mapping | None]:
        if chunk.kind == ON_DEVICE:
            if not chunk.handle:
                raise WorldError("its device memory has no handle for other processes")
            return self._device.open(chunk.handle, chunk.num_bytes), None
        mapping = Mapping.open(self._pid, chunk.file, chunk.num_bytes)
        self._device.pin(mapping.address, chunk.num_bytes)
        return _host_memory(mapping), mapping


def tensor_at(memory: Memory, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor in a piece of memory, from ``offset`` bytes on."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return memory.data[offset : offset + num_bytes].view(dtype).view(tuple(shape))


def leave_all(blocks: Iterable[Block | None]) -> None:
    """The owner needs the blocks no more."""
    for block in blocks:
        if block is not None:
            block.leave()


def _host_memory(mapping: Mapping) -> Memory:
    return Memory(mapping.address, mapping.tensor(0, (mapping.size,), torch.uint8))


def _free(device: Device, own: _Own) -> None:
    if own.mapping is None:
        device.free(own.memory)
    else:
        device.unpin(own.memory.address)
        own.mapping.close()
