"""Numbered events in the order of a device's work: a rank records events, and its peers wait for them.

The events of a rank complete in the order of their numbers, on whichever stream they were recorded (see
``device.Event.record``). A few ``Event`` objects are used in turn. One that was recorded again stands for a later
number, so a rank that queries late may wait a little longer than needed, but never too short.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

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

    def wait_for_event(self, events: PeerEvents, number: int, header: bytes, link: Link | None = None) -> None:
        """Return when event ``number`` is done, of the peer behind ``link``, or else of this rank's own device.

        This wait is not published: a device continues, whatever its process waits for.

        Raises:
            CollectiveAborted: the event will not be done, or this rank cannot continue.
        """
        started = looked = time.perf_counter()
        while not events.is_done(number):
            now = time.perf_counter()
            if now - started < _YIELD_S:
                os.sched_yield()
                continue
            time.sleep(_NAP_S)
            if now - looked < _LOOK_AFTER_S:
                continue
            looked = now
            found = self._why_not(link, now - started)
            if found is not None and not events.is_done(number):
                whom = "its own device" if link is None else f"rank {link.peer}"
                raise CollectiveAborted(
                    f"rank {self.rank} stopped waiting for {whom} in {decode_header(header)}: {found}"
                )

    def _why_not(self, link: Link | None, waited_s: float) -> str | None:
        """Why such a wait cannot end; None if it may."""
        found = self.abort_reason
        if link is not None:
            found = found or self._end_reason(link) or self._processes.stopped_reason(link.peer)
        found = found or self.peer_failure()
        if found is not None or waited_s <= self.timeout_s:
            return found
        if link is None:
            return f"its work has not ended for {self.timeout_s:g} s"
        return f"its device has not reached this call for {self.timeout_s:g} s; {self._activity_of(link)}"
