"""First-fit allocation of blocks in one range of memory; free neighbours are merged.

First fit prefers low addresses, whose pages are mapped and warm. The first access to a page costs more than a copy of
the page.
"""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64
"""Blocks start at multiples of a cache line, hence of every element size."""


class BlockAllocator:
    """Hands out blocks of ``[0, size)``.

    >>> allocator = BlockAllocator(256)
    >>> allocator.allocate(100), allocator.allocate(1), allocator.allocate(100)
    (0, 128, None)
    >>> allocator.free(0, 100)
    >>> allocator.allocate(70)
    0
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)] if size else []  # (start, end), sorted, never adjacent

    def allocate(self, num_bytes: int) -> int | None:
        """The start of a free block of at least ``num_bytes``, or None where there is none."""
        wanted = _rounded(num_bytes)
        for index, (start, end) in enumerate(self._free):
            if end - start > wanted:
                self._free[index] = (start + wanted, end)
                return start
            if end - start == wanted:
                del self._free[index]
                return start
        return None

    def free(self, start: int, num_bytes: int) -> None:
        """Free a block that ``allocate(num_bytes)`` has returned."""
        end = start + _rounded(num_bytes)
        index = bisect_left(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))

    @property
    def is_empty(self) -> bool:
        """Whether no block is in use."""
        return self._free == [(0, self.size)]


def _rounded(num_bytes: int) -> int:
    return max(ALIGNMENT, -(-num_bytes // ALIGNMENT) * ALIGNMENT)
