"""Waits for messages: spin with yields, then sleep in the kernel in slices, with checks for failures in between."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from workbench.core.cores import num_cores
from workbench.errors import CollectiveAborted
from workbench.transport.messaging.control_page import FAILED, LEFT, ControlPage, WaitRecord, decode_header
from workbench.transport.messaging.link import Link, Message
from workbench.transport.messaging.semaphores import Semaphores
from workbench.transport.network.hang_detector import ACKS, MESSAGES
from workbench.transport.peer_processes import PeerProcesses
from workbench.transport.user_code import user_location

SLICE_S = 0.05
"""Time between two checks of a sleeping rank for an abort, a dead peer or a deadlock.

Ranks of a pipeline sleep for tens of milliseconds, and each check takes time from other ranks that share the core.
"""

_ROOM_S = 1e-3


class SpinLimit(NamedTuple):
    """Limits of the yields of a rank before it sleeps."""

    num_yields: int
    seconds: float


OWN_CORES = SpinLimit(10_000, 5e-3)
"""To wake a sleeping rank costs its peer up to 0.7 ms, which a pipeline would pay at every message. Where another
process needs the core, a few yields take these 5 ms.
"""
SHARED_CORES, AFTER_LONG_SLEEP, _LONG_S = SpinLimit(200, 20e-3), SpinLimit(10, 20e-3), 1e-3
"""Where ranks share cores, a yield gives the core to the awaited rank, so its computation does not count against the
limit. After a sleep of more than ``_LONG_S``, the next wait for the same peer is probably long, too.
"""


class Waiter:
    """Ends every wait of one rank: by a message, or by an error that names the reason.

    Attributes:
        abort_reason: set it (from any thread) to end the wait.
        external_failure: called periodically during a wait; returns the failure of another transport, or None.
    """

    def __init__(
        self, rank: int, own: ControlPage, links: Mapping[int, Link], semaphores: Semaphores, timeout_s: float
    ) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.abort_reason: str | None = None
        self.external_failure: Callable[[], str | None] = lambda: None
        self._own, self._links, self._semaphores = own, links, semaphores
        self._processes = PeerProcesses({peer: link.pid for peer, link in links.items()})
        self._shares_cores = (len(links) + 1) * torch.get_num_threads() > num_cores()
        self._slept_long = dict.fromkeys(links, False)
        self._suspect: tuple[tuple[int, int], ...] | None = None
        self._waits_for_room = False

    def close(self) -> None:
        """Close the file descriptors of the peers' processes."""
        self._processes.close()

    def wait_for_message(self, link: Link, tag: int, header: bytes) -> Message | None:
        """Wait for a message of ``link``; return the one with this tag, or None if another one has arrived."""
        if self.acquire_message(link, header):
            link.queue_acquired()
        return link.try_receive(tag)

    def acquire_message(self, link: Link, header: bytes) -> bool:
        """Acquire the semaphore of the next message; False if a check has taken messages out of the ring instead."""
        return self._spin(link, link.message_semaphore) or self._sleep(link, header, for_ack=False)

    def wait_for_ack(self, link: Link, header: bytes) -> None:
        """Return when an ack of ``link`` has arrived."""
        if self._spin(link, link.ack_semaphore) or self._sleep(link, header, for_ack=True):
            link.read_ack()

    def wait_for_room(self, link: Link, waited_s: float) -> None:
        """Sleep for a moment, in which the peer may take messages out of its full ring."""
        self._waits_for_room = True
        try:
            time.sleep(_ROOM_S)
        finally:
            self._waits_for_room = False
        reason = self.abort_reason or self._end_reason(link)
        if reason is None and waited_s > self.timeout_s:
            reason = f"it has read nothing for {self.timeout_s:g} s; {self._activity_of(link)}"
        if reason is not None:
            raise CollectiveAborted(f"rank {self.rank} stopped waiting for rank {link.peer} in flush: {reason}")

    def peer_failure(self) -> str | None:
        """The first failure of a peer; None if all peers run."""
        return next((reason for link in self._links.values() if (reason := self._failure_of(link))), None)

    def unsatisfied_wait(self) -> tuple[int, int, str, int] | None:
        """Peer, slot (see ``hang_detector``), call and count, if this rank waits and no message is in flight to it."""
        wait = self._own.wait()
        if wait is None or not self._has_received_all(self.rank, wait):
            return None
        num_taken = self._own.words[self._own.read_word(wait.peer, wait.for_ack)]
        return wait.peer, ACKS if wait.for_ack else MESSAGES, wait.header, num_taken

    def awaited_call(self) -> tuple[int, str] | None:
        """Peer and call, if this rank has waited for more than a moment."""
        wait = self._own.wait()
        return None if wait is None else (wait.peer, wait.header)

    def has_pending_message(self) -> bool:
        """Whether the message that this rank waits for is in memory; if no wait is recorded yet, whether any is."""
        if self._waits_for_room:
            return False
        wait = self._own.wait()
        if wait is not None:
            return not self._has_received_all(self.rank, wait)
        sent = {peer: link.theirs.words[link.theirs.sent_word(self.rank)] for peer, link in self._links.items()}
        return any(count != self._own.words[self._own.read_word(peer)] for peer, count in sent.items())

    def is_gone(self, link: Link) -> bool:
        """Whether the peer reads no messages any more."""
        return self._end_reason(link) is not None

    def _spin(self, link: Link, semaphore: int) -> bool:
        """Spin for ``semaphore`` and return whether it was acquired; most messages arrive within microseconds."""
        limit, try_acquire = self._spin_limit(link), self._semaphores.try_acquire
        end = time.perf_counter() + limit.seconds
        for _ in range(limit.num_yields):
            os.sched_yield()
            if try_acquire(semaphore) == 0:
                return True
            if time.perf_counter() > end:
                return False
        return False

    def _spin_limit(self, link: Link) -> SpinLimit:
        if not self._shares_cores:
            return OWN_CORES
        return AFTER_LONG_SLEEP if self._slept_long[link.peer] else SHARED_CORES

    def _sleep(self, link: Link, header: bytes, for_ack: bool) -> bool:
        """As ``_sleep_on``, and note whether the sleep was long."""
        semaphore, started = link.ack_semaphore if for_ack else link.message_semaphore, time.perf_counter()
        # Most waits end within the first slice. Only a longer one is worth a wait record for the peers.
        acquired = self._semaphores.acquire_within(semaphore, SLICE_S) or self._sleep_on(
            link, semaphore, header, for_ack
        )
        self._slept_long[link.peer] = time.perf_counter() - started > _LONG_S
        return acquired

    def _sleep_on(self, link: Link, semaphore: int, header: bytes, for_ack: bool) -> bool:
        """Sleep until ``semaphore`` is acquired; False if a check has taken a message or an ack instead."""
        started = time.perf_counter()
        self._suspect = None
        self._own.write_wait(link.peer, header + user_location().encode(), for_ack)
        try:
            while self._should_continue(link, header, for_ack, time.perf_counter() - started):
                if self._semaphores.acquire_within(semaphore, SLICE_S):
                    return True
            return False
        finally:
            self._own.write_wait(-1, b"")

    def _should_continue(self, link: Link, header: bytes, for_ack: bool, waited_s: float) -> bool:
        """Check for failures. True: continue to wait; False: the last message or ack of an ended peer was taken.

        Raises:
            CollectiveAborted: the awaited message will not arrive.
        """
        for other in self._links.values():
            other.send_queued()
        end = self._end_reason(link)
        # A last message came before the end
        if end is not None and (link.collect_acks() if for_ack else link.queue_next()):
            return False
        reason = self.abort_reason or end or self._processes.stopped_reason(link.peer) or self.external_failure()
        for other in self._links.values():
            reason = reason or self._failure_of(other)
        reason = reason or self._deadlock()
        if reason is None and waited_s > self.timeout_s:
            reason = f"nothing came for {self.timeout_s:g} s; {self._activity_of(link)}"
        if reason is not None:
            verb = "lost" if self.is_gone(link) else "stopped waiting for"  # the peer may have ended during the check
            raise CollectiveAborted(f"rank {self.rank} {verb} rank {link.peer} in {decode_header(header)}: {reason}")
        return True

    def _end_reason(self, link: Link) -> str | None:
        """The reason why the peer sends nothing any more; None if it runs."""
        if link.theirs.state == LEFT:
            return f"rank {link.peer} has left the world"
        return self._failure_of(link)

    def _failure_of(self, link: Link) -> str | None:
        """The failure of the peer, if it has ended without ``close``: no rank can then continue in this world."""
        if link.theirs.state == FAILED:
            return f"rank {link.peer} gave up: {link.theirs.reason}"
        has_died = self._processes.has_ended(link.peer) and link.theirs.state != LEFT
        return f"process {link.pid} of rank {link.peer} has ended" if has_died else None

    def _activity_of(self, link: Link) -> str:
        """The current activity of the peer, as far as this rank can see it, for error texts."""
        if self._processes.is_stopped(link.peer):
            return f"process {link.pid} of rank {link.peer} is stopped (SIGSTOP)"
        wait = link.theirs.wait()
        return f"rank {link.peer} waits for " + (f"rank {wait.peer} in {wait.header}" if wait else "no rank")

    def _deadlock(self) -> str | None:
        """The cycle of ranks that wait for one another, if there is one and it was seen twice."""
        mine = self._own.wait()
        assert mine is not None
        waits: dict[int, WaitRecord] = {}
        rank, wait = self.rank, mine
        while rank not in waits:
            waits[rank] = wait
            following = self._links[wait.peer].theirs.wait() if wait.peer != self.rank else mine
            if following is None or not self._has_received_all(rank, wait):
                self._suspect = None
                return None
            rank, wait = wait.peer, following
        seen = tuple((rank, wait.number) for rank, wait in waits.items())
        if seen != self._suspect:
            self._suspect = seen
            return None
        places = "; ".join(f"rank {rank} waits in {wait.header}" for rank, wait in waits.items())
        return f"ranks diverged, each waits for the next: {places}. All ranks must run the same program."

    def _has_received_all(self, rank: int, wait: WaitRecord) -> bool:
        """Whether ``rank`` has taken all messages (or acks) that the peer it waits for has sent."""
        sender, taker = (self._own if r == self.rank else self._links[r].theirs for r in (wait.peer, rank))
        sent, taken = sender.sent_word(rank, wait.for_ack), taker.read_word(wait.peer, wait.for_ack)
        return sender.words[sent] == taker.words[taken]
