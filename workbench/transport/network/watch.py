"""Why a rank waits: what ranks that cannot see one another's memory tell each other through the store of their meeting.

Nothing is told while all goes well. A rank that has waited for a moment writes down what it waits for and how many
messages it has sent and received, and reads what the rank it waits for has written. From these counts follows whether
a message can still come, however old the notes are: counts only grow, so a note that is out of date makes a rank
hope, never despair. The store's calls block in C++, so a helper thread makes them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from workbench.transport.meeting import Meeting
from workbench.transport.network.beats import Beats
from workbench.transport.network.waiting import Helper, Job
from workbench.transport.processes import Processes

LETTERS, RECEIPTS = -1, -2
"""Slots of what goes through shared memory; its notes count letters and receipts apart."""
HAS_LEFT = "has left the world"
_GAVE_UP = "gave up"
_ANSWER_S = 0.5
"""How long an answer of the store about a broken connection is waited for."""


@dataclass
class Note:
    """What a rank has written down.

    Attributes:
        source: whom it waits for; -1: for nobody.
        slot, call: the message it waits for, and the call that does, in words.
        num_received: how many messages of ``source`` have arrived.
        sent: by receiving rank, how many messages have gone out, and the slots of those that wait to be fetched.
        ended: why the rank takes no part any more; empty while it does.
    """

    source: int = -1
    slot: int = 0
    call: str = ""
    num_received: int = 0
    sent: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    ended: str = ""


class Wait(NamedTuple):
    """What this rank waits for, and how many messages of ``source`` it has got so far."""

    source: int
    slot: int
    call: str
    num_received: int


class Watch:
    """One rank's notes, and its view of the others.

    Attributes:
        processes: the other ranks' processes on this host.
        sent, received: messages that have left and arrived, by the other rank; the transport counts them.
        pending: slots of messages that have not been fetched yet, by receiving rank.
        near_counts: what has gone to ranks of this host through shared memory, as ``Note.sent`` tells it.
    """

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.members = rank, meeting.members
        self._store = meeting.store
        own = self.members[rank]
        near = {
            peer: member.pid
            for peer, member in enumerate(self.members)
            if peer != rank and (member.host, member.namespace) == (own.host, own.namespace)
        }
        self.processes = Processes(near)
        self._beats = Beats(self._store, self.members, rank)
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.pending: dict[int, list[int]] = {}
        self.near_counts: Callable[[], dict[str, tuple[int, list[int]]]] = dict
        self._helper = Helper("workbench-watch")
        self._look: Job | None = None
        self._suspicion: tuple[Wait, str] | None = None
        self._verdict: tuple[Wait, str] | None = None
        self._is_noted = False
        self._ended = ""

    def reason_against(self, wait: Wait) -> str | None:
        """Why ``wait`` is hopeless, as far as is known by now; starts another look at the others' notes."""
        if self.processes.has_ended(wait.source):
            return f"process {self.processes.pids[wait.source]} of rank {wait.source} has ended"
        # Any that is stopped, not only the one that is waited for: ranks on other hosts cannot see it.
        stopped = [text for peer in self.processes.pids if (text := self.processes.stopped(peer))]
        if stopped:
            return stopped[0]
        if self._look is None or self._look.finished.is_set():
            self._is_noted = True
            self._look = self._helper.submit(lambda: self._look_around(wait))
        verdict = self._verdict
        return verdict[1] if verdict is not None and verdict[0] == wait else None

    def forget_wait(self) -> None:
        """The wait has ended; take the note about it back."""
        if self._is_noted:
            self._is_noted, self._verdict = False, None
            self._helper.submit(lambda: self._write(Note(sent=self._sent())))

    def why_lost(self, peer: int) -> str | None:
        """What the peer to whom the connection broke has said, or what is seen of its process."""
        found: list[str] = []
        job = self._helper.submit(lambda: found.append(self._read(peer).ended))
        job.finished.wait(_ANSWER_S)
        if found and found[0]:
            return f"rank {peer} {found[0]}"
        if self.processes.has_ended(peer, within_s=0.2):
            return f"process {self.processes.pids[peer]} of rank {peer} has ended"
        return None

    def doing(self, peer: int) -> str:
        """What the peer does instead of sending."""
        if self.processes.is_stopped(peer):
            return f"process {self.processes.pids[peer]} of rank {peer} is stopped (SIGSTOP)"
        found: list[Note] = []
        self._helper.submit(lambda: found.append(self._read(peer))).finished.wait(_ANSWER_S)
        if not found or found[0].source < 0:
            return f"rank {peer} waits for nobody"
        return f"rank {peer} waits for rank {found[0].source} in {found[0].call}"

    def end(self, how: str) -> None:
        """Tell the others that this rank takes no part any more; ``how`` follows "rank 2" in a sentence."""
        if not self._ended:
            self._ended = how[:2000]
            self._helper.submit(self._write_end).finished.wait(_ANSWER_S)

    def close(self) -> None:
        """End the threads and close the files that watch processes."""
        self._beats.close()
        self._helper.close()
        self.processes.close()

    def _write_end(self) -> None:
        self._write(Note())
        if self._ended != HAS_LEFT and not self._store.check([_GAVE_UP]):
            self._store.set(_GAVE_UP, f"rank {self.rank} {self._ended}")

    def _look_around(self, wait: Wait) -> None:
        if self._store.check([_GAVE_UP]):  # whoever it was: nobody can go on in this world
            self._verdict = (wait, self._store.get(_GAVE_UP).decode())
            return
        silence = self._beats.silence_of(wait.source)
        if silence is not None:
            self._verdict = (wait, silence)
            return
        own = Note(*wait, self._sent())
        self._write(own)
        text = find_ring(self.rank, own, self._read)
        found = (wait, text) if text is not None else None
        if found is not None and found == self._suspicion:  # only what was seen twice counts
            self._verdict = found
        self._suspicion = found

    def _sent(self) -> dict[str, tuple[int, list[int]]]:
        far = {str(peer): (count, list(self.pending.get(peer, ()))) for peer, count in self.sent.items()}
        return far | self.near_counts()

    def _write(self, note: Note) -> None:
        note.ended = self._ended
        self._store.set(f"note/{self.rank}", json.dumps(asdict(note)))

    def _read(self, rank: int) -> Note:
        key = f"note/{rank}"
        return Note(**json.loads(self._store.get(key))) if self._store.check([key]) else Note()


