"""Follows one request to the engines, from sending to its last reply. It never waits for a rank that cannot reply.

When a rank fails, is interrupted or runs out of time, the `StopEscalation` stops the ranks that still run. So control
returns within about two seconds, whatever the engines are doing. Only an import may take longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ipyparallel.error import EngineError

from workbench.session import protocol
from workbench.session.adapter import ControlCall, Engines, Event, Request
from workbench.session.divergence import FIRST_PROBE_S, Divergence
from workbench.session.held_interrupt import HeldInterrupt
from workbench.session.processes.core_waits import CoreWaits
from workbench.session.ranks import describe_ranks
from workbench.session.stop_escalation import StopEscalation

#: After a rank's failure, how long the others may take to fail by themselves.
FAILURE_GRACE_S = 0.2
#: How long ranks that should stop may continue their import. That of torch takes 3 s of processor time.
IMPORT_LIMIT_S = 60.0
#: How long a run that has ended waits for its interrupts that are on their way.
INTERRUPT_GRACE_S = 2.0
#: How long after the last reply output may still arrive: on another socket, and on a busy machine seconds later.
OUTPUT_GRACE_S = 10.0
_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of a cell: its output as text, the last expression's value by rank, and its time.

    ``values`` has one entry per rank that ran the cell, in rank order. An entry is None if the cell ends in a
    statement. If all ranks ran the cell, the entry of a global tensor is its logical tensor. ``rank_elapsed_s`` has, in
    the same order, the seconds after which each rank was done.
    """

    text: str
    values: list[Any]
    elapsed_s: float
    rank_elapsed_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """How every rank of a run ended."""

    ranks: tuple[int, ...]
    replies: dict[int, Any] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, protocol.Failure] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)  #: rank -> how it ended
    places: dict[int, str] = field(default_factory=dict)  #: rank -> where it was when it was stopped
    calls: dict[int, str] = field(default_factory=dict)  #: rank -> what it waited for when the ranks had diverged
    stopped: tuple[int, ...] = ()  #: ranks that had to be stopped
    stop_reason: str = ""  #: "failure", "interrupt", "restart", "timeout", "divergence", "deadlock" or ""
    replaced: tuple[int, ...] = ()  #: ranks whose engines a restart replaces
    killed: tuple[int, ...] = ()
    killed_in_import: tuple[int, ...] = ()  #: those of them whose import took too long
    elapsed_s: float = 0.0
    replied_s: dict[int, float] = field(default_factory=dict)  #: rank -> seconds after which it replied

    @property
    def ok(self) -> bool:
        return not self.failures and not self.dead and not self.stop_reason

    @property
    def left_exchanges_open(self) -> bool:
        """Whether the ranks may have different exchanges open: a wait was ended, a pipeline's step broke off, or only
        some ranks failed."""
        only_some = 0 < len(self.failures) < len(self.ranks)
        return only_some or any(failure.was_stopped or failure.broke_off_step for failure in self.failures.values())


class Listener(Protocol):
    """Receives a run's output and published objects."""

    def on_event(self, event: Event) -> None: ...

    def on_idle(self, now: float) -> None: ...

    def wakeup(self) -> float | None: ...


