"""How a rank waits for a letter: look, yield, then sleep in the kernel in slices, looking around between them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from workbench.errors import CollectiveAborted
from workbench.transport.caller import user_frame
from workbench.transport.letters.board import FAILED, LEFT, Board, Wait, decode_header
from workbench.transport.letters.link import Letter, Link
from workbench.transport.letters.semaphores import Semaphores
from workbench.transport.network.watch import LETTERS, RECEIPTS
from workbench.transport.processes import Processes

SLICE_S = 0.05
"""How long a sleeping rank goes without looking for an abort, a dead peer or a deadlock.

Ranks that wait in a pipeline sleep for tens of milliseconds, and looking takes from others where they share cores.
"""


class Patience(NamedTuple):
    """How often at most, and for how many seconds, a rank yields before it sleeps, looking in between."""

    num_yields: int
    seconds: float


ON_OWN_CORES = Patience(10_000, 5e-3)
"""Waking a rank that sleeps costs the other one up to 0.7 ms of its work, which a pipeline would pay at every handover.
Where somebody else needs the core after all, a few yields take these 5 ms.
"""
ON_SHARED_CORES, AFTER_A_LONG_SLEEP, _LONG_S = Patience(200, 20e-3), Patience(10, 20e-3), 1e-3
"""Where ranks share cores, a yield hands the core to the one that is waited for, and the time for which that one
computes does not count. After a sleep of more than ``_LONG_S``, the next wait for this peer is likely to be long, too.
"""


class Waiter:
    """Ends every wait of one rank: by a letter, or by an error that says why none will come.

    Attributes:
        abort_reason: set (from any thread) to end the wait.
        other_reason: asked now and then during a wait: why this rank cannot go on, as far as others know.
    """

    def __init__(
        self, rank: int, own: Board, links: Mapping[int, Link], semaphores: Semaphores, timeout_s: float
    ) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.abort_reason: str | None = None
        self.other_reason: Callable[[], str | None] = lambda: None
        self._own, self._links, self._semaphores = own, links, semaphores
        self._processes = Processes({peer: link.pid for peer, link in links.items()})
        self._shares_cores = (len(links) + 1) * torch.get_num_threads() > len(os.sched_getaffinity(0))
        self._slept_long = dict.fromkeys(links, False)
        self._suspicion: tuple[tuple[int, int], ...] | None = None

    def close(self) -> None:
        """Close the files that watch the peers' processes."""
        self._processes.close()

    def wait_for_letter(self, link: Link, tag: int, header: bytes) -> Letter | None:
        """The letter of ``link`` with this tag; None if a letter came that may be another one."""
        if self.take_letter(link, header):
            link.read_taken()
        return link.expect(tag)

    def take_letter(self, link: Link, header: bytes) -> bool:
        """Take the next letter's announcement; False if letters were read from the ring instead, maybe this one."""
        return self._yield_for(link, link.letter_came) or self._sleep(link, header, for_receipt=False)

    def wait_for_receipt(self, link: Link, header: bytes) -> None:
        """Return when a receipt of ``link`` has come."""
        if self._yield_for(link, link.receipt_came) or self._sleep(link, header, for_receipt=True):
            link.collect_taken()

    def wait_for_room(self, link: Link, waited_s: float) -> None:
        """A short nap until the peer may have read some of the letters to it."""
        time.sleep(1e-3)
        reason = self.abort_reason or self._end_of(link)
        if reason is None and waited_s > self.timeout_s:
            reason = f"it has read nothing for {self.timeout_s:g} s; {self._doing(link)}"
        if reason is not None:
            raise CollectiveAborted(f"rank {self.rank} stopped waiting for rank {link.peer} in flush: {reason}")

    def breakdown(self) -> str | None:
        """What has ended the world for one of the peers."""
        return next((reason for link in self._links.values() if (reason := self._breakdown_of(link))), None)

    def starving(self) -> tuple[int, int, str, int] | None:
        """Peer, slot (see ``watch``), call and number of what has come, if nothing is under way to this rank."""
        wait = self._own.wait()
        if wait is None or not self._has_taken_all(self.rank, wait):
            return None
        taken = self._own.receipts_read_word(wait.peer) if wait.for_receipt else self._own.read_word(wait.peer)
        return wait.peer, RECEIPTS if wait.for_receipt else LETTERS, wait.header, self._own.words[taken]

    def is_gone(self, link: Link) -> bool:
        """Whether the peer will not read any more letters."""
        return self._end_of(link) is not None

    def _yield_for(self, link: Link, came: int) -> bool:
        """Whether ``came`` could be taken: a peer that is about to come is met in microseconds."""
        patience, take = self._patience_with(link), self._semaphores.try_take
        end = time.perf_counter() + patience.seconds
        for _ in range(patience.num_yields):
            os.sched_yield()
            if take(came) == 0:
                return True
            if time.perf_counter() > end:
                return False
        return False

    def _patience_with(self, link: Link) -> Patience:
        if not self._shares_cores:
            return ON_OWN_CORES
        return AFTER_A_LONG_SLEEP if self._slept_long[link.peer] else ON_SHARED_CORES

    def _sleep(self, link: Link, header: bytes, for_receipt: bool) -> bool:
        """As ``_sleep_on``."""
        came, started = link.receipt_came if for_receipt else link.letter_came, time.perf_counter()
        # Most waits end within the first slice: only a longer one is worth the words that others may read.
        taken = self._semaphores.take_within(came, SLICE_S) or self._sleep_on(link, came, header, for_receipt)
        self._slept_long[link.peer] = time.perf_counter() - started > _LONG_S
        return taken

    def _sleep_on(self, link: Link, came: int, header: bytes, for_receipt: bool) -> bool:
        """Whether ``came`` was taken; False if something came while looking for reasons against it."""
        started = time.perf_counter()
        self._suspicion = None
        self._own.write_wait(link.peer, header + _place_in_user_code(), for_receipt)
        try:
            while self._can_hope(link, header, for_receipt, time.perf_counter() - started):
                if self._semaphores.take_within(came, SLICE_S):
                    return True
            return False
        finally:
            self._own.write_wait(-1, b"")

    def _can_hope(self, link: Link, header: bytes, for_receipt: bool, waited_s: float) -> bool:
        """Whether to go on waiting; False if something came while looking for reasons against it."""
        for other in self._links.values():
            other.push()
        end = self._end_of(link)
        if end is not None and (link.collect() if for_receipt else link.read()):  # its last one
            return False
        reason = self.abort_reason or end or self._processes.stopped(link.peer) or self.other_reason()
        for other in self._links.values():
            reason = reason or self._breakdown_of(other)
        reason = reason or self._deadlock(link)
        if reason is None and waited_s > self.timeout_s:
            reason = f"nothing came for {self.timeout_s:g} s; {self._doing(link)}"
        if reason is not None:
            verb = "lost" if self.is_gone(link) else "stopped waiting for"  # it may have ended while we looked
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
        has_died = self._processes.has_ended(link.peer) and link.theirs.state != LEFT
        return f"process {link.pid} of rank {link.peer} has ended" if has_died else None

    def _doing(self, link: Link) -> str:
        """What the peer does instead of sending, as far as can be seen from here."""
        if self._processes.is_stopped(link.peer):
            return f"process {link.pid} of rank {link.peer} is stopped (SIGSTOP)"
        wait = link.theirs.wait()
        return f"rank {link.peer} waits for " + (f"rank {wait.peer} in {wait.header}" if wait else "nobody")

    def _deadlock(self, link: Link) -> str | None:
        """The ring of ranks that wait for one another, if there is one; only what was seen twice counts."""
        mine = self._own.wait()
        assert mine is not None
        waits: dict[int, Wait] = {}
        rank, wait = self.rank, mine
        while rank not in waits:
            waits[rank] = wait
            following = self._links[wait.peer].theirs.wait() if wait.peer != self.rank else mine
            if following is None or not self._has_taken_all(rank, wait):
                self._suspicion = None
                return None
            rank, wait = wait.peer, following
        seen = tuple((rank, wait.number) for rank, wait in waits.items())
        if seen != self._suspicion:
            self._suspicion = seen
            return None
        places = "; ".join(f"rank {rank} waits in {wait.header}" for rank, wait in waits.items())
        return f"ranks diverged, each waits for the next: {places}. All ranks must run the same program."

    def _has_taken_all(self, rank: int, wait: Wait) -> bool:
        """Whether ``rank`` has seen all of what its peer has sent of what it waits for."""
        sender, taker = (self._own if r == self.rank else self._links[r].theirs for r in (wait.peer, rank))
        if wait.for_receipt:
            sent, taken = sender.receipts_sent_word(rank), taker.receipts_read_word(wait.peer)
        else:
            sent, taken = sender.sent_word(rank), taker.read_word(wait.peer)
        return sender.words[sent] == taker.words[taken]


def _place_in_user_code() -> bytes:
    """`` at train.py:12``: the line of the user's that waits."""
    frame, _ = user_frame()
    return f" at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}".encode() if frame else b""
