"""Which parts of a rank's shared memory are in use: first fit over one range, neighbours merged when they are freed.

First fit keeps to low addresses, whose pages are mapped and warm; touching a page for the first time costs more than
copying it.
"""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64
"""Blocks start at multiples of a cache line, hence of every element size."""


class Arena:
    """Hands out blocks of ``[0, size)``.

    >>> arena = Arena(256)
    >>> arena.allocate(100), arena.allocate(1), arena.allocate(100)
    (0, 128, None)
    >>> arena.free(0, 100)
    >>> arena.allocate(70)
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
        """Take back a block that ``allocate(num_bytes)`` gave."""
        end = start + _rounded(num_bytes)
        index = bisect_left(self._free, (start, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index and self._free[index - 1][1] == start:
            index -= 1
            start = self._free.pop(index)[0]
        self._free.insert(index, (start, end))

    @property
    def num_bytes_in_use(self) -> int:
        """What has been handed out, rounded to whole cache lines."""
        return self.size - sum(end - start for start, end in self._free)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in use."""
        return self._free == [(0, self.size)]


def _rounded(num_bytes: int) -> int:
    return max(ALIGNMENT, -(-num_bytes // ALIGNMENT) * ALIGNMENT)
