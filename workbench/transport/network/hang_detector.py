"""Detection of hangs between ranks that do not share memory, through the store of their rendezvous.

Nothing is written while all is well. A rank that has waited for a moment publishes the call it waits in and the counts
of messages that it has sent and received; it reads the status of the rank that it waits for. The counts show whether a
message can still arrive, also if a status is old: counts only grow, so an outdated status may delay a verdict but never
cause a wrong one. The store's calls block in C++, so a helper thread makes them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from workbench.transport.network.heartbeat import Heartbeat
from workbench.transport.network.helper_thread import HelperThread, Job
from workbench.transport.peer_processes import PeerProcesses
from workbench.transport.rendezvous import Rendezvous

MESSAGES, ACKS = -1, -2
"""Slots of messages and acks in shared memory, which a status counts separately."""
HAS_LEFT = "has left the world"
_GAVE_UP = "gave up"
_ANSWER_S = 0.5
"""Limit of the wait for an answer of the store."""


@dataclass
class WaitStatus:
    """The published state of a rank.

    Attributes:
        source: the rank that it waits for; -1: it does not wait.
        slot, call: slot of the awaited message, and header of the call that waits.
        num_received: number of messages of ``source`` that have arrived.
        sent: by receiving rank, the number of messages sent, and the slots of those that were not received yet.
        ended: the reason why the rank has ended; empty while it runs.
    """

    source: int = -1
    slot: int = 0
    call: str = ""
    num_received: int = 0
    sent: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    ended: str = ""


class Wait(NamedTuple):
    """A wait of this rank, with the number of messages of ``source`` that it has received so far."""

    source: int
    slot: int
    call: str
    num_received: int


class HangDetector:
    """Publishes one rank's status, and reads those of its peers.

    Attributes:
        processes: the processes of the peers on this host.
        sent, received: numbers of messages, by peer; the transport counts them.
        pending: slots of messages that were not received yet, by peer.
        local_counts: returns the counts of shared memory to ranks of this host, in the form of ``WaitStatus.sent``.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        self.rank, self.members = rank, rendezvous.members
        self._store = rendezvous.store
        self.processes = PeerProcesses(rendezvous.pids_beside(rank))
        self._heartbeat = Heartbeat(self._store, self.members, rank)
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.pending: dict[int, list[int]] = {}
        self.local_counts: Callable[[], dict[str, tuple[int, list[int]]]] = dict
        self._helper = HelperThread("workbench-watch")
        self._check: Job | None = None
        self._suspect: tuple[Wait, str] | None = None
        self._verdict: tuple[Wait, str] | None = None
        self._is_published = False
        self._ended = ""

    def hang_reason(self, wait: Wait) -> str | None:
        """Why ``wait`` cannot end, as far as is known by now; starts the next check of the peers' statuses."""
        if self.processes.has_ended(wait.source):
            return f"process {self.processes.pids[wait.source]} of rank {wait.source} has ended"
        # Check all processes, not only the awaited one: ranks on other hosts cannot see them.
        stopped = [text for peer in self.processes.pids if (text := self.processes.stopped_reason(peer))]
        if stopped:
            return stopped[0]
        if self._check is None or self._check.finished.is_set():
            self._is_published = True
            self._check = self._helper.submit(lambda: self._check_peers(wait))
        verdict = self._verdict
        return verdict[1] if verdict is not None and verdict[0] == wait else None

    def forget_wait(self) -> None:
        """Clear the published wait, after it has ended."""
        if self._is_published:
            self._is_published, self._verdict = False, None
            self._helper.submit(lambda: self._write(WaitStatus(sent=self._sent())))

    def loss_reason(self, peer: int) -> str | None:
        """Why the connection to a peer broke: the peer's published reason, or the end of its process."""
        found: list[str] = []
        job = self._helper.submit(lambda: found.append(self._read(peer).ended))
        job.finished.wait(_ANSWER_S)
        if found and found[0]:
            return f"rank {peer} {found[0]}"
        if self.processes.has_ended(peer, within_s=0.2):
            return f"process {self.processes.pids[peer]} of rank {peer} has ended"
        return None

    def activity_of(self, peer: int) -> str:
        """The current activity of a peer, for error texts."""
        if self.processes.is_stopped(peer):
            return f"process {self.processes.pids[peer]} of rank {peer} is stopped (SIGSTOP)"
        found: list[WaitStatus] = []
        self._helper.submit(lambda: found.append(self._read(peer))).finished.wait(_ANSWER_S)
        if not found or found[0].source < 0:
            return f"rank {peer} waits for no rank"
        return f"rank {peer} waits for rank {found[0].source} in {found[0].call}"

    def end(self, how: str) -> None:
        """Publish that this rank has ended; ``how`` follows "rank 2" in a sentence."""
        if not self._ended:
            self._ended = how[:2000]
            self._helper.submit(self._write_end).finished.wait(_ANSWER_S)

    def close(self) -> None:
        """End the threads and close the file descriptors of processes."""
        self._heartbeat.close()
        self._helper.close()
        self.processes.close()

    def _write_end(self) -> None:
        self._write(WaitStatus())
        if self._ended != HAS_LEFT and not self._store.check([_GAVE_UP]):
            self._store.set(_GAVE_UP, f"rank {self.rank} {self._ended}")

    def _check_peers(self, wait: Wait) -> None:
        if self._store.check([_GAVE_UP]):  # a failure of any rank ends the world
            self._verdict = (wait, self._store.get(_GAVE_UP).decode())
            return
        silence = self._heartbeat.silence_of(wait.source)
        if silence is not None:
            self._verdict = (wait, silence)
            return
        own = WaitStatus(*wait, self._sent())
        self._write(own)
        text = find_deadlock(self.rank, own, self._read)
        found = (wait, text) if text is not None else None
        if found is not None and found == self._suspect:  # a deadlock counts if it was seen twice
            self._verdict = found
        self._suspect = found

    def _sent(self) -> dict[str, tuple[int, list[int]]]:
        far = {str(peer): (count, list(self.pending.get(peer, ()))) for peer, count in self.sent.items()}
        return far | self.local_counts()

    def _write(self, status: WaitStatus) -> None:
        status.ended = self._ended
        self._store.set(f"status/{self.rank}", json.dumps(asdict(status)))

    def _read(self, rank: int) -> WaitStatus:
        key = f"status/{rank}"
        return WaitStatus(**json.loads(self._store.get(key))) if self._store.check([key]) else WaitStatus()


