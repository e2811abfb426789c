"""The clock and the streams of the checked device.

A launch takes a millisecond, and begins only when the host waits for the device. What a stream of its own is asked for
is done as late as possible: when the main stream or the host waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from tests.checked_device.counts import count_wait, queue_of_thread

LAUNCH_S = 1e-3
_of_thread = threading.local()


class Stream:
    """A queue of copies beside the main stream."""

    is_main = False

    def __init__(self) -> None:
        self._copies: list[Callable[[], None]] = []
        self._num_done = 0
        self._waited = 0

    def ask(self, copy: Callable[[], None], tensors: Iterable[torch.Tensor]) -> None:
        """Copy later. On a GPU that may also be at once: what the main stream does with the memory is waited for."""
        for tensor in tensors:
            used = _uses().get(tensor.untyped_storage().data_ptr(), 0)
            if used > self._waited:
                raise AssertionError(
                    f"a stream copies memory that launch {used} of the main stream uses, and has waited for "
                    f"{self._waited} launches"
                )
        self._copies.append(copy)

    def wait_stream(self, stream: Stream) -> None:
        """Come after all that another stream has been asked for."""
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def wait_event(self, event: Event) -> None:
        """Come after an event."""
        if event.stream.is_main:
            self._waited = max(self._waited, event.at)
        else:
            event.stream.finish(event.at)  # as late as it may be, unless this stream's copies are later still

    @property
    def num_asked(self) -> int:
        """Number of copies until now."""
        return self._num_done + len(self._copies)

    def finish(self, number: int) -> None:
        """Make the first ``number`` copies."""
        while self._num_done < number:
            self._num_done += 1
            self._copies.pop(0)()


class MainStream(Stream):
    """The stream of all launches of a thread."""

    is_main = True

    @property
    def num_asked(self) -> int:
        """Number of launches until now."""
        return queue_of_thread().asked

    def synchronize(self) -> None:
        """What torch's checkpoints call: launches compute at once here."""


def current_stream(device: object = None) -> Stream:
    """The stream of which this thread asks."""
    found: Stream = getattr(_of_thread, "stream", None) or MainStream()
    return found


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    """Context in which a thread asks a stream."""
    before, _of_thread.stream = getattr(_of_thread, "stream", None), chosen
    try:
        yield
    finally:
        _of_thread.stream = before


def use(tensors: Iterable[torch.Tensor]) -> None:
    """The main stream uses memory in its last launch."""
    for tensor in tensors:
        _uses()[tensor.untyped_storage().data_ptr()] = queue_of_thread().asked


def _uses() -> dict[int, int]:
    """By address of memory, the last launch of the main stream that uses it."""
    if not hasattr(_of_thread, "uses"):
        _of_thread.uses = {}
    found: dict[int, int] = _of_thread.uses
    return found


class Event:
    """A point in the queue of the thread that records it, or of one of its streams, as ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._has_time = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        """Come after all that has been asked; on a stream with no work, after all that is done."""
        self._queue, self.stream = queue_of_thread(), stream or current_stream()
        self.at = self.stream.num_asked
        self._at = self._queue.asked if self.stream.is_main else self._queue.done

    def query(self) -> bool:
        """Whether the device has come to it."""
        return self._at <= self._queue.done

    def synchronize(self) -> None:
        """Wait for it."""
        waits = not self.query()
        if not self.stream.is_main:
            waits = waits or self.stream._num_done < self.at
            self.stream.finish(self.at)
        if waits:
            self._queue.done = max(self._queue.done, self._at)
            count_wait("event")

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds until another event, which has passed, as this one has."""
        assert self._has_time and other._has_time and self.query() and other.query()
        return (other._at - self._at) * LAUNCH_S * 1e3
