"""What a rank has sent, and its time in exchanges, up to a moment; and times on a device's clock, in seconds of the
host's ``time.perf_counter``.

A GPU runs work later than the call that asks for it. So its time is an event in its queue of work: taking one does not
wait for the GPU, reading it does. Other devices have no queue, and their time is the host's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from workbench.errors import CaptureError

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
            self._is_recorded = getattr(self._of_device, "is_current_stream_capturing", bool)
            self._known: _Known | None = None
            self.now = self._queue_event

    def _queue_event(self) -> QueuedTime:
        if self._is_recorded():
            raise CaptureError(
                "torch.cuda.graph: an exchange between ranks, or a clock, comes while a graph is recorded. It would "
                "repeat kernels only, not what the ranks' processes do for an exchange. Use "
                'wb.capture(step, backend="cudagraphs"), which makes graphs of what lies between exchanges.'
            )
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


@dataclass(slots=True, eq=False)
class _QueuedExchange:
    """An exchange that a device may not have done yet. ``total_s`` are the seconds in exchanges until its end."""

    started: QueuedTime
    stopped: QueuedTime
    total_s: float | None = None


class Moment(NamedTuple):
    """A point of a rank's program: its clock and its counts so far. ``Traffic.between`` reads two of them."""

    time: Time
    in_exchanges: float | _QueuedExchange
    num_exchanges: int
    sent_bytes: int


class Interval(NamedTuple):
    """What lies between two moments of a rank: times on the host's clock, and what it did in exchanges."""

    start_s: float
    stop_s: float
    exchange_s: float
    num_exchanges: int
    sent_bytes: int

    @property
    def time_s(self) -> float:
        """Seconds from start to stop."""
        return self.stop_s - self.start_s


class Traffic:
    """Bytes that one rank has sent since the last ``reset``, and seconds spent in exchanges.

    Times are those of the rank's device (``DeviceClock``): nothing waits for it before ``between`` is called.

    >>> traffic = Traffic(torch.device("cpu"))
    >>> start = traffic.moment()
    >>> started = traffic.now()
    >>> traffic.add("all-gather", 64, started)
    >>> traffic.between(start, traffic.moment()).sent_bytes
    64
    """

    def __init__(self, device: torch.device) -> None:
        self.now = DeviceClock(device).now
        self._queued: deque[_QueuedExchange] = deque()
        self.reset()

    def reset(self) -> None:
        """Start counting from zero."""
        self.sent_bytes, self.num_exchanges, self.by_kind = 0, 0, dict[str, int]()
        for exchange in self._queued:
            exchange.total_s = 0.0
        self._queued.clear()
        self._time_s = 0.0

    def add(self, kind: str, sent_bytes: int, started: Time | None = None) -> None:
        """Count one exchange of this rank; and its time, if it has ``started`` (of ``now()``) and ends now."""
        self.sent_bytes += sent_bytes
        self.num_exchanges += 1
        self.by_kind[kind] = self.by_kind.get(kind, 0) + sent_bytes
        if isinstance(started, float):  # what end_exchange does, without a call: small exchanges take microseconds
            self._time_s += time.perf_counter() - started
        elif started is not None:
            self.end_exchange(started)

    def end_exchange(self, started: Time) -> None:
        """Count the time from ``started`` (of ``now()``) to now as time in exchanges."""
        stopped = self.now()
        if isinstance(started, float) and isinstance(stopped, float):
            self._time_s += stopped - started
            return
        assert isinstance(started, QueuedTime)
        assert isinstance(stopped, QueuedTime)
        self._queued.append(_QueuedExchange(started, stopped))
        while self._queued and self._queued[0].stopped.has_passed:
            self._read_first()

    def moment(self) -> Moment:
        """This point of the program."""
        in_exchanges = self._queued[-1] if self._queued else self._time_s
        return Moment(self.now(), in_exchanges, self.num_exchanges, self.sent_bytes)

    def between(self, start: Moment, stop: Moment) -> Interval:
        """The interval from one moment to a later one; waits for the device."""
        in_exchanges = self._seconds_of(stop.in_exchanges) - self._seconds_of(start.in_exchanges)
        counts = stop.num_exchanges - start.num_exchanges, stop.sent_bytes - start.sent_bytes
        return Interval(seconds(start.time), seconds(stop.time), in_exchanges, *counts)

    def _seconds_of(self, in_exchanges: float | _QueuedExchange) -> float:
        if isinstance(in_exchanges, float):
            return in_exchanges
        while in_exchanges.total_s is None:
            self._read_first()
        return in_exchanges.total_s

    def _read_first(self) -> None:
        exchange = self._queued.popleft()
        self._time_s += exchange.stopped.seconds - exchange.started.seconds
        exchange.total_s = self._time_s


@dataclass(slots=True)
class TrafficCount:
    """Exchanges, bytes, and bytes by kind: of a ``Traffic`` up to a moment, or between two of them."""

    num_exchanges: int
    sent_bytes: int
    by_kind: dict[str, int]

    @classmethod
    def so_far(cls, traffic: Traffic) -> TrafficCount:
        """What has been counted."""
        return cls(traffic.num_exchanges, traffic.sent_bytes, dict(traffic.by_kind))

    def until(self, traffic: Traffic) -> TrafficCount:
        """What has been counted since."""
        kinds = {kind: size - self.by_kind.get(kind, 0) for kind, size in traffic.by_kind.items()}
        return TrafficCount(traffic.num_exchanges - self.num_exchanges, traffic.sent_bytes - self.sent_bytes, kinds)

    def without(self, others: Sequence[TrafficCount]) -> TrafficCount:
        """What remains without some of it."""
        kinds = {kind: size - sum(o.by_kind.get(kind, 0) for o in others) for kind, size in self.by_kind.items()}
        num_exchanges = self.num_exchanges - sum(other.num_exchanges for other in others)
        return TrafficCount(num_exchanges, self.sent_bytes - sum(other.sent_bytes for other in others), kinds)

    def add_to(self, traffic: Traffic) -> None:
        """Count it once more."""
        traffic.num_exchanges += self.num_exchanges
        traffic.sent_bytes += self.sent_bytes
        for kind, size in self.by_kind.items():
            traffic.by_kind[kind] = traffic.by_kind.get(kind, 0) + size
