"""Numbered events in the order of a device's work: a rank records events, and its peers wait for them.

The events of a rank complete in the order of their numbers, on whichever stream they were recorded (see
``device.Event.record``). A few ``Event`` objects are used in turn. One that was recorded again stands for a later
number, so a rank that queries late may wait a little longer than needed, but never too short.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from workbench.errors import CollectiveAborted
from workbench.transport.ipc.device import Event
from workbench.transport.messaging.control_page import decode_header
from workbench.transport.messaging.link import Link
from workbench.transport.messaging.waiter import Waiter
from workbench.transport.peer_processes import PeerProcesses

_YIELD_S = 200e-6
_NAP_S = 50e-6
_LOOK_AFTER_S = 0.02


class PeerEvents:
    """The events of a peer. An empty list means that the peer waits for its own device before it sends."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events, self._reached = tuple(events), 0

    def is_done(self, number: int) -> bool:
        """Whether the event with this number is done."""
        if number > self._reached and self._events:
            if not self._events[number % len(self._events)].is_done():
                return False
            self._reached = number
        return True


class LocalEvents(PeerEvents):
    """This rank's events.

    Attributes:
        are_shared: whether other ranks can query them.
    """

    def __init__(self, events: Sequence[Event], are_shared: bool) -> None:
        super().__init__(events)
        self.are_shared = are_shared
        self._number = 0

    def record(self) -> int:
        """Record an event after all work submitted so far; returns its number."""
        self._number += 1
        self._events[self._number % len(self._events)].record()
        return self._number


class EventWaiter(Waiter):
    """Waits for events as for messages: every wait ends."""

    @property
    def processes(self) -> PeerProcesses:
        """The processes of the other ranks."""
        return self._processes

    def wait_for_event(self, link: Link, events: PeerEvents, number: int, header: bytes) -> None:
        """Return when event ``number`` of a peer is done.

        Raises:
            CollectiveAborted: the event will not be done.
        """

        # This wait is not published: the peer's device continues, whatever its process waits for.
        def reason(waited_s: float) -> str | None:
            found = (
                self.abort_reason
                or self._end_reason(link)
                or self._processes.stopped_reason(link.peer)
                or self.peer_failure()
            )
            if found is None and waited_s > self.timeout_s:
                found = f"its device has not reached this call for {self.timeout_s:g} s; {self._activity_of(link)}"
            return found

        self._wait_until(lambda: events.is_done(number), reason, f"rank {link.peer}", header)

    def wait_for_local_event(self, events: LocalEvents, number: int, header: bytes) -> None:
        """Return when event ``number`` of this rank's own device is done.

        Raises:
            CollectiveAborted: this rank cannot continue.
        """

        def reason(waited_s: float) -> str | None:
            found = self.abort_reason or self.peer_failure()
            if found is None and waited_s > self.timeout_s:
                found = f"its work has not ended for {self.timeout_s:g} s"
            return found

        self._wait_until(lambda: events.is_done(number), reason, "its own device", header)

    def _wait_until(
        self, is_done: Callable[[], bool], reason: Callable[[float], str | None], whom: str, header: bytes
    ) -> None:
        started = looked = time.perf_counter()
        while not is_done():
            now = time.perf_counter()
            if now - started < _YIELD_S:
                os.sched_yield()
                continue
            time.sleep(_NAP_S)
            if now - looked < _LOOK_AFTER_S:
                continue
            looked = now
            found = reason(now - started)
            if found is not None and not is_done():
                raise CollectiveAborted(
                    f"rank {self.rank} stopped waiting for {whom} in {decode_header(header)}: {found}"
                )
