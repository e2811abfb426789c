"""Keeps the engines of a session in one world: joins it at the start and after failures, and replaces dead engines."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ipyparallel as ipp

from workbench.errors import EngineStartError, NotStartedError
from workbench.session import engine, protocol
from workbench.session.adapter import Engines, Request
from workbench.session.output.listeners import OutputListener
from workbench.session.output.start_progress import StartProgress, print_progress
from workbench.session.output.tracebacks import Interrupted, cell_error
from workbench.session.processes.folder import SessionFolder
from workbench.session.processes.launch import LocalProcesses
from workbench.session.processes.launch_profile import ProfileProcesses
from workbench.session.processes.rendezvous_address import find_rendezvous_address, rendezvous_store
from workbench.session.ranks import describe_ranks
from workbench.session.recovery import COMMAND, explain_lost_names, refuse_lost_names
from workbench.session.run import Listener, Outcome, Run
from workbench.units import counted

_LEAVE_TIMEOUT_S = 1.0
_STATUS_TIMEOUT_S = 1.0
_MAX_NAMES = 12
_run_numbers = itertools.count(time.time_ns() // 1_000_000)
"""Numbers of runs. They rise also from one notebook to the next on the same engines, which remember runs by number."""


class EnginePool:
    """The engines of a session, their processes, and the runs in progress on them.

    Args:
        processes: starts, replaces and ends the engines.
        folder: holds the rendezvous file of ranks on this host.
    """

    def __init__(
        self, processes: LocalProcesses | ProfileProcesses, num_engines: int, device: str, folder: SessionFolder
    ) -> None:
        self.num_engines, self.device = num_engines, device
        self.ranks = range(num_engines)
        self.active: set[Run] = set()
        self._processes, self._folder = processes, folder
        self._engines: Engines | None = None
        self._facts: dict[int, dict[str, Any]] = {}
        self._world_is_stale = False
        self.lost: set[int] = set()  #: ranks whose engines were replaced, and whose variables are not recovered yet
        self.num_losses = 0

    def start(self) -> None:
        """Start all engines, join them, and show the progress."""
        progress = StartProgress(self.num_engines)
        try:
            self._engines = Engines(self._processes.start(progress.engines_up))
            progress.joining()
            self._join(progress)
        except BaseException:
            progress.fail()
            raise
        transports = sorted({facts["transport"] for facts in self._facts.values()})
        engines = counted(self.num_engines, "engine")
        progress.finish(f"{engines} ready on {self.device} ({', '.join(transports)})")

    def attach(self, client: ipp.Client) -> None:
        """Use engines that another notebook has started. They join a new world before the next request."""
        self._engines = Engines(client)
        self._world_is_stale = True

    @property
    def live(self) -> Engines:
        """The engines. Raises NotStartedError once they are closed."""
        if self._engines is None:
            raise NotStartedError("this session is closed. Start a new one: session = wb.Session(engines=2)")
        return self._engines

    def status(self) -> list[protocol.RankStatus]:
        """The present activity of each rank. It answers also while a cell runs or a rank is stuck."""
        calls = self.live.control(self.ranks, "status")
        deadline_s = time.monotonic() + _STATUS_TIMEOUT_S
        statuses = []
        for rank in self.ranks:
            answer = calls[rank].answer(max(0.0, deadline_s - time.monotonic())) if rank in calls else None
            statuses.append(answer or protocol.RankStatus(rank, alive=False, pid=self._facts.get(rank, {}).get("pid")))
        return statuses

    def ask(self, rank: int, operation: str, timeout_s: float = _STATUS_TIMEOUT_S, **arguments: Any) -> Any:
        """The answer of a rank's control thread; None if no answer comes in time."""
        calls = self.live.control([rank], operation, **arguments)
        return calls[rank].answer(timeout_s) if rank in calls else None

    def follow(
        self,
        request: Request,
        listener: Listener,
        timeout_s: float | None = None,
        wait: Callable[[Run], Outcome] = Run.wait,
        label: str = "",
        is_users: bool = False,
    ) -> Outcome:
        """Wait for the end of a request, and record whether the world is still intact.

        ``is_users``: the request runs code of the user, so ranks may wait for others that are done.
        """
        live = self.live
        num_ranks = self.num_engines if is_users else 0
        run = Run(live, request, listener, self._processes, timeout_s, label, num_ranks, print_progress)
        self.active.add(run)
        try:
            outcome = wait(run)
        finally:
            self.active.discard(run)
            live.forget()
        if outcome.stopped or outcome.dead or outcome.left_exchanges_open:
            self._world_is_stale = True
        if self.lost:
            outcome.failures = explain_lost_names(outcome.failures, self.lost)
        return outcome

    def prepare(self, targets: Sequence[int]) -> None:
        """Replace engines that have died, and join a new world if the old one has failed.

        If engines cannot be replaced, the others still run requests that need only them.
        """
        missing = sorted(set(self.ranks) - set(self.live.ids()))
        if missing and not self._processes.replaces_engines and not set(missing) & set(targets):
            return
        if missing:
            if self._processes.replaces_engines:
                print(self._describe_loss(missing), file=sys.stderr)
            self.replace(missing)
        elif self._world_is_stale:
            self._join(OutputListener(self.ranks, self.num_engines))
        self._processes.record_oom_kills()

    def send(self, targets: Sequence[int], request: Callable[[Engines], Request]) -> Request:
        """Send a request to engines that are all there. One that ends just then has no address any more."""
        while True:
            self.prepare(targets)
            try:
                return request(self.live)
            except KeyError:
                if set(targets) <= set(self.live.ids()):
                    raise

    def execute(self, targets: Sequence[int], code: str, tag: protocol.CellTag) -> Request:
        """Send a cell, unless it reads variables that a replaced rank among the targets has lost."""
        refuse_lost_names(code, targets, self.lost, lambda rank: self.ask(rank, "names"))
        return self.live.execute(targets, code, tag)

    def replace(self, ranks: Sequence[int]) -> None:
        """Start new engines with the same numbers. All ranks join a new world."""
        progress = StartProgress(len(ranks))
        self.lost |= set(ranks)
        self.num_losses += 1
        self._processes.kill(ranks)
        self.live.wait_until_gone(ranks)
        self._processes.start_engines(self.live.client, ranks, progress.engines_up)
        progress.joining()
        self._join(progress)
        progress.finish(f"{describe_ranks(ranks)} ready")

    def tag(self, targets: Iterable[int], wants_values: bool = False, label: str = "") -> protocol.CellTag:
        """The tag of the next request to these ranks."""
        num_targets = len(tuple(targets))
        return protocol.CellTag(next(_run_numbers), num_targets == self.num_engines, wants_values, label)

    def leave(self) -> None:
        """Disconnect from the engines, which go on running."""
        for run in list(self.active):
            run.abandon("the session was closed")
        if self._engines is not None:
            self._engines.close()
            self._engines = None

    def detach(self) -> None:
        """Disconnect from engines that are kept for another notebook."""
        self.leave()
        if isinstance(self._processes, LocalProcesses):
            self._processes.leave()

    def close(self) -> None:
        """End the engines and everything that was started with them."""
        if not isinstance(self._processes, LocalProcesses):
            self._try_to_leave_world()
        self.leave()
        self._processes.stop()

    def _join(self, listener: Listener) -> None:
        """Have all engines join a new world."""
        store = self._choose_store(listener)
        pids = self._processes.pids() if self._world_is_stale else []
        arguments = [(rank, self.num_engines, store, self.device, sys.path, pids) for rank in self.ranks]
        request = self.live.apply_each(self.ranks, engine.join, arguments, self.tag(self.ranks, label="join"))
        outcome = self.follow(request, listener)
        if outcome.stop_reason == "interrupt":
            raise Interrupted(outcome)
        if not outcome.ok:
            raise EngineStartError(
                f"Session(engines={self.num_engines}): the engines could not join one world. "
                f"{cell_error(outcome, what='start')}"
            )
        self._facts = {rank: outcome.replies[rank] for rank in self.ranks}
        self._world_is_stale = False

    def _choose_store(self, listener: Listener) -> str:
        """The rendezvous of a new world."""
        if isinstance(self._processes, LocalProcesses):
            return self._folder.new_store()
        towards = (self._processes.controller_address,)
        request = self.live.apply(
            self.ranks, find_rendezvous_address, towards, self.tag(self.ranks, label="rendezvous")
        )
        outcome = self.follow(request, listener)
        raise_unless_ok(outcome, "start")
        return rendezvous_store([outcome.replies[rank] for rank in self.ranks], self._folder)

    def _describe_loss(self, ranks: Sequence[int]) -> str:
        """A line about replaced engines: their ranks, the reason, and the lost variables, by a living rank's names."""
        how = self._processes.how_ended(ranks[0])
        what = f"workbench: {describe_ranks(ranks)} died ({how}) and {'is' if len(ranks) == 1 else 'are'} started again"
        left = next((rank for rank in self.live.ids() if rank not in ranks), None)
        names = self.ask(left, "names") if left is not None else None
        if not names:
            return f"{what} without variables"
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return f"{what}; lost: {', '.join(names[:_MAX_NAMES])}{more}. To bring them back: {COMMAND}"

    def _try_to_leave_world(self) -> None:
        """Let idle engines of other hosts leave their world in order. Busy and broken ones are ended at once."""
        if self._engines is None or self.active or len(self._engines.ids()) < self.num_engines:
            return
        request = self._engines.apply(self.ranks, engine.leave, (), self.tag(self.ranks, label="close"))
        listener = OutputListener(self.ranks, self.num_engines)
        Run(self._engines, request, listener, _IgnoredProcesses(), _LEAVE_TIMEOUT_S).wait()


class _IgnoredProcesses:
    """Processes of a session that is being closed. They end anyway, so it does nothing."""

    def kill(self, ranks: Sequence[int]) -> None:
        pass

    def pids(self) -> list[int]:
        return []

    def how_ended(self, rank: int) -> str:
        return ""

    def is_stopped(self, rank: int) -> bool:
        return False


def raise_unless_ok(outcome: Outcome, what: str, timeout_s: float | None = None) -> None:
    """Raise the error of a run that failed.

    Raises:
        CellError: the run failed on a rank, or ran out of time.
        KeyboardInterrupt: the caller was interrupted.
    """
    if outcome.stop_reason == "interrupt":
        raise Interrupted(outcome)
    if not outcome.ok:
        raise cell_error(outcome, what, timeout_s) from None