def find_deadlock(rank: int, own: WaitStatus, read: Callable[[int], WaitStatus]) -> str | None:
    """Follow the chain of waits from ``rank``; return a text if it ends in a rank that has ended, or in a cycle.

    No rank of the cycle may have a message in flight: ``sent - pending`` messages have left the sender, which is more
    than ``num_received`` while one travels. A pending message in the awaited slot is about to be received.
    """
    ring, statuses = [rank], {rank: own}
    while True:
        last, status = ring[-1], statuses[ring[-1]]
        source = status.source
        if source not in statuses:
            statuses[source] = read(source)
        if statuses[source].ended:
            return f"rank {source} {statuses[source].ended}"
        key = acks_key(last) if status.slot == ACKS else str(last)
        num_sent, pending = statuses[source].sent.get(key, (0, []))
        if status.slot in pending or num_sent - len(pending) > status.num_received:
            return None
        if source in ring:
            break
        if statuses[source].source < 0:
            return None
        ring.append(source)
    places = "; ".join(
        f"rank {member} waits for rank {statuses[member].source} in {statuses[member].call}" for member in ring
    )
    return f"ranks diverged, each waits for the next: {places}. All ranks must run the same program."


def acks_key(rank: int) -> str:
    """The key of ``WaitStatus.sent`` that counts acks for a rank."""
    return f"{rank} acks"
