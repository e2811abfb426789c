"""What a rank tells the others about its device memory: a page of host memory beside its board, written by it alone.

An entry is written before the letter that speaks of it, and the letter's semaphore orders the two (see ``semaphores``).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from workbench.transport.ipc.device import HANDLE_BYTES
from workbench.transport.letters.mapped import Mapping

MAX_CHUNKS = 32
NUM_EVENTS = 32
"""Events of a rank, which take turns; CUDA has about a thousand that processes can share."""
ON_DEVICE, ON_HOST = 1, 2
"""Kinds of chunks: memory of the device, or memory of the host for ranks that cannot reach the device's."""
_ENTRY = struct.Struct(f"<qqqq{HANDLE_BYTES}s")  # kind, bytes, file, length of the handle, handle
_CLOSED, _HAS_EVENTS = 0, 1  # words
_EVENTS_AT = 64
_EVENT_BYTES = 8 + HANDLE_BYTES
_CHUNKS_AT = _EVENTS_AT + NUM_EVENTS * _EVENT_BYTES
CATALOGUE_BYTES = -(-(_CHUNKS_AT + MAX_CHUNKS * _ENTRY.size) // 4096) * 4096


class Chunk(NamedTuple):
    """Where a part of a rank's memory is: by handle on the device, by its file on the host."""

    kind: int
    num_bytes: int
    file: int
    handle: bytes


class Catalogue:
    """A rank's catalogue, its own or a peer's."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping, self._data, self._words = mapping, mapping.data, mapping.data.cast("q")

    @property
    def has_closed(self) -> bool:
        """Whether the rank has let go of all memory of others."""
        return bool(self._words[_CLOSED])

    def close(self) -> None:
        """Say that this rank has let go of all memory of others; no rank can open the catalogue any more."""
        self._words[_CLOSED] = 1
        self._mapping.close()

    def write_events(self, handles: list[bytes]) -> None:
        """Publish this rank's events; none where this system does not share them."""
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

    def write_chunk(self, number: int, chunk: Chunk) -> None:
        """Publish a chunk, in the place of one that all have closed."""
        kind, num_bytes, file, handle = chunk
        _ENTRY.pack_into(self._data, _CHUNKS_AT + number * _ENTRY.size, kind, num_bytes, file, len(handle), handle)

    def chunk(self, number: int) -> Chunk:
        """Where a chunk is."""
        kind, num_bytes, file, length, handle = _ENTRY.unpack_from(self._data, _CHUNKS_AT + number * _ENTRY.size)
        return Chunk(kind, num_bytes, file, handle[:length])

    def first_of(self, kind: int) -> int:
        """The first chunk of a kind.

        Raises:
            ValueError: there is none.
        """
        return [self.chunk(number).kind for number in range(MAX_CHUNKS)].index(kind)
