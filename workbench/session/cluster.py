"""The session: a set of engines that is one torch.distributed world, driven from a notebook or a script."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from workbench.core.metrics import RunEvent
from workbench.errors import NotStartedError, SessionError
from workbench.session import engine, protocol, user_modules
from workbench.session.adapter import Engines
from workbench.session.engine_pool import EnginePool
from workbench.session.notebook_imports import offer_magics
from workbench.session.outcome import CellResult, Outcome
from workbench.session.output.listeners import OnPublished, OutputListener, Show, ShowBars, ShowUnfinished
from workbench.session.output.log import OutputLogs
from workbench.session.output.tracebacks import check_cell, raise_unless_ok
from workbench.session.processes import discovery
from workbench.session.processes.choose import check_devices, choose_processes
from workbench.session.processes.folder import SessionFolder
from workbench.session.processes.gpus import check_num_engines
from workbench.session.processes.launch import LocalProcesses
from workbench.session.ranks import check_ranks
from workbench.session.recovery import Recovered, Resized, SetupCells
from workbench.session.remote_call import RemoteCall
from workbench.session.request_queue import RequestQueue
from workbench.transport.held_interrupt import HeldInterrupt
from workbench.units import counted

_open: list[Session] = []


class Session:
    """Engines that form one world, on this machine or by a profile elsewhere; a context manager.

        with wb.Session(engines=2) as session:
            session.run("wb.rank()").values        # [0, 1]

    Args:
        engines: number of engines; default: as many as the profile names, or one per GPU, or 2 on the CPU.
        profile: an ipyparallel profile whose launchers start the engines, for example on other hosts.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` for CUDA where there is a GPU.
        keep: engines outlive this notebook, with their variables, until a session that holds them is closed. Another
            notebook takes them over with `attach`.

    Raises:
        EngineStartError: an engine did not start; the message has the last lines of its log.
    """

    def __init__(
        self, engines: int | None = None, profile: str | None = None, device: str = "auto", keep: bool = False
    ) -> None:
        processes, shared_device, folder = choose_processes(engines, profile, device, keep)
        self._use(EnginePool(processes, shared_device, folder), folder, keep)
        self.places["profile"] = profile
        try:
            self._pool.start()
            check_devices(device, self._pool.devices())
        except BaseException:
            self.close()
            raise
        self._make_current()

    @classmethod
    def attach(cls, name: str | None = None) -> Session:
        """Take over the engines of an earlier notebook (``keep=True``), with their variables.

        Args:
            name: of the session; not needed if there is only one.

        Raises:
            SessionError: there are no such engines, or another notebook uses them.
        """
        folder, facts = discovery.take_over(name)
        processes = LocalProcesses(folder, len(facts.engines), facts.gpus, keep=True)
        session = cls.__new__(cls)
        session._use(EnginePool(processes, "cuda" if facts.gpus else "cpu", folder), folder, keep=True)
        try:
            session._pool.attach(processes.attach(facts))
        except BaseException:
            session.detach()  # for the next try
            raise
        session._make_current()
        return session

    def _use(self, pool: EnginePool, folder: SessionFolder, keep: bool) -> None:
        self._pool, self._folder, self.keep = pool, folder, keep
        self.logs = OutputLogs(folder.path / "output")
        self._owner_pid = os.getpid()
        self._requests, self._closed = RequestQueue(), False
        self.places: dict[str, str | None] = {}  # options that say where engines run
        self._subscribers, self._setup = list[OnPublished](), SetupCells()
        atexit.register(self._end)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{counted(self.num_engines, 'engine')} on {self.device}"
        return f"<Session: {state}>"

    @property
    def num_engines(self) -> int:
        """The number of engines, which is the number of ranks."""
        return self._pool.num_engines

    @property
    def device(self) -> str:
        """``"cpu"`` or ``"cuda"``: where the engines' tensors are."""
        return self._pool.device

    @staticmethod
    def current() -> Session:
        """The session that ``%workbench start`` or ``wb.Session`` opened last.

        Raises:
            NotStartedError: none is open.

        >>> wb.Session.current().num_engines                    # doctest: +SKIP
        2
        """
        found = find_current()
        if found is None:
            raise NotStartedError(
                "No engines are running, so there is nothing to run this on. Start them: %workbench start --engines 2 "
                "in a notebook, wb.Session(engines=2) in a script."
            )
        return found

    def run(
        self, code: str, ranks: Iterable[int] | None = None, timeout: float | None = None, setup: bool = False
    ) -> CellResult:
        """Run code on all engines, or on some, as one program. The call itself prints nothing.

        Args:
            code: Python, as in a cell.
            ranks: the ranks that run it; default: all. Code on some of the ranks must not call collectives of all.
            timeout: seconds after which ranks that still run are stopped.
            setup: `recover` runs this code again. Equal code is remembered once.

        Raises:
            CellError: the code does not parse, failed on a rank, timed out, or reads what a replaced rank has lost;
                equal failures are shown once.
            KeyboardInterrupt: the caller was interrupted; so were the engines.
        """
        return self.run_cell(code, ranks, timeout, setup=setup)

    def run_cell(
        self,
        code: str,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
        *,
        show: Show | None = None,
        merge: bool = True,
        values: bool = True,
        label: str = "",
        show_unfinished: ShowUnfinished | None = None,
        show_bars: ShowBars | None = None,
        setup: bool = False,
        cell: str = "",
    ) -> CellResult:
        """`run` with options of a front end.

        Args:
            show: called with each piece of output while the code runs.
            merge: show equal output of several ranks once.
            values: return the value of the last expression.
            label: a name for this cell, shown while other requests wait for it.
            show_unfinished: called with all unfinished lines as one text, each time they change.
            show_bars: the same with progress bars. Without it, bars are text, shown once at the end.
            cell: its name among the set-up cells; default: its code. An earlier one of this name is no longer set-up.
        """
        targets = self._check(ranks)
        check_cell(code, timeout)
        tag = self._pool.tag(targets, wants_values=values, label=label)
        log = self.logs.begin(tag.run)
        hear = self._notify_subscribers
        listener = OutputListener(targets, self.num_engines, show, merge, log, hear, show_unfinished, show_bars)
        started_s = time.monotonic()
        reason = "the notebook broke the cell off"
        try:
            with self._requests.exclusive(on_wait=self.report_wait):
                try:
                    request = self._pool.send(targets, lambda _live: self._pool.execute(targets, code, tag))
                    outcome = self._pool.follow(request, listener, timeout, label=label or "a cell", is_users=True)
                    reason = outcome.reason
                finally:  # within its turn: outside of it, this would end another cell's live view
                    self._notify_subscribers(-1, RunEvent("ended", 0, reason))
            listener.finish()
        finally:
            log.close()
        raise_unless_ok(outcome, "cell", timeout)
        self._setup.record(cell, code, targets if len(targets) < self.num_engines else None, setup)
        ordered = [outcome.values.get(rank) for rank in targets]
        times = [outcome.replied_s[rank] for rank in targets]
        return CellResult(listener.text, ordered, time.monotonic() - started_s, times)

    def submit(
        self, fn: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None, label: str = "", **kwargs: Any
    ) -> RemoteCall:
        """Start ``fn(*args, **kwargs)`` on the engines and return at once; other requests that wait name its ``label``.

        The function may be defined in the notebook. Engines run a module's code as the notebook has loaded it.
        """
        targets = self._check(ranks)
        payload = user_modules.pack((fn, args, kwargs))
        listener = OutputListener(targets, self.num_engines)
        tag = self._pool.tag(targets, label=label or getattr(fn, "__name__", "call"))

        def perform(call: RemoteCall) -> Outcome:
            with self._requests.exclusive(ticket, check=call.check_wanted):
                request = self._pool.send(targets, lambda live: live.apply(targets, engine.call, (payload,), tag))
                return self._pool.follow(request, listener, wait=call.follow, label=tag.label, is_users=True)

        def control(operation: str, **arguments: str) -> None:
            self._live().control(targets, operation, run=tag.run, **arguments)

        with HeldInterrupt():  # else a ticket could stay that nobody gives back
            ticket = self._requests.enqueue()
            return RemoteCall(tag.label, listener, perform, control)

    def push(self, ranks: Iterable[int] | None = None, /, **variables: Any) -> None:
        """Set variables on the engines: ``session.push(x=1, model=model)``."""
        self._call(self._check(ranks), engine.push, (user_modules.pack_variables(variables),), "push")

    def pull(self, name: str, ranks: Iterable[int] | None = None) -> Any:
        """A variable of the engines: a list by rank, or one logical tensor for a global tensor.

        Raises:
            CellError: a rank has no such variable, or it cannot be pickled.
        """
        pulled = [protocol.load(reply) for reply in self._call(self._check(ranks), engine.pull, (name,), "pull")]
        if all(isinstance(item, protocol.LogicalTensor) for item in pulled):
            return pulled[0].tensor
        return pulled

    def subscribe(self, hear: OnPublished) -> Callable[[], None]:
        """Call ``hear(rank, object)`` with each object that cells publish, and with rank -1 and a ``RunEvent`` when a
        cell or the session has ended. Returns a function that ends the subscription.
        """
        self._subscribers.append(hear)
        return lambda: self._subscribers.remove(hear)

    def _notify_subscribers(self, rank: int, published: object) -> None:
        for hear in list(self._subscribers):
            hear(rank, published)

    def status(self) -> list[protocol.RankStatus]:
        """The present activity of each rank. It answers also while a cell runs or a rank is stuck."""
        return self._pool.status()

    @property
    def is_busy(self) -> bool:
        """Whether the engines run a cell or a call."""
        return bool(self._pool.active)

    def ask(self, rank: int, operation: str, timeout_s: float = 1.0, **arguments: Any) -> Any:
        """The answer of a rank's control thread, also while a cell runs; None if no answer comes in time."""
        return self._pool.ask(rank, operation, timeout_s, **arguments)

    def interrupt(self) -> Outcome:
        """Stop the engines' present work, a call of `submit` or a cell of another thread, and wait until it has ended.
        Returns how each rank ended; empty if nothing ran.
        """
        for run in (active := list(self._pool.active)):
            run.stop()
        for run in active:
            run.ended.wait()
        return active[0].outcome if active else Outcome(())

    def restart(self, ranks: Iterable[int] | None = None) -> None:
        """Replace engines by new ones; default: all. What they run now ends, and their variables are lost. Requests
        that wait run first. Other ranks keep their variables. All ranks join a new world.
        """
        targets = self._check(ranks)
        for run in (active := list(self._pool.active)):
            run.stop("restart", replaced=targets)
        with self._requests.exclusive(on_wait=self.report_wait if len(self._requests) > len(active) else lambda: None):
            self._pool.replace(targets)

    def recover(self) -> Recovered:
        """Bring back what replaced ranks have lost, and return a table of it for ``print``.

        Set-up cells run again on all ranks. Modules, optimizers and values then come from the other ranks, or from the
        newest checkpoint of this session.

        Raises:
            SessionError: a set-up cell failed, or there is none. Nothing is lost by that: mend it and recover again.
        """
        call = partial(self._call, self._check(None), what="recover")
        with self._requests.exclusive(on_wait=self.report_wait):
            self._pool.prepare(self._pool.ranks)
        return self._setup.recover(self._pool.losses, self._folder.checkpoints(), call, self.run_cell)

    def resize(self, engines: int) -> Resized:
        """Add engines, or give back the last ones, and return a report for ``print``: ``session.resize(6)``.

        Ranks that stay keep their variables, and first take over what modules, optimizers and global tensors have on
        the others. New ranks get variables as after a loss: by `recover`, here if a cell is marked as set-up.

        Raises:
            SessionError: the number is none, a set-up cell failed, or only engines that would go have the variables.
            EngineStartError: not all new engines came, and the session is as it was.
        """
        before = len(self._check(None))
        check_num_engines(engines, f"resize({engines!r})")
        recovered = self.recover() if self._setup and self._pool.sole_holders(engines) else None
        try:
            with self._requests.exclusive(on_wait=self.report_wait):
                rows = self._pool.resize(engines) if engines != before else []
        finally:
            if self.num_engines != before:
                self._notify_subscribers(-1, RunEvent("resized", 0))
        recovered, losses = self.recover() if self._setup and self._pool.losses else recovered, self._pool.losses
        return Resized(before, engines, rows, recovered, losses.lacking(engines), losses.has_parts)

    def close(self) -> None:
        """End the engines and everything else that the session started; safe to call twice."""
        if self._forget():
            self._pool.close()
            self._folder.remove()
            self._notify_subscribers(-1, RunEvent("closed", 0))

    def detach(self) -> None:
        """Leave the engines to another notebook, which takes them over with `attach`; safe to call twice.

        Raises:
            SessionError: the engines end with this notebook, because they were started without ``keep=True``; or the
                disk is full, and the session is as it was.
        """
        if not self.keep:
            raise SessionError(
                "Session.detach(): these engines watch this notebook and end with it. Only engines started with "
                "keep=True (%workbench start --keep) can go on without it."
            )
        if self._forget(self._folder.release):
            self._pool.detach()
            self._notify_subscribers(-1, RunEvent("closed", 0))

    def _end(self) -> None:
        """End the session when the notebook or the context ends."""
        (self.detach if self.keep else self.close)()

    def _make_current(self) -> None:
        _open.append(self)
        user_modules.loaded()
        offer_magics()

    def _forget(self, release: Callable[[], None] = lambda: None) -> bool:
        """Mark this session as ended; False if it has ended before, or belongs to another process (a fork)."""
        if self._closed or os.getpid() != self._owner_pid:
            return False
        release()
        self._closed = True
        _open[:] = [each for each in _open if each is not self]
        atexit.unregister(self._end)
        return True

    def report_wait(self) -> None:
        """Say what a request waits for."""
        busy = ", ".join(sorted(run.label for run in list(self._pool.active) if run.label)) or "another request"
        print(f"workbench: the engines run {busy}; this waits its turn", file=sys.stderr)

    def _call(self, targets: Sequence[int], fn: Callable[..., Any], arguments: tuple, what: str) -> list[Any]:
        listener = OutputListener(targets, self.num_engines)
        tag = self._pool.tag(targets, label=what)
        with self._requests.exclusive(on_wait=self.report_wait):
            request = self._pool.send(targets, lambda live: live.apply(targets, fn, arguments, tag))
            outcome = self._pool.follow(request, listener, label=what, is_users=True)
        raise_unless_ok(outcome, what)
        return [outcome.replies[rank] for rank in targets]

    def _check(self, ranks: Iterable[int] | None) -> tuple[int, ...]:
        self._live()
        return check_ranks(ranks, self.num_engines)

    def _live(self) -> Engines:
        return self._pool.live


current = Session.current


def find_current() -> Session | None:
    """The session opened last that is still open, or None."""
    return _open[-1] if _open else None