def find_ring(rank: int, own: Note, read: Callable[[int], Note]) -> str | None:
    """Follow who waits for whom from ``rank`` on; says so if somebody has ended, or if it leads back.

    A rank in the ring must not have a message under way: sent - pending is what has left the sender, and is more than
    ``num_received`` while one travels; a pending one with the slot that is waited for is about to be fetched.
    """
    ring, notes = [rank], {rank: own}
    while True:
        last, note = ring[-1], notes[ring[-1]]
        source = note.source
        if source not in notes:
            notes[source] = read(source)
        if notes[source].ended:
            return f"rank {source} {notes[source].ended}"
        key = receipts_key(last) if note.slot == RECEIPTS else str(last)
        num_sent, pending = notes[source].sent.get(key, (0, []))
        if note.slot in pending or num_sent - len(pending) > note.num_received:
            return None
        if source in ring:
            break
        if notes[source].source < 0:
            return None
        ring.append(source)
    places = "; ".join(
        f"rank {member} waits for rank {notes[member].source} in {notes[member].call}" for member in ring
    )
    return f"ranks diverged, each waits for the next: {places}. All ranks must run the same program."


def receipts_key(rank: int) -> str:
    """Where ``Note.sent`` counts receipts for a rank."""
    return f"{rank} receipts"


__all__ = ["HAS_LEFT", "LETTERS", "RECEIPTS", "Note", "Wait", "Watch", "find_ring", "receipts_key"]
