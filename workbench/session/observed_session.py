"""Engines that serve another notebook, observed from here: status, dump, log and interrupt. Nothing runs on them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable

from workbench.errors import NotStartedError, SessionError
from workbench.session import protocol
from workbench.session.adapter import Engines, Request
from workbench.session.cluster import Session
from workbench.session.engine_pool import EnginePool
from workbench.session.outcome import Outcome
from workbench.session.processes import discovery
from workbench.session.processes.folder import EngineFacts, SessionFolder
from workbench.session.processes.launch import LocalProcesses
from workbench.session.run import NullListener, Run

_POLL_S = 0.05


def observe(name: str | None = None, asked: str = "observe()", option: str = "name=") -> ObservedSession:
    """Observe the engines of another notebook or script of the same user, also while a cell runs there or is stuck.

        from workbench.session.observed_session import observe
        observe().status()

    Args:
        name: the session's name; not needed if there is one.
        asked, option: for errors, the name of the command and the option that names a session.

    Raises:
        SessionError: there is none, none of that name, or several to choose from.
    """
    return ObservedSession(*discovery.find(name, asked, option))


class ObservedSession(Session):
    """A session of another process. It reports on its engines and interrupts them, and refuses to run code."""

    def __init__(self, folder: SessionFolder, facts: EngineFacts) -> None:
        processes = LocalProcesses(folder, len(facts.engines), facts.gpus, keep=True)
        self._last_facts = facts
        self._use(EnginePool(processes, "cuda" if facts.gpus else "cpu", folder), folder, keep=True)
        self._processes = processes
        self._pool.attach(processes.observe(facts))
        self._make_current()

    def __repr__(self) -> str:
        return f"<ObservedSession: {self.title}>"

    @property
    def num_engines(self) -> int:
        """The number of engines now. Their own notebook may resize the session."""
        return len(self._facts.engines)

    @property
    def title(self) -> str:
        """One line about the engines: name, number, age and user."""
        return str(discovery.describe(self._folder, self._facts))

    @property
    def user(self) -> str:
        """The process that the engines serve: ``process 4711 (digits.ipynb)``."""
        return discovery.describe(self._folder, self._facts).user

    def status(self) -> list[protocol.RankStatus]:
        """What each rank is doing now.

        Raises:
            NotStartedError: the engines have ended.
        """
        self._live()
        return super().status()

    def interrupt(self) -> Outcome:
        """Stop the engines' cell, as an interrupt of their own notebook does. Idle ranks are not interrupted."""
        found = [each for each in self.status() if each.busy or not each.alive]
        before = {each.rank: each for each in found if each.rank in self._processes.engines}
        runs = [each.run for each in found if each.alive]
        request = Request(sorted(before), max(runs, default=sys.maxsize))  # what runs now, and nothing later
        run = Run(self._live(), request, NullListener(), self._processes)
        run.stop()
        threading.Thread(target=self._report_finished_ranks, args=(request, before), daemon=True).start()
        request.hold_interrupts()
        try:
            return run.wait()
        finally:
            request.release()

    def detach(self) -> None:
        """Stop observing; the engines go on."""
        if self._forget():
            self._pool.leave()

    close = detach

    def _report_finished_ranks(self, request: Request, before: dict[int, protocol.RankStatus]) -> None:
        """Report ranks that are done. The replies themselves go to the engines' own notebook."""
        pending = dict(before)
        while pending and not self._closed:
            found = {each.rank: each for each in self._pool.status()}
            for rank in [rank for rank, was in pending.items() if rank not in found or self._is_done(was, found[rank])]:
                del pending[rank]
                stopped = protocol.Failure("KeyboardInterrupt", "", (), time.time(), was_stopped=True)
                for kind, content in (("data", stopped), ("reply", None), ("idle", None)):
                    request.put(kind, rank, content)
            time.sleep(_POLL_S)

    def _is_done(self, was: protocol.RankStatus, now: protocol.RankStatus) -> bool:
        """Whether a rank no longer runs its cell: its process has ended, it is idle, or it runs another cell."""
        if not now.alive:
            return bool(self._processes.dead([was.rank]))
        return not now.busy or (was.alive and now.run != was.run)

    def _check(self, ranks: Iterable[int] | None) -> tuple[int, ...]:
        self._live()
        if self.user == "nobody":
            raise SessionError(
                "These engines serve no notebook any more; this one has only observed them. To run cells on them, "
                "with their variables: %workbench detach, then %workbench attach, both here."
            )
        raise SessionError(
            f"These engines serve {self.user}, and run cells for one notebook at a time. Here only %workbench status, "
            f"dump, log and interrupt work. To run cells on them, run %workbench detach in that notebook (its engines "
            f"must have been started with --keep), then attach here again. To run cells on engines of this notebook's "
            f"own, run %workbench detach, then %workbench start."
        )

    @property
    def _facts(self) -> EngineFacts:
        """The engines that their own notebook has recorded last."""
        self._last_facts = self._folder.engines() or self._last_facts
        return self._last_facts

    def _live(self) -> Engines:
        facts = self._facts
        if not facts.is_alive():
            self.detach()
            raise NotStartedError(
                "the session that this notebook observed has ended, and its engines with it. Start engines: "
                "%workbench start"
            )
        live, number = super()._live(), len(facts.engines)
        self._processes.find_engines(facts)  # some may have been replaced, added or given back
        self._processes.num_ranks = self._pool.num_engines = number
        live.drop(number)
        live.assign(range(number), range(number))
        return live
