"""Places in the order of a device's work, counted: a rank records marks, its peers wait until one has been reached.

A rank's marks are reached in the order of their numbers, whatever stream they were recorded on (see
``device.Event.record``). A few events take turns: one that was recorded again tells of a later mark, so a rank that
looks late may wait a little longer than it must, and never too short.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from workbench.errors import CollectiveAborted
from workbench.transport.ipc.device import Event
from workbench.transport.letters.board import decode_header
from workbench.transport.letters.link import Link
from workbench.transport.letters.waits import Waiter
from workbench.transport.processes import Processes

_YIELD_S = 200e-6
_NAP_S = 50e-6
_LOOK_AFTER_S = 0.02


class PeerMarks:
    """Another rank's marks; without events, all of them have been reached when this rank hears of them."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events, self._reached = tuple(events), 0

    def is_done(self, mark: int) -> bool:
        """Whether the device has come to a mark."""
        if mark > self._reached and self._events:
            if not self._events[mark % len(self._events)].is_done():
                return False
            self._reached = mark
        return True


class Marks(PeerMarks):
    """This rank's marks.

    Attributes:
        are_shared: whether other ranks can look at them.
    """

    def __init__(self, events: Sequence[Event], are_shared: bool) -> None:
        super().__init__(events)
        self.are_shared = are_shared
        self._number = 0

    def record(self) -> int:
        """A mark here: after all work that the device was given."""
        self._number += 1
        self._events[self._number % len(self._events)].record()
        return self._number


class MarkWaiter(Waiter):
    """Waits for marks as for letters: every wait ends."""

    @property
    def processes(self) -> Processes:
        """The processes of the other ranks."""
        return self._processes

    def wait_for_mark(self, link: Link, marks: PeerMarks, mark: int, header: bytes) -> None:
        """Return when the device of a peer has come to a mark of which a letter tells.

        Raises:
            CollectiveAborted: it will not.
        """

        # This wait is not written on the board: the peer's device goes on whatever its process waits for.
        def reason(waited_s: float) -> str | None:
            found = self.abort_reason or self._end_of(link) or self._processes.stopped(link.peer) or self.breakdown()
            if found is None and waited_s > self.timeout_s:
                found = f"its device has not come to this call for {self.timeout_s:g} s; {self._doing(link)}"
            return found

        self._wait_until(lambda: marks.is_done(mark), reason, f"rank {link.peer}", header)

    def wait_for_own(self, marks: Marks, mark: int, header: bytes) -> None:
        """Return when this rank's own device has come to a mark.

        Raises:
            CollectiveAborted: this rank cannot go on.
        """

        def reason(waited_s: float) -> str | None:
            found = self.abort_reason or self.breakdown()
            if found is None and waited_s > self.timeout_s:
                found = f"its work has not ended for {self.timeout_s:g} s"
            return found

        self._wait_until(lambda: marks.is_done(mark), reason, "its own device", header)

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
