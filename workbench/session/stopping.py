"""Stops the ranks of a run that still run: the questions and signals of each step, and who is killed at the end.

A kill takes a rank's variables, so it needs evidence. On a busy machine every process may be without a core for
seconds: the client's thread that sends, the controller, a nanny, the engine's control thread. So each step asks, and
time counts only while the host of every rank has answered. A rank that says that it does not run the request has yet
to get it, or has replied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.session import protocol
from workbench.session.adapter import ControlCall, Engines
from workbench.session.outcome import Outcome
from workbench.session.processes.core_waits import CoreWaits
from workbench.session.ranks import describe_ranks
from workbench.session.stop_escalation import StopEscalation

if TYPE_CHECKING:
    from workbench.session.processes.choose import Processes

#: How long ranks may finish what no interrupt ends: an import (that of torch takes 3 s of processor time), and code of
#: the user that handles the interrupt, such as one that saves.
FINISH_LIMIT_S = 60.0
_IMPORT, _HANDLER = "an import", "an except or finally clause"
#: How long messages may be on their way: questions, signals, a request, its reply.
SILENCE_LIMIT_S = 10.0
#: How long the places of ranks that have replied may be on their way.
_PLACES_LIMIT_S = 1.0


class Stop:
    """One stop of a run.

    Args:
        run: the number of the request.
        ranks: that still run.
        outcome: gets their places, and who is killed.
    """

    def __init__(
        self,
        engines: Engines,
        processes: Processes,
        run: int,
        ranks: Collection[int],
        outcome: Outcome,
        now: float,
        report: Callable[[str], None],
    ) -> None:
        self._engines, self._processes, self._run, self._outcome = engines, processes, run, outcome
        self._report = report
        self._escalation, self._started_s, self._looked_s = StopEscalation(now), now, now
        self._core_waits, self._core_s = CoreWaits(processes.pids()), 0.0
        self._unheard_s = self._waited_s = 0.0  # time that does not count: of the first kind, of both
        self._calls: dict[int, ControlCall] = {}  # the last question to each rank's control thread
        self._pings: dict[int, ControlCall] = {}  # and to its nanny
        self._known: dict[int, protocol.RankStatus] = {}  # what ranks have answered last
        self._signals: list[tuple[int, ControlCall]] = []
        self._is_patient, self._has_reported = True, False
        #: what a clause may handle so that it has its time; ranks that fail together each have an error of their own
        self._spared = [protocol.INTERRUPT] + [protocol.ERROR] * (outcome.stop_reason == "failure")
        outcome.stopped = tuple(sorted(ranks))

    def step(self, now: float, pending: Collection[int]) -> None:
        """Take the step that is due, for the ranks that have not replied."""
        self._take_answers()
        self._measure_waits(now, pending)
        step = self._escalation.due(now, self._waited_s)
        ranks = sorted(pending)
        if step == "interrupt":
            self._kill([rank for rank in ranks if self._processes.is_stopped(rank)])
            silent = [rank for rank in ranks if self._is_silent(rank)]
            self._ask(ranks, "interrupt", run=self._run, spared=self._spared if self._is_patient else [])
            self._signals += self._engines.signal(silent, "SIGINT").items()
        elif step == "abort":
            reason = f"stopped by the notebook ({self._outcome.stop_reason})"
            others = {"pids": self._processes.pids(), "all_are_there": ranks == sorted(self._outcome.ranks)}
            spared = self._spared if self._is_patient else []
            self._engines.control(ranks, "abort", run=self._run, reason=reason, spared=spared, **others)
        elif step == "ask":
            self._ask(ranks, "status")
        elif step == "kill":
            self._kill_unless_spared(ranks, now)

    def wakeup(self) -> float | None:
        """When to look again at the latest; None after the last step."""
        return self._escalation.wakeup()

    def hurry(self, now: float) -> None:
        """Another interrupt: ranks of which the user knows that they are waited for get a last round of all steps."""
        if self._is_patient and self._has_reported:
            self._begin_last_round(now)

    def finish(self) -> None:
        """Let no signal of this run reach a later one: nannies send them in their time. And take the last answers."""
        places = [each for each in self._calls.items() if each[0] not in self._outcome.places]
        for calls, limit_s in ((self._signals, SILENCE_LIMIT_S), (places, _PLACES_LIMIT_S)):
            deadline_s = time.monotonic() + limit_s
            for rank, call in calls:
                if rank not in self._outcome.dead and rank not in self._outcome.killed:
                    call.has_arrived(max(0.0, deadline_s - time.monotonic()))
        self._take_answers()

    def _measure_waits(self, now: float, pending: Collection[int]) -> None:
        """Add the time since the last look in which ranks could not react."""
        passed_s, core_s = now - self._looked_s, self._core_waits.longest_s()
        is_unheard = self._unheard_s < SILENCE_LIMIT_S and not all(map(self._is_heard, pending))
        self._unheard_s += is_unheard * passed_s
        self._waited_s += passed_s if is_unheard else min(passed_s, max(0.0, core_s - self._core_s))
        self._looked_s, self._core_s = now, core_s

    def _ask(self, ranks: Sequence[int], operation: str, **arguments: Any) -> None:
        """Ask the ranks that have answered before, and all nannies: these answer a signal of no effect."""
        asked = [rank for rank in ranks if not self._is_silent(rank)]
        self._calls |= self._engines.control(asked, operation, **arguments)
        self._pings = self._engines.signal(ranks, 0)

    def _is_silent(self, rank: int) -> bool:
        """Whether a rank has not answered the last question: C code that holds the interpreter, or a busy machine."""
        return rank in self._calls and not self._calls[rank].has_arrived(0.0)

    def _is_heard(self, rank: int) -> bool:
        """Whether the last question has come as far as the rank's host. One that is not registered gets none."""
        return not self._is_silent(rank) or rank not in self._pings or self._pings[rank].has_arrived(0.0)

    def _take_answers(self) -> None:
        for rank, call in self._calls.items():
            status = call.answer(0.0)
            if isinstance(status, protocol.RankStatus):
                self._known[rank] = status
                if status.doing:  # the first one: of before the interrupt
                    self._outcome.places.setdefault(rank, status.doing)

    def _kill_unless_spared(self, ranks: Sequence[int], now: float) -> None:
        """Kill ranks, but give those time that cannot react to an interrupt now; the steps then begin anew."""
        found = {rank: self._known[rank] for rank in ranks if rank in self._known}
        # also while it is silent: its answer waits for a core when the machine is busy, and the nanny's does not tell
        on_way = [rank for rank, status in found.items() if not status.is_handling]
        # also while it is silent: the loading of a library, and code of a handler, may hold the interpreter
        unended = {
            rank: what for rank, status in found.items() if status.is_handling and (what := self._unended(status))
        }
        stopped_s = now - self._started_s
        on_way = on_way if self._is_patient and stopped_s < SILENCE_LIMIT_S else []
        if self._is_patient and stopped_s >= FINISH_LIMIT_S and _HANDLER in unended.values():
            self._begin_last_round(now)
            return
        if not self._is_patient or stopped_s >= FINISH_LIMIT_S:
            self._outcome.unended, unended = unended, {}
        if on_way or unended:
            self._report_spared(unended, on_way)
            self._escalation = StopEscalation(now, self._waited_s)
        self._kill([rank for rank in ranks if rank not in on_way and rank not in unended])

    def _begin_last_round(self, now: float) -> None:
        self._is_patient, self._escalation = False, StopEscalation(now, self._waited_s)

    def _report_spared(self, unended: Mapping[int, str], on_way: Sequence[int]) -> None:
        if self._has_reported:
            return
        self._has_reported = True
        found = [(what, [rank for rank in unended if unended[rank] == what]) for what in (_IMPORT, _HANDLER)]
        told = [
            f"{describe_ranks(ranks)} must end {what} first (at most {FINISH_LIMIT_S:.0f} s)"
            for what, ranks in found
            if ranks
        ]
        if on_way:
            way = f"the message to or from {describe_ranks(on_way)} is on its way"
            told.append(f"{way} (at most {SILENCE_LIMIT_S:.0f} s)")
        them = "it" if len({*unended, *on_way}) == 1 else "them"
        ends = "ends" if set(unended.values()) == {_HANDLER} and not on_way else "kills"
        self._report(f"workbench: {'; '.join(told)}. Another interrupt {ends} {them} now.")

    def _kill(self, ranks: Sequence[int]) -> None:
        alive = set(ranks) - set(self._processes.dead(ranks))
        self._outcome.killed = tuple(sorted({*self._outcome.killed, *alive}))
        self._processes.kill(ranks)

    def _unended(self, status: protocol.RankStatus) -> str:
        """What a rank must end before an interrupt can end its run, in words; empty if it need not."""
        return _IMPORT if status.importing else _HANDLER if status.handles in self._spared else ""
