"""What a thread has asked of the checked device: launches, waits of the host, and copies from the host."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.checked_device import late_copies


@dataclass
class Counts:
    """Calls of one thread.

    Attributes:
        launches: number of kernels, by operator.
        waits: number of calls for whose result the host waits, by operator.
        copies_from_host: number of copies from the host.
        bytes_from_host: the bytes of these copies.
    """

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    copies_from_host: int = 0
    bytes_from_host: int = 0

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


@contextmanager
def uncounted() -> Iterator[None]:
    """Counts nothing of what this thread does inside."""
    before, _of_thread.open = counts_of_thread(), []
    try:
        yield
    finally:
        _of_thread.open = before


class Queue:
    """What a thread has asked of the device, and what of it the device has done: numbers of launches."""

    def __init__(self) -> None:
        self.asked = self.done = 0


def queue_of_thread() -> Queue:
    """The queue of this thread."""
    if not hasattr(_of_thread, "queue"):
        _of_thread.queue = Queue()
    found: Queue = _of_thread.queue
    return found


def count_launch(name: str) -> None:
    """Count a kernel that this thread asks for."""
    queue_of_thread().asked += 1
    for counts in counts_of_thread():
        counts.launches[name] += 1


def count_wait(name: str) -> None:
    """Count a wait of this thread until the device has done all that it has asked for."""
    queue = queue_of_thread()
    queue.done = queue.asked
    late_copies.wait()
    for counts in counts_of_thread():
        counts.waits[name] += 1
