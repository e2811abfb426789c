"""A rank's table of IPC handles for its device memory and events, in shared memory, written by this rank alone.

A rank writes an entry before the message that refers to it; the message's semaphore orders both (see ``semaphores``).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from workbench.transport.ipc.device import HANDLE_BYTES
from workbench.transport.messaging.shared_memory import SharedMemory

MAX_CHUNKS = 32
NUM_EVENTS = 32
"""Events of a rank, used in turn; CUDA has about a thousand that processes can share."""
ON_DEVICE, ON_HOST = 1, 2
"""Kinds of chunks: memory of the device, or memory of the host for ranks that cannot reach the device's."""
_ENTRY = struct.Struct(f"<qqqq{HANDLE_BYTES}s")  # kind, bytes, file, length of the handle, handle
_CLOSED, _HAS_EVENTS = 0, 1  # words
_EVENTS_AT = 64
_EVENT_BYTES = 8 + HANDLE_BYTES
_CHUNKS_AT = _EVENTS_AT + NUM_EVENTS * _EVENT_BYTES
HANDLE_TABLE_BYTES = -(-(_CHUNKS_AT + MAX_CHUNKS * _ENTRY.size) // 4096) * 4096


class ChunkEntry(NamedTuple):
    """The place of a chunk of a rank's memory: a handle on the device, or a file on the host."""

    kind: int
    num_bytes: int
    file: int
    handle: bytes


class HandleTable:
    """The handle table of this rank or of a peer."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory, self._data, self._words = memory, memory.data, memory.data.cast("q")

    @property
    def has_closed(self) -> bool:
        """Whether the rank has closed all memory of its peers."""
        return bool(self._words[_CLOSED])

    def close(self) -> None:
        """Publish that this rank has closed all memory of its peers; no rank can open the table any more."""
        self._words[_CLOSED] = 1
        self._memory.close()

    def write_events(self, handles: list[bytes]) -> None:
        """Publish this rank's events; an empty list where the system does not share events."""
        for number, handle in enumerate(handles):
            at = _EVENTS_AT + number * _EVENT_BYTES
            struct.pack_into(f"<q{HANDLE_BYTES}s", self._data, at, len(handle), handle)
        self._words[_HAS_EVENTS] = int(bool(handles))

    def events(self) -> list[bytes]:
        """Handles of the rank's events."""
        if not self._words[_HAS_EVENTS]:
            return []
        found = []
        for number in range(NUM_EVENTS):
            length, handle = struct.unpack_from(f"<q{HANDLE_BYTES}s", self._data, _EVENTS_AT + number * _EVENT_BYTES)
            found.append(handle[:length])
        return found

    def write_chunk(self, number: int, chunk: ChunkEntry) -> None:
        """Publish a chunk under a number that is free, or whose chunk all peers have closed."""
        kind, num_bytes, file, handle = chunk
        _ENTRY.pack_into(self._data, _CHUNKS_AT + number * _ENTRY.size, kind, num_bytes, file, len(handle), handle)

    def chunk(self, number: int) -> ChunkEntry:
        """The place of a chunk."""
        kind, num_bytes, file, length, handle = _ENTRY.unpack_from(self._data, _CHUNKS_AT + number * _ENTRY.size)
        return ChunkEntry(kind, num_bytes, file, handle[:length])

    def first_of(self, kind: int) -> int:
        """The first chunk of a kind.

        Raises:
            ValueError: there is no chunk of this kind.
        """
        return [self.chunk(number).kind for number in range(MAX_CHUNKS)].index(kind)
