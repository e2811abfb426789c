"""Follows one request to the engines, from sending to its last reply. It never waits for a rank that cannot reply.

When a rank fails, is interrupted or runs out of time, a `Stop` stops the ranks that still run. So control returns
within about two seconds, whatever the engines are doing. Only imports, clauses that handle an interrupt or an error,
and messages on a busy machine take longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from ipyparallel.error import EngineError

from workbench.session import protocol
from workbench.session.adapter import ControlCall, Engines, Event, Request
from workbench.session.divergence import FIRST_PROBE_S, Divergence
from workbench.session.outcome import Outcome
from workbench.session.output.start_progress import print_progress
from workbench.session.processes.core_waits import CoreWaits
from workbench.session.stopping import Stop

if TYPE_CHECKING:
    from workbench.session.processes.choose import Processes

#: After a rank's failure, how long the others may take to fail by themselves.
FAILURE_GRACE_S = 0.2
#: How long after the last reply output may still arrive: on another socket, and on a busy machine seconds later.
OUTPUT_GRACE_S = 10.0
_POLL_S = 1.0


class Listener(Protocol):
    """Receives a run's output and published objects."""

    def on_event(self, event: Event) -> None: ...

    def on_idle(self, now: float) -> None: ...

    def wakeup(self) -> float | None: ...


