"""What a thread has asked of the checked device: launches, waits of the host, and copies from the host."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Counts:
    """Calls of one thread.

    Attributes:
        launches: number of kernels, by operator.
        waits: number of calls for whose result the host waits, by operator.
        copies_from_host: number of copies from the host.
        bytes_from_host: the bytes of these copies.
        pageable_bytes: those of them that a GPU's driver would first copy to pinned memory, while the host waits.
    """

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    copies_from_host: int = 0
    bytes_from_host: int = 0
    pageable_bytes: int = 0

    def __str__(self) -> str:
        waits = ", ".join(f"{name} {number}" for name, number in sorted(self.waits.items())) or "none"
        return (
            f"{self.launches.total()} launches, {self.waits.total()} waits ({waits}), "
            f"{self.copies_from_host} copies of {self.bytes_from_host} bytes from the host"
        )


_of_thread = threading.local()


def counts_of_thread() -> list[Counts]:
    """The counts that are open in this thread."""
    if not hasattr(_of_thread, "open"):
        _of_thread.open = []
    found: list[Counts] = _of_thread.open
    return found


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts of what this thread does inside."""
    counts = Counts()
    counts_of_thread().append(counts)
    try:
        yield counts
    finally:
        counts_of_thread().remove(counts)