class Processes(Protocol):
    """The functions of the engines' processes that a run needs, by rank."""

    def kill(self, ranks: Sequence[int]) -> None:
        """End engines at once."""

    def pids(self) -> list[int]:
        """The engines' processes on this host."""

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Those of the ranks whose process has surely ended."""

    def how_ended(self, rank: int) -> str:
        """How a dead engine ended, in words."""

    def is_stopped(self, rank: int) -> bool:
        """Whether the process is stopped (SIGSTOP), so that no signal but SIGKILL reaches it."""


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
        report: Callable[[str], None] = print,
    ) -> None:
        self.label, self._report = label, report
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
        self._escalation: StopEscalation | None = None
        self._core_waits = CoreWaits([])  # of the engines, since they were to stop
        self._stopping_s = 0.0  # when the first escalation began
        self._places: dict[int, ControlCall] = {}
        self._interrupts: list[tuple[int, ControlCall]] = []  # that were sent
        self._importing: set[int] = set()  # ranks that imported something when they were last asked
        self._has_reported_import, self._waits_for_imports = False, True
        self._stop_wanted, self.ended = threading.Event(), threading.Event()
        self._stop_reason = ""
        self.outcome = Outcome(request.ranks)

    def wait(self) -> Outcome:
        """Follow the run to its end. A KeyboardInterrupt stops the engines, with the reason "interrupt".

        Other exceptions (output that cannot be shown, a test's time limit) also stop the engines before they pass.
        """
        try:
            return self._follow()
        finally:
            self.ended.set()

    def _follow(self) -> Outcome:
        error: BaseException | None = None
        while not self._finished():
            try:
                if self._request.interrupt is not None:
                    self._request.interrupt.release()
                self._step()
            except KeyboardInterrupt:
                self._waits_for_imports = not self._has_reported_import
                self.stop()
            except BaseException as raised:  # noqa: BLE001 - raised again below
                error = error or raised
                self._listener = NullListener()
                self.stop()
        self._await_interrupts()
        if error is not None:
            raise error
        self.outcome.elapsed_s = time.monotonic() - self._started_s
        return self.outcome

    def _await_interrupts(self) -> None:
        """Let no interrupt of this run reach a later one: engines are interrupted by other processes, in their time."""
        deadline_s = time.monotonic() + INTERRUPT_GRACE_S
        for rank, interrupt in self._interrupts:
            if rank not in self.outcome.dead:
                interrupt.has_arrived(max(0.0, deadline_s - time.monotonic()))

    def stop(self, reason: str = "interrupt", replaced: Iterable[int] = ()) -> None:
        """Stop the ranks that still run; a restart then replaces some. Call it from any thread."""
        self._stop_reason, self.outcome.replaced = reason, tuple(replaced)
        self._stop_wanted.set()
        self._request.put("wake", -1, None)

    def abandon(self, why: str) -> None:
        """Count ranks that have not replied as dead: the session is being closed."""
        for rank in sorted(self._pending):
            self._request.put("reply", rank, EngineError(why))

    def _finished(self) -> bool:
        if self._pending:
            return False
        loud = set(self._request.ranks) - self._output_complete
        return not loud or time.monotonic() > self._last_reply_s + OUTPUT_GRACE_S

    def _step(self) -> None:
        """Handle the messages that have arrived, or wait until one arrives or a step is due."""
        self._request.wait(self._time_to_wait())
        while not self._request.events.empty():
            with HeldInterrupt():  # a reply that is taken is handled
                self._handle(self._request.events.get_nowait())
        now = time.monotonic()
        self._listener.on_idle(now)
        self._decide(now)

    def _time_to_wait(self) -> float:
        times = [self._deadline_s, self._listener.wakeup(), self._escalation.wakeup() if self._escalation else None]
        if self._first_failure_s is not None and self._escalation is None:
            times.append(self._first_failure_s + FAILURE_GRACE_S)
        if self._num_ranks and self._escalation is None:
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
        if failed and (isinstance(event.content, EngineError) or getattr(event.content, "ename", "") == "EngineError"):
            self._output_complete.add(event.rank)
            self.outcome.dead[event.rank] = self._processes.how_ended(event.rank)

    def _decide(self, now: float) -> None:
        if not self._pending:
            return
        if self._escalation is None:
            reason = self._reason_to_stop(now)
            if reason:
                self._begin_stopping(reason, now)
        if self._escalation is not None:
            step = self._escalation.due(now, self._core_waits.longest_s())
            if step:
                self._run_step(step, now)

    def _reason_to_stop(self, now: float) -> str:
        if self._stop_wanted.is_set():
            return self._stop_reason
        if self._first_failure_s is not None and now >= self._first_failure_s + FAILURE_GRACE_S:
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

    def _begin_stopping(self, reason: str, now: float) -> None:
        self.outcome.stop_reason = reason
        self.outcome.stopped = tuple(sorted(self._pending))
        self._escalation, self._stopping_s = StopEscalation(now), now
        self._core_waits = CoreWaits(self._processes.pids())
        self._places = self._engines.control(self.outcome.stopped, "status")
        self._poll_places(timeout_s=0.1)

    def _poll_places(self, timeout_s: float = 0.0) -> None:
        """Take the answers of the ranks that were asked last. Waits at most ``timeout_s`` for each."""
        found = {rank: call.answer(timeout_s) for rank, call in self._places.items()}
        answered = {rank: status for rank, status in found.items() if status is not None}
        self._importing -= set(answered)
        self._importing |= {rank for rank, status in answered.items() if status.importing}
        for rank, status in answered.items():
            self.outcome.places.setdefault(rank, status.doing)

    def _run_step(self, step: str, now: float) -> None:
        ranks = sorted(self._pending)
        if step == "interrupt":
            self._poll_places()
            self._places = self._engines.control(ranks, "status")
            self._kill([rank for rank in ranks if self._processes.is_stopped(rank)])
            self._interrupts += self._engines.signal(ranks, "SIGINT").items()
        elif step == "abort":
            reason = f"stopped by the notebook ({self.outcome.stop_reason})"
            self._engines.control(ranks, "abort", reason=reason, pids=self._processes.pids())
        else:
            self._kill_unless_importing(ranks, now)

    def _kill_unless_importing(self, ranks: Sequence[int], now: float) -> None:
        """Kill ranks, but give an importing rank some time: it reacts when its import ends (`deferred_interrupts`)."""
        self._poll_places()
        importing = sorted(self._importing & set(ranks))
        if importing and self._waits_for_imports and now < self._stopping_s + IMPORT_LIMIT_S:
            self._report_import(importing)
            self._escalation = StopEscalation(now, self._core_waits.longest_s())
            ranks = [rank for rank in ranks if rank not in importing]
        else:
            self.outcome.killed_in_import = tuple(importing)
        self._kill(ranks)

    def _report_import(self, ranks: Sequence[int]) -> None:
        if not self._has_reported_import:
            what = f"workbench: {describe_ranks(ranks)} must end an import first (at most {IMPORT_LIMIT_S:.0f} s)"
            self._report(f"{what}. Another interrupt kills {'it' if len(ranks) == 1 else 'them'} now.")
        self._has_reported_import = True

    def _kill(self, ranks: Sequence[int]) -> None:
        self.outcome.killed = tuple(sorted({*self.outcome.killed, *ranks} - set(self._processes.dead(ranks))))
        self._processes.kill(ranks)


class NullListener:
    """A listener that ignores everything."""

    def on_event(self, event: Event) -> None:
        pass

    def on_idle(self, now: float) -> None:
        pass

    def wakeup(self) -> float | None:
        return None