class Run:
    """Follows a request until every rank has replied or ended."""

    def __init__(
        self,
        engines: Engines,
        request: Request,
        listener: Listener,
        processes: Processes,
        timeout_s: float | None = None,
        label: str = "",
        num_ranks: int = 0,
    ) -> None:
        self.label = label
        self._num_ranks = num_ranks  # of the session, if ranks that wait for one another without end are to be stopped
        self._divergence, self._probes = Divergence(), dict[int, ControlCall]()
        self._engines, self._request, self._listener = engines, request, listener
        self._processes = processes
        self._started_s = time.monotonic()
        self._next_probe_s = self._started_s + FIRST_PROBE_S
        self._deadline_s = None if timeout_s is None else self._started_s + timeout_s
        self._pending = set(request.ranks)
        self._output_complete: set[int] = set()  # ranks whose output is complete
        self._last_reply_s = self._started_s
        self._first_failure_s: float | None = None
        self._failure_waits = CoreWaits([])  # of the engines, since the first failure
        self._stopping: Stop | None = None
        self._has_taken_interrupt = False
        self._stop_wanted, self.ended = threading.Event(), threading.Event()
        self._stop_reason = ""
        self.outcome = Outcome(request.ranks)

    def wait(self) -> Outcome:
        """Follow the run to its end. An interrupt stops the engines, with the reason "interrupt".

        It is held back meanwhile: raised at some line, it would leave ranks behind that nobody follows. One that comes
        after the last reply is left to whoever ends the holding. Exceptions (output that cannot be shown, a test's time
        limit) also stop the engines before they pass.
        """
        try:
            return self._follow()
        finally:
            self.ended.set()

    def _follow(self) -> Outcome:
        error: BaseException | None = None
        while True:
            try:
                if self._finished():
                    break
                if self._pending and self._request.take_interrupt():
                    self._take_interrupt()
                self._step()
            except BaseException as raised:  # noqa: BLE001 - raised again below
                error = error or raised
                self._listener = NullListener()
                self.stop()
        if self._stopping is not None:
            self._stopping.finish()
        if error is not None:
            raise error
        self.outcome.elapsed_s = time.monotonic() - self._started_s
        return self.outcome

    def _take_interrupt(self) -> None:
        self._has_taken_interrupt = True
        self.stop()

    @property
    def was_interrupted_late(self) -> bool:
        """Whether an interrupt has come, and nothing was left to stop."""
        return self._stopping is None and (self._has_taken_interrupt or self._request.is_interrupted)

    def stop(self, reason: str = "interrupt", replaced: Iterable[int] = ()) -> None:
        """Stop the ranks that still run; a restart then replaces some. Call it from any thread.

        While they are stopped already, it takes the time of those that a message has named.
        """
        self._stop_reason, self.outcome.replaced = reason, tuple(replaced)
        self._stop_wanted.set()
        self._request.put("wake", -1, None)

    def abandon(self) -> None:
        """Count ranks that have not replied as dead: the session is being closed, or left to another notebook."""
        if self._pending:
            self.outcome.stop_reason = self.outcome.stop_reason or "closed"
        for rank in sorted(self._pending):
            self._request.put("reply", rank, EngineError("the session was closed"))

    def _finished(self) -> bool:
        if self._pending:
            return False
        loud = set(self._request.ranks) - self._output_complete
        return not loud or self.was_interrupted_late or time.monotonic() > self._last_reply_s + OUTPUT_GRACE_S

    def _step(self) -> None:
        """Handle the messages that have arrived, or wait until one arrives or a step is due."""
        event = self._request.take(self._time_to_wait())
        num_others = self._request.events.qsize()  # no flood holds up a decision
        while event is not None:
            self._handle(event)
            event = self._request.take(0.0) if num_others else None
            num_others -= 1
        now = time.monotonic()
        self._listener.on_idle(now)
        self._decide(now)

    def _time_to_wait(self) -> float:
        times = [self._deadline_s, self._listener.wakeup(), self._stopping.wakeup() if self._stopping else None]
        if self._first_failure_s is not None and self._stopping is None:
            times.append(self._end_of_grace_s())
        if self._num_ranks and self._stopping is None:
            times.append(self._next_probe_s)
        now = time.monotonic()
        return min([max(0.001, moment - now) for moment in times if moment is not None], default=_POLL_S)

    def _handle(self, event: Event) -> None:
        if event.kind == "reply":
            self._handle_reply(event)
        elif event.kind == "idle":
            self._output_complete.add(event.rank)
        elif event.kind == "data" and isinstance(event.content, protocol.Failure):
            self.outcome.failures[event.rank] = event.content
        elif event.kind == "data" and isinstance(event.content, protocol.Value):
            self.outcome.values[event.rank] = protocol.load(event.content.payload)
        elif event.kind == "data" and isinstance(event.content, protocol.Progress):
            self.outcome.progress[event.rank] = event.content
        elif event.kind == "data" and isinstance(event.content, protocol.SavedCheckpoint):
            self.outcome.checkpoints.append(event.content)
        elif event.kind != "wake":
            self._listener.on_event(event)

    def _handle_reply(self, event: Event) -> None:
        if event.rank not in self._pending:
            return
        self._pending.discard(event.rank)
        self._last_reply_s = event.time_s
        self._next_probe_s = min(self._next_probe_s, event.time_s + FIRST_PROBE_S)
        self.outcome.replies[event.rank] = event.content
        self.outcome.replied_s[event.rank] = event.time_s - self._started_s
        failed = isinstance(event.content, Exception)
        if failed and self._first_failure_s is None:
            self._first_failure_s = event.time_s
            self._failure_waits = CoreWaits(self._processes.pids() if self._pending else ())
        if failed and (isinstance(event.content, EngineError) or getattr(event.content, "ename", "") == "EngineError"):
            self._output_complete.add(event.rank)
            self.outcome.dead[event.rank] = self._processes.how_ended(event.rank)

    def _decide(self, now: float) -> None:
        if not self._pending:
            return
        is_wanted = self._take_stop()
        if self._stopping is None and (reason := self._stop_reason if is_wanted else self._reason_to_stop(now)):
            self.outcome.stop_reason = reason
            ranks, number = self._pending, self._request.run
            self._stopping = Stop(self._engines, self._processes, number, ranks, self.outcome, now, print_progress)
        elif self._stopping is not None and is_wanted:
            self._stopping.hurry(now)
        if self._stopping is not None:
            self._stopping.step(now, self._pending)

    def _take_stop(self) -> bool:
        """Whether a stop is wanted. It is taken here only: one that comes later is seen at the next look."""
        is_wanted = self._stop_wanted.is_set()
        if is_wanted:
            self._stop_wanted.clear()
        return is_wanted

    def _end_of_grace_s(self) -> float:
        """Until when others may fail by themselves; time in which they waited for a core does not count."""
        assert self._first_failure_s is not None
        return self._first_failure_s + FAILURE_GRACE_S + self._failure_waits.longest_s()

    def _reason_to_stop(self, now: float) -> str:
        if self._first_failure_s is not None and now >= self._end_of_grace_s():
            return "failure"
        if self._deadline_s is not None and now >= self._deadline_s:
            return "timeout"
        if not self._have_diverged(now):
            return ""
        return "divergence" if len(self._pending) < self._num_ranks else "deadlock"

    def _have_diverged(self, now: float) -> bool:
        """Ask all ranks from time to time what they do: often once some have finished, and else every second."""
        if not self._num_ranks or now < self._next_probe_s:
            return False
        found = {rank: call.answer(timeout_s=0.0) for rank, call in self._probes.items()}
        silent = [rank for rank in self._pending if self._probes and found.get(rank) is None]
        stopped = protocol.RankActivity(waits=protocol.STOPPED)
        found |= {rank: stopped for rank in silent if self._processes.is_stopped(rank)}
        is_certain = bool(found) and self._divergence.is_certain(found, self._pending, now)
        if is_certain:
            self.outcome.calls = {rank: told.call for rank in self._pending if (told := found.get(rank)) and told.call}
        self._probes = self._engines.control(range(self._num_ranks), "activity")
        self._next_probe_s = now + self._divergence.period_s
        return is_certain


class NullListener:
    """A listener that ignores everything."""

    def on_event(self, event: Event) -> None:
        pass

    def on_idle(self, now: float) -> None:
        pass

    def wakeup(self) -> float | None:
        return None
