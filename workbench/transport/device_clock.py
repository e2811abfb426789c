"""Times on a device's clock, in seconds of the host's ``time.perf_counter``.

A GPU runs work later than the call that asks for it. So its time is an event in its queue of work: taking one does not
wait for the GPU, reading it does. Other devices have no queue, and their time is the host's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_WITHOUT_QUEUE = ("cpu", "meta")
_KNOWN_FOR_S = 5.0
"""Seconds after which a new pair of times of host and device is taken: events measure short times more finely."""


class _Known(NamedTuple):
    """An event that has passed, and the host's time of it."""

    event: Any
    time_s: float


class QueuedTime(NamedTuple):
    """A time that a device has not come to yet, perhaps."""

    event: Any
    known: _Known

    @property
    def has_passed(self) -> bool:
        """Whether the device has come to it, without a wait."""
        return bool(self.event.query())

    @property
    def seconds(self) -> float:
        """The host's time of it; waits until the device has come to it."""
        self.event.synchronize()
        return self.known.time_s + float(self.known.event.elapsed_time(self.event)) / 1e3


Time = float | QueuedTime


def seconds(time_: Time) -> float:
    """A time as a number; waits for the device."""
    return time_ if isinstance(time_, float) else time_.seconds


class DeviceClock:
    """The clock of a device; ``now()`` is the moment when the device has done what it was asked for so far.

    >>> clock = DeviceClock(torch.device("cpu"))
    >>> started = clock.now()
    >>> seconds(clock.now()) >= seconds(started)
    True
    """

    def __init__(self, device: torch.device) -> None:
        self.now: Callable[[], Time] = time.perf_counter
        if device.type not in _WITHOUT_QUEUE:
            self._of_device = torch.get_device_module(device)
            self._known: _Known | None = None
            self.now = self._queue_event

    def _queue_event(self) -> QueuedTime:
        if self._known is None or time.perf_counter() - self._known.time_s > _KNOWN_FOR_S:
            self._known = self._take_both()
        event = self._of_device.Event(enable_timing=True)
        event.record()
        return QueuedTime(event, self._known)

    def _take_both(self) -> _Known:
        """The time of host and device together, on a stream with no other work, so that nothing is waited for."""
        event, stream = self._of_device.Event(enable_timing=True), self._of_device.Stream()
        for _ in range(2):  # the first one makes the event
            before_s = time.perf_counter()
            event.record(stream)
            event.synchronize()
        return _Known(event, (before_s + time.perf_counter()) / 2)
