"""Why GPU ranks wait over NCCL: which calls each of them has made, told through the store when one hangs.

NCCL pairs calls by their order and by nothing else: between two ranks the n-th send meets the n-th receive, in a group
the n-th sum the n-th sum, whatever they are about. So a rank counts its calls by *channel* (from one rank to another,
or a group) and remembers their words. Nothing is told while all goes well. A call that has not ended after a moment
makes a rank write its calls down and read those of the ranks that it waits for: two different calls with one number
are the ranks' divergence. A rank that has not come to a call yet may be slow; only the timeout ends that.

The main thread may be blocked by then in a wait for the device, so a thread of its own watches, and ends the call.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from workbench.transport.meeting import Meeting
from workbench.transport.network.watch import HAS_LEFT
from workbench.transport.processes import Processes

LOOK_S = 0.2
SUSPECT_S = 0.5
"""How long a call may take before the others' calls are looked at."""
_NUM_REMEMBERED = 32
"""Calls of a channel of which the words are kept."""
_GAVE_UP = "calls/gave up"


class Work(Protocol):
    """What torch.distributed gives for a call."""

    def is_completed(self) -> bool: ...


class _Pending(NamedTuple):
    """A call that has not ended."""

    started_s: float
    header: str
    numbers: tuple[tuple[str, int], ...]
    ranks: frozenset[int]
    works: tuple[Work, ...]


def sends(source: int, destination: int) -> str:
    """The channel from one rank to another."""
    return f"{source} -> {destination}"


def group(ranks: Sequence[int]) -> str:
    """The channel of a group."""
    return f"group {sorted(ranks)}"


class CallWatch:
    """One rank's calls, and its view of the others'.

    Args:
        end: called (on the watching thread) with the reason when a call cannot end.
    """

    def __init__(self, meeting: Meeting, rank: int, timeout_s: float, end: Callable[[str], None]) -> None:
        self.rank, self._store, self._timeout_s, self._end = rank, meeting.store, timeout_s, end
        own = meeting.members[rank]
        near = {
            peer: member.pid
            for peer, member in enumerate(meeting.members)
            if peer != rank and (member.host, member.namespace) == (own.host, own.namespace)
        }
        self._processes = Processes(near)
        self._calls: dict[str, tuple[int, deque[str]]] = {}
        self._pending: deque[_Pending] = deque()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._how = ""

    def note(self, header: str, channels: Sequence[str], ranks: Sequence[int], works: Sequence[Work]) -> None:
        """This rank makes a call on these channels, together with ``ranks``."""
        numbers = []
        with self._lock:
            for channel in channels:
                number, words = self._calls.get(channel) or (0, deque(maxlen=_NUM_REMEMBERED))
                words.append(header)
                self._calls[channel] = (number + 1, words)
                numbers.append((channel, number + 1))
            others = frozenset(ranks) - {self.rank}
            self._pending.append(_Pending(time.monotonic(), header, tuple(numbers), others, tuple(works)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="workbench-calls", daemon=True)
            self._thread.start()

    def look(self) -> str | None:
        """Why the oldest call cannot end, as far as can be known; None if there is none, or if it may yet."""
        with self._lock:
            try:
                while self._pending and all(work.is_completed() for work in self._pending[0].works):
                    self._pending.popleft()
            except RuntimeError as error:
                header = self._pending[0].header
                return f"rank {self.rank} stopped waiting in {header}: NCCL says {str(error).splitlines()[0]}"
            oldest = self._pending[0] if self._pending else None
        if oldest is None or time.monotonic() - oldest.started_s < SUSPECT_S:
            return None
        try:
            reason = self._reason_against(oldest)
        except RuntimeError as error:
            reason = f"the store where the ranks have met cannot be reached: {str(error).splitlines()[0]}"
        return f"rank {self.rank} stopped waiting in {oldest.header}: {reason}" if reason is not None else None

    def end(self, how: str) -> None:
        """This rank takes no part any more: tell the others; ``how`` follows "rank 2" in a sentence."""
        if self._how:
            return
        self._how = how[:2000]
        with suppress(RuntimeError):  # the store may have ended with the rank that served it
            self._write()
            if how != HAS_LEFT and not self._store.check([_GAVE_UP]):
                self._store.set(_GAVE_UP, f"rank {self.rank} {self._how}")

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * LOOK_S)
        self._processes.close()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            reason = self.look()
            if reason is not None:
                self._end(reason)
                return

    def _reason_against(self, call: _Pending) -> str | None:
        for peer in sorted(call.ranks):
            if self._processes.has_ended(peer):
                return f"process {self._processes.pids[peer]} of rank {peer} has ended"
            stopped = self._processes.stopped(peer)
            if stopped is not None:
                return stopped
        if self._store.check([_GAVE_UP]):  # whoever it was: nobody can go on in this world
            return self._store.get(_GAVE_UP).decode()
        self._write()
        notes = {peer: note for peer in sorted(call.ranks) if (note := self._read(peer)) is not None}
        for peer, note in notes.items():
            other = _different_call(call, note)
            if other is not None:
                channel, number, words = other
                return (
                    f"ranks diverged: call {number} of {channel} is {words} on rank {peer}. "
                    "All ranks must run the same program."
                )
            if note["ended"] and not _has_made(call, note):
                return f"rank {peer} {note['ended']}"
        if time.monotonic() - call.started_s > self._timeout_s:
            told = "; ".join(f"rank {peer} {_last_of(call, notes.get(peer))}" for peer in sorted(call.ranks))
            return f"it has not ended for {self._timeout_s:g} s; {told}"
        return None

    def _write(self) -> None:
        with self._lock:
            calls = {channel: (number, list(words)) for channel, (number, words) in self._calls.items()}
        self._store.set(f"calls/{self.rank}", json.dumps({"calls": calls, "ended": self._how}))

    def _read(self, rank: int) -> dict[str, Any] | None:
        key = f"calls/{rank}"
        found: dict[str, Any] | None = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return found


def _words(note: dict[str, Any], channel: str, number: int) -> str | None:
    """The words of a call that a rank has made; None if it has not, or forgotten."""
    last, words = note["calls"].get(channel, (0, []))
    place = len(words) - 1 - (last - number)
    return words[place] if 0 <= place < len(words) else None


def _different_call(call: _Pending, note: dict[str, Any]) -> tuple[str, int, str] | None:
    for channel, number in call.numbers:
        words = _words(note, channel, number)
        if words is not None and words != call.header:
            return channel, number, words
    return None


def _has_made(call: _Pending, note: dict[str, Any]) -> bool:
    return any(note["calls"].get(channel, (0,))[0] >= number for channel, number in call.numbers)


def _last_of(call: _Pending, note: dict[str, Any] | None) -> str:
    """What a rank has done last on the channels of a call."""
    for channel, _ in call.numbers:
        number, words = (note or {"calls": {}})["calls"].get(channel, (0, []))
        if words:
            return f"has made {number} calls of {channel}, the last one {words[-1]}"
    return "has told of no such call"
