"""The clock of the checked device: a launch takes a millisecond, and begins only when the host waits for the device."""

from __future__ import annotations

from tests.checked_device.counts import count_wait, queue_of_thread

LAUNCH_S = 1e-3


class Stream:
    """A queue with no work in it."""


class Event:
    """A point in the queue of the thread that records it, as ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._has_time = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        """Come after all that the thread has asked for; on a stream with no work, after all that is done."""
        self._queue = queue_of_thread()
        self._at = self._queue.asked if stream is None else self._queue.done

    def query(self) -> bool:
        """Whether the device has come to it."""
        return self._at <= self._queue.done

    def synchronize(self) -> None:
        """Wait for it."""
        if not self.query():
            self._queue.done = self._at
            count_wait("event")

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds until another event, which has passed, as this one has."""
        assert self._has_time and other._has_time and self.query() and other.query()
        return (other._at - self._at) * LAUNCH_S * 1e3
