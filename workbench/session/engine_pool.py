"""Keeps the engines of a session in one world: joins it at the start and after failures, and replaces dead engines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import ipyparallel as ipp

from workbench.errors import EngineStartError, NotStartedError
from workbench.session import engine, protocol
from workbench.session.adapter import Engines, Request
from workbench.session.lost_names import explain_lost_names, refuse_lost_names
from workbench.session.notebook_imports import load_in_notebook
from workbench.session.outcome import Outcome
from workbench.session.output.listeners import OutputListener
from workbench.session.output.start_progress import StartProgress
from workbench.session.output.tracebacks import Interrupted, cell_error, explained_interrupt, raise_unless_ok
from workbench.session.processes.folder import SessionFolder
from workbench.session.processes.launch import LocalProcesses
from workbench.session.processes.launch_profile import ProfileProcesses
from workbench.session.processes.rendezvous_address import (
    RendezvousAddress,
    find_rendezvous_address,
    ranks_on_hosts,
    rendezvous_store,
)
from workbench.session.ranks import describe_ranks
from workbench.session.recovery import Losses, describe_loss, describe_repeated_loss, refuse_to_give_back
from workbench.session.run import Listener, Run
from workbench.session.unlike_counts import ExchangeCounts
from workbench.units import counted

_LEAVE_TIMEOUT_S = 1.0
_JOIN_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 3.0
_STATUS_TIMEOUT_S = 1.0
_MOST_STARTS = 5  # of engines that end while they join
_STARTING = "Interrupted while engines were starting."


class EnginePool:
    """The engines of a session, their processes, and the runs in progress on them.

    Args:
        processes: starts, replaces and ends the engines.
        device: of all ranks; None: the GPUs of a host that has one for each of its ranks, else its CPUs.
        folder: holds the rendezvous file of ranks on this host.
    """

    def __init__(self, processes: LocalProcesses | ProfileProcesses, device: str | None, folder: SessionFolder) -> None:
        self.num_engines, self._device = processes.num_ranks, device
        self.active: set[Run] = set()
        self._processes, self._folder = processes, folder
        self._engines: Engines | None = None
        self._facts: dict[int, dict[str, Any]] = {}
        self._world_is_stale, self._has_attached, self.losses = False, False, Losses()
        self._counts = ExchangeCounts()

    def devices(self) -> dict[str, list[int]]:
        """The ranks by the type of their device."""
        found: dict[str, list[int]] = {}
        for rank, facts in self._facts.items():
            found.setdefault(facts["device"].partition(":")[0], []).append(rank)
        return found

    @explained_interrupt(f"{_STARTING} Start them again: %workbench start")
    def start(self) -> None:
        """Start all engines, join them, and show the progress."""
        progress = StartProgress(self.num_engines)

        def engines_up(num_up: int, jobs: str = "") -> None:
            progress.engines_up(num_up, jobs)
            load_in_notebook()

        try:
            self._engines = Engines(*self._processes.start(engines_up))
            progress.joining()
            if isinstance(self._processes, ProfileProcesses):
                self._engines.reorder(self._processes.order(self._addresses(progress)))
            self._join(progress)
        except BaseException:
            progress.fail()
            raise
        transports = sorted({facts["transport"] for facts in self._facts.values()})
        progress.finish(f"{counted(self.num_engines, 'engine')} ready on {self.device} ({', '.join(transports)})")

    def attach(self, client: ipp.Client) -> None:
        """Use engines that another notebook has started. They join a new world before the next request."""
        self._engines = Engines(client, range(self.num_engines))
        self._world_is_stale = self._has_attached = True
        load_in_notebook()

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.num_engines)

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return self._device or next(iter(self.devices()), "cpu")

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
            how = self._processes.how_ended(rank) if not answer and self._processes.dead([rank]) else ""
            pid = self._facts.get(rank, {}).get("pid")
            statuses.append(answer or protocol.RankStatus(rank, alive=False, pid=pid, ended=how))
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

        Raises:
            KeyboardInterrupt: an interrupt has come after the last reply.
        """
        live = self.live
        num_ranks = self.num_engines if is_users else 0
        run = Run(live, request, listener, self._processes, timeout_s, label, num_ranks)
        self.active.add(run)
        if self._engines is not live:  # `leave` has come before it could find this run
            run.abandon()
        try:
            outcome = wait(run)
        finally:
            self.active.discard(run)
            live.forget()
            came_late = request.release() or run.was_interrupted_late
        self._counts.check(outcome, self.ranks, self.ask)
        for saved in outcome.checkpoints:
            self._folder.add_checkpoint(saved)
        if outcome.stopped or outcome.dead or outcome.left_exchanges_open:
            self._world_is_stale = True
        if lacking := self.losses.lacking(self.num_engines):
            names = partial(self.ask, min(set(self.ranks) - set(lacking)), "names")
            outcome.failures = explain_lost_names(outcome.failures, lacking, names)
        if outcome.killed:  # also if they have replied: the next request must not go to them
            live.wait_until_gone(outcome.killed, _END_TIMEOUT_S)
        if came_late and outcome.ok:
            raise KeyboardInterrupt
        return outcome

    def prepare(self, targets: Sequence[int]) -> None:
        """Replace engines that have died, and join a new world if the old one has failed.

        Where engines take long to start, a request that needs only others does not wait for them.
        """
        if self._has_attached and set(self.ranks) <= set(self.live.registered()):
            # wait for the end of what the earlier notebook has started, however long that takes; an interrupt ends it
            request = self.live.apply(self.ranks, os.getpid, (), self.tag(self.ranks, label="attach"))
            outcome = self.follow(request, OutputListener(self.ranks, self.num_engines), label="an earlier cell")
            if outcome.stop_reason == "interrupt":
                raise Interrupted.during(outcome)
            self._has_attached = False
        missing = sorted(set(self.ranks) - set(self.live.registered()))
        if not missing and self._processes.replaces_at_once:  # on this host a death shows before the controller sees it
            missing = self._processes.dead(self.ranks)
        if missing and not self._processes.replaces_at_once and not set(missing) & set(targets):
            return
        if self._world_is_stale and not missing:
            missing = sorted(self._join_or_find_lost(OutputListener(self.ranks, self.num_engines)))
        if missing:
            self._describe_loss(missing)
            self.replace(missing)
        self._processes.record_oom_kills()

    def send(self, targets: Sequence[int], request: Callable[[Engines], Request]) -> Request:
        """Send a request to engines that are all there. One that ends just then has no address any more."""
        while True:
            self.prepare(targets)
            try:
                return request(self.live)
            except KeyError:
                if set(targets) <= set(self.live.registered()):
                    raise

    def execute(self, targets: Sequence[int], code: str, tag: protocol.CellTag) -> Request:
        """Send a cell, unless it reads variables that a replaced rank among the targets has lost."""
        lacking = self.losses.lacking(self.num_engines)
        refuse_lost_names(code, targets, lacking, lambda rank: self.ask(rank, "names"))
        return self.live.execute(targets, code, tag)

    @explained_interrupt(f"{_STARTING} The next cell starts those again that are missing.")
    def replace(self, ranks: Sequence[int]) -> None:
        """Start new engines with the same numbers, also for others that end meanwhile. All ranks join a new world."""
        progress, lost, replaced = StartProgress(len(ranks)), set(ranks), set(ranks)
        self._world_is_stale = True  # also if an interrupt comes before the new engines join
        for number in range(_MOST_STARTS):
            if number:
                self._describe_loss(sorted(lost))
            self.losses.add(lost, self.num_engines, partial(self.ask, operation="names"))
            self._processes.kill(sorted(lost))
            self.live.wait_until_gone(sorted(lost))
            ids = self._processes.start_engines(self.live.client, sorted(lost), progress.engines_up)
            self.live.assign(sorted(lost), ids)
            progress.joining()
            if not (lost := self._join_or_find_lost(progress)):
                break
            replaced |= lost
        else:
            raise EngineStartError(describe_repeated_loss(sorted(lost), _MOST_STARTS, self._processes.how_ended))
        progress.finish(f"{describe_ranks(replaced)} ready")

    def _join_or_find_lost(self, listener: Listener) -> set[int]:
        """Join a new world; if that fails, the ranks that have ended: ``mpiexec`` ends all when one is lost."""
        if not (lost := set(self.ranks) - set(self.live.registered())):
            try:
                self._join(listener)
            except EngineStartError:
                if not (lost := set(self.ranks) - set(self.live.registered())):
                    raise
        return lost

    def resize(self, num_engines: int) -> list[tuple[str, str]]:
        """Add engines, or give back the last ones. All that stay join a new world and keep their variables.

        Returns:
            What was moved from engines that are given back: (variable, how it lies now).

        Raises:
            SessionError: some of those have variables that other ranks lack.
        """
        if num_engines > self.num_engines:
            self.prepare(self.ranks)
            self._add(range(self.num_engines, num_engines))
            return []
        leaving = range(num_engines, self.num_engines)
        has_lost = bool(set(leaving) - set(self.live.registered()))
        if not has_lost:
            self.prepare(self.ranks)
        refuse_to_give_back(num_engines, self.sole_holders(num_engines))
        rows = [] if has_lost else self._withdraw(num_engines)
        self._processes.kill(leaving)
        self.live.wait_until_gone(leaving)
        self._processes.forget(leaving)
        self.live.drop(num_engines)
        self.num_engines = num_engines
        self.losses.ranks -= set(leaving)
        self.losses.number += has_lost
        self.losses.has_parts |= has_lost
        self._world_is_stale = True
        self.prepare(self.ranks)
        return rows

    def sole_holders(self, num_engines: int) -> dict[int, list[str]]:
        """After a loss: the ranks that `resize` would give back with variables that others lack, and the names; a rank
        that does not answer is there without names.
        """
        there = set(self.live.registered())
        if not self.losses.ranks and set(range(num_engines)) <= there:
            return {}
        names = {rank: self.ask(rank, "names") for rank in there}
        others = [set(names.get(rank) or ()) for rank in {*range(num_engines), *self.losses.ranks}]
        held, leaving = set.intersection(*others), sorted(there & set(range(num_engines, self.num_engines)))
        return {
            rank: sorted(set(names[rank] or ()) - held)
            for rank in leaving
            if names[rank] is None or not held.issuperset(names[rank])
        }

    def _withdraw(self, num_ranks: int) -> list[tuple[str, str]]:
        """Let the ranks that stay take all that lies on others."""
        from workbench.session.on_engine.resizing import withdraw  # loads torch

        request = self.live.apply(self.ranks, withdraw, (num_ranks,), self.tag(self.ranks, label="resize"))
        outcome = self.follow(request, OutputListener(self.ranks, self.num_engines), label="resize")
        raise_unless_ok(outcome, "resize")
        return list(outcome.replies[0])

    def _add(self, ranks: range) -> None:
        """Start engines with new numbers. They have no variables."""
        progress = StartProgress(len(ranks))
        try:
            with explained_interrupt(f"{_STARTING} The session is as it was. Add them again: %workbench resize"):
                ids = self._processes.start_engines(self.live.client, ranks, progress.engines_up)
        except BaseException:
            self._processes.kill(ranks)
            self._processes.forget(ranks)
            raise
        self.live.assign(ranks, ids)
        self.losses.add(ranks, self.num_engines, partial(self.ask, operation="names"))
        self.num_engines = ranks.stop
        self._world_is_stale = True
        progress.joining()
        self.prepare(self.ranks)
        progress.finish(f"{describe_ranks(ranks)} ready")

    def tag(self, targets: Iterable[int], wants_values: bool = False, label: str = "") -> protocol.CellTag:
        """The tag of the next request to these ranks."""
        return protocol.CellTag(protocol.next_run(), len(tuple(targets)) == self.num_engines, wants_values, label)

    def leave(self) -> None:
        """Disconnect from the engines, which go on running."""
        engines, self._engines = self._engines, None
        for run in list(self.active):
            run.abandon()
        if engines is not None:
            engines.close()

    def detach(self) -> None:
        """Disconnect from engines that are kept for another notebook."""
        self.leave()
        if isinstance(self._processes, LocalProcesses):
            self._processes.leave()

    def close(self) -> None:
        """End the engines and everything that was started with them."""
        if not isinstance(self._processes, LocalProcesses):
            self._try_to_leave_world()
            if self._processes.is_over_ssh and self._engines is not None:
                self._processes.kill(self.ranks)  # through their nannies, without further connections
                self._engines.wait_until_gone(self.ranks, _END_TIMEOUT_S)
        self.leave()
        self._processes.stop()

    def _join(self, listener: Listener) -> None:
        """Have all engines join a new world."""
        store, on_hosts = self._choose_store(listener)
        pids = self._processes.pids() if self._world_is_stale else []
        arguments = [
            (rank, self.num_engines, store, self._device, sys.path, pids, on_hosts[rank]) for rank in self.ranks
        ]
        request = self.live.apply_each(self.ranks, engine.join, arguments, self.tag(self.ranks, label="join"))
        outcome = self.follow(request, listener, _JOIN_TIMEOUT_S)
        if outcome.stop_reason == "interrupt":
            raise Interrupted.during(outcome)
        if not outcome.ok:
            raise EngineStartError(
                f"Session(engines={self.num_engines}): the engines could not join one world. "
                f"{cell_error(outcome, what='start')}"
            )
        self._facts = {rank: outcome.replies[rank] for rank in self.ranks}
        self._world_is_stale = False

    def _choose_store(self, listener: Listener) -> tuple[str, dict[int, tuple[int, int]]]:
        """The rendezvous of a new world, and the ranks' numbers on their hosts."""
        if isinstance(self._processes, LocalProcesses):
            return self._folder.new_store(), ranks_on_hosts(["here"] * self.num_engines)
        addresses = self._addresses(listener)
        self._processes.learn(self.live, addresses)
        return rendezvous_store(addresses, self._folder), ranks_on_hosts([each.host for each in addresses])

    def _addresses(self, listener: Listener) -> list[RendezvousAddress]:
        """Where the ranks of a profile are."""
        assert isinstance(self._processes, ProfileProcesses)
        tag, towards = self.tag(self.ranks, label="rendezvous"), (self._processes.controller_address,)
        request = self.live.apply(self.ranks, find_rendezvous_address, towards, tag)
        outcome = self.follow(request, listener)
        raise_unless_ok(outcome, "start")
        return [outcome.replies[rank] for rank in self.ranks]

    def _describe_loss(self, ranks: Sequence[int]) -> None:
        """Print a line about engines that will be replaced; a rank that has lost nothing knows the variables' names."""
        how = "; ".join(dict.fromkeys(map(self._processes.how_ended, ranks)))
        left = sorted(set(self.live.registered()) - set(ranks), key=lambda rank: rank in self.losses.ranks)
        names = self.ask(left[0], "names") if left else None
        are_all_lost = not left or (left[0] in self.losses.ranks and not names)  # unless cells have run there since
        print(describe_loss(ranks, how, names, are_all_lost), file=sys.stderr)

    def _try_to_leave_world(self) -> None:
        """Let idle engines of other hosts leave their world in order. Busy and broken ones are ended at once."""
        if self._engines is None or self.active or len(self._engines.registered()) < self.num_engines:
            return
        request = self._engines.apply(self.ranks, engine.leave, (), self.tag(self.ranks, label="close"))
        pending, end_s = set(self.ranks), time.monotonic() + _LEAVE_TIMEOUT_S
        while pending and (rest_s := end_s - time.monotonic()) > 0:
            event = request.take(rest_s)
            pending -= {event.rank} if event is not None and event.kind == "reply" else set()
        request.release()
