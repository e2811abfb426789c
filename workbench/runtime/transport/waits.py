"""How a rank waits for a letter: look, yield, then sleep in the kernel in slices, looking around between them."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping

from workbench.errors import CollectiveAborted
from workbench.runtime.caller import user_frame
from workbench.runtime.transport.board import FAILED, LEFT, Board, decode_header
from workbench.runtime.transport.link import Link
from workbench.runtime.transport.semaphores import Semaphores

SLICE_S = 0.02
"""How long a sleeping rank goes without looking for an abort, a dead peer or a deadlock."""
_NUM_LOOKS = 20
_YIELD_S = 200e-6


class Waiter:
    """Ends every wait of one rank: by a letter, or by an error that says why none will come.

    Attributes:
        abort_reason: set (from any thread) to end the wait.
    """

    def __init__(
        self, rank: int, own: Board, links: Mapping[int, Link], semaphores: Semaphores, timeout_s: float
    ) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.abort_reason: str | None = None
        self._own, self._links, self._semaphores = own, links, semaphores
        self._process_files = {peer: os.pidfd_open(link.pid) for peer, link in links.items()}
        self._suspicion: tuple[tuple[int, int], ...] | None = None

    def close(self) -> None:
        """Close the files that watch the peers' processes."""
        for file in self._process_files.values():
            os.close(file)
        self._process_files = {}

    def wait(self, link: Link, header: bytes) -> None:
        """Return when a letter of ``link`` has been read."""
        for _ in range(_NUM_LOOKS):
            if link.read():
                return
        # A peer that is about to come is met within microseconds; one that computes needs this core more than we do.
        end = time.perf_counter() + _YIELD_S
        while time.perf_counter() < end:
            os.sched_yield()
            if link.read():
                return
        self._sleep(link, header)

    def wait_for_room(self, link: Link, waited_s: float) -> None:
        """A short nap until the peer may have read some of the letters to it."""
        time.sleep(1e-3)
        reason = self.abort_reason or self._end_of(link)
        if reason is None and waited_s > self.timeout_s:
            reason = f"it has read nothing for {self.timeout_s:g} s; {self._doing(link)}"
        if reason is not None:
            raise CollectiveAborted(f"rank {self.rank} stopped waiting for rank {link.peer} in flush: {reason}")

    def is_gone(self, link: Link) -> bool:
        """Whether the peer will not read any more letters."""
        return self._end_of(link) is not None

    def _sleep(self, link: Link, header: bytes) -> None:
        started = time.perf_counter()
        self._suspicion = None
        self._own.write_wait(link.peer, header + _place_in_user_code())
        try:
            while not self._semaphores.take_within(link.letter_came, SLICE_S):
                if not self._can_hope(link, header, time.perf_counter() - started):
                    return
            link.read_taken()
        finally:
            self._own.write_wait(-1, b"")

    def _can_hope(self, link: Link, header: bytes, waited_s: float) -> bool:
        """Whether to go on waiting; False if a letter was found while looking for reasons against it."""
        for other in self._links.values():
            other.push()
        end = self._end_of(link)
        if end is not None and link.read():  # its last letter
            return False
        reason = self.abort_reason or end
        for other in self._links.values():
            reason = reason or self._breakdown_of(other)
        reason = reason or self._deadlock(link)
        if reason is None and waited_s > self.timeout_s:
            reason = f"nothing came for {self.timeout_s:g} s; {self._doing(link)}"
        if reason is not None:
            verb = "lost" if end else "stopped waiting for"
            raise CollectiveAborted(f"rank {self.rank} {verb} rank {link.peer} in {decode_header(header)}: {reason}")
        return True

    def _end_of(self, link: Link) -> str | None:
        """Why the peer will not send any more, if that is so."""
        if link.theirs.state == LEFT:
            return f"rank {link.peer} has left the world"
        return self._breakdown_of(link)

    def _breakdown_of(self, link: Link) -> str | None:
        """What happened to the peer, if it has gone without leaving: then nobody can go on in this world."""
        if link.theirs.state == FAILED:
            return f"rank {link.peer} gave up: {link.theirs.reason}"
        watch = select.poll()
        watch.register(self._process_files[link.peer], select.POLLIN)
        has_died = watch.poll(0) and link.theirs.state != LEFT
        return f"process {link.pid} of rank {link.peer} has ended" if has_died else None

    def _doing(self, link: Link) -> str:
        """What the peer does instead of sending, as far as can be seen from here."""
        if _is_stopped(link.pid):
            return f"process {link.pid} of rank {link.peer} is stopped (SIGSTOP)"
        wait = link.theirs.wait()
        return f"rank {link.peer} waits for " + (f"rank {wait.peer} in {wait.header}" if wait else "nobody")

    def _deadlock(self, link: Link) -> str | None:
        """The ring of ranks that wait for one another, if there is one; only what was seen twice counts."""
        mine = self._own.wait()
        assert mine is not None
        ring, waits = [self.rank], [(self.rank, mine.number, mine.header)]
        while True:
            last = ring[-1]
            target = link.peer if last == self.rank else self._waits_for(last)
            if target is None or not self._has_read_all(last, target):
                self._suspicion = None
                return None
            if target in ring:
                break
            wait = self._links[target].theirs.wait()
            if wait is None:
                self._suspicion = None
                return None
            ring.append(target)
            waits.append((target, wait.number, wait.header))
        seen = tuple((rank, number) for rank, number, _ in waits)
        if seen != self._suspicion:
            self._suspicion = seen
            return None
        places = "; ".join(f"rank {rank} waits in {text}" for rank, _, text in waits)
        return f"ranks diverged, each waits for the next: {places}. All ranks must run the same program."

    def _waits_for(self, rank: int) -> int | None:
        wait = self._links[rank].theirs.wait()
        return wait.peer if wait is not None else None

    def _has_read_all(self, reader: int, sender: int) -> bool:
        boards = {rank: self._own if rank == self.rank else self._links[rank].theirs for rank in (reader, sender)}
        num_sent = boards[sender].words[boards[sender].sent_word(reader)]
        return num_sent == boards[reader].words[boards[reader].read_word(sender)]


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _place_in_user_code() -> bytes:
    """`` at train.py:12``: the line of the user's that waits."""
    frame, _ = user_frame()
    return f" at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}".encode() if frame else b""
