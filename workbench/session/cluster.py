"""The session: a set of engines that is one torch.distributed world, driven from a notebook or a script."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from workbench.errors import EngineStartError, NotStartedError, SessionError
from workbench.session import engine, protocol
from workbench.session.adapter import Engines, Request
from workbench.session.calls import RemoteCall
from workbench.session.code import check_syntax
from workbench.session.folder import SessionFolder, reap_leftovers
from workbench.session.launch import LocalProcesses, find_gpus
from workbench.session.launch_profile import ProfileProcesses
from workbench.session.listeners import OutputListener, Show
from workbench.session.meeting_point import find_meeting_point, store_for
from workbench.session.output_log import OutputLogs
from workbench.session.progress import StartProgress
from workbench.session.ranks import check_ranks, say_ranks
from workbench.session.run import CellResult, Listener, Outcome, Run
from workbench.session.tracebacks import Interrupted, cell_error
from workbench.session.turns import Turns

_STATUS_TIMEOUT_S = 1.0
_LEAVE_TIMEOUT_S = 1.0
_open: list[Session] = []
_run_numbers = itertools.count(1)


class Session:
    """Engines on this machine that form one world; a context manager.

        with wb.Session(engines=2) as session:
            session.run("wb.rank()").values        # [0, 1]

    Args:
        engines: how many; by default one per GPU, or 2 on the CPU.
        profile: an ipyparallel profile whose launchers start the engines, on other hosts for example.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"`` for CUDA where there is a GPU.

    Raises:
        EngineStartError: an engine did not come up; the message has the last lines of its log.
    """

    def __init__(self, engines: int | None = None, profile: str | None = None, device: str = "auto") -> None:
        gpus = _choose_gpus(device)
        self.num_engines = _choose_num_engines(engines, gpus)
        self.device = "cuda" if gpus else "cpu"
        self.profile = profile
        self._owner_pid = os.getpid()
        self._turns = Turns()
        self._active: set[Run] = set()
        self._world_is_stale = False
        self._facts: dict[int, dict[str, Any]] = {}
        self._closed = False
        reap_leftovers()
        self._folder = SessionFolder.create()
        self.logs = OutputLogs(self._folder.path / "output")
        self._processes: LocalProcesses | ProfileProcesses = (
            LocalProcesses(self._folder, self.num_engines, gpus)
            if profile is None
            else ProfileProcesses(profile, self.num_engines, self._folder)
        )
        self._engines: Engines | None = None
        self._start()
        _open.append(self)
        atexit.register(self.close)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.num_engines} engines on {self.device}"
        return f"<Session: {state}>"

    def run(self, code: str, ranks: Iterable[int] | None = None, timeout: float | None = None) -> CellResult:
        """Run code on all engines, or on some, as one program; prints nothing itself.

        Args:
            ranks: where to run; all ranks by default. Code on some ranks must not use collectives of all.
            timeout: seconds after which ranks that still run are stopped.

        Raises:
            CellError: the code does not parse, failed on a rank, or ran out of time; equal failures are told once.
            KeyboardInterrupt: the caller was interrupted; the engines were, too.
        """
        return self.run_cell(code, ranks, timeout)

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
    ) -> CellResult:
        """`run` with what a front end needs besides.

        Args:
            show: called with each piece of output while the code runs.
            merge: give alike output of several ranks once.
            values: bring back the last expression's value.
            label: a name for this cell, shown while others wait for it.
        """
        targets = self._check(ranks)
        check_syntax(code)
        tag = self._tag(targets, wants_values=values, label=label)
        listener = OutputListener(targets, self.num_engines, show, merge, self.logs.begin(tag.run, label))
        started_s = time.monotonic()
        name = label or "a cell"
        outcome = self._perform(lambda live: live.execute(targets, code, tag), targets, listener, timeout, name)
        listener.finish()
        _raise_unless_ok(outcome, "cell", timeout)
        ordered = [outcome.values.get(rank) for rank in targets]
        times = [outcome.replied_s[rank] for rank in targets]
        return CellResult(listener.text, ordered, time.monotonic() - started_s, times)

    def submit(
        self, fn: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None, **kwargs: Any
    ) -> RemoteCall:
        """Start ``fn(*args, **kwargs)`` on the engines and return at once.

        The function travels by cloudpickle, so it may be defined in the notebook. Requests that come
        later wait for it.
        """
        targets = self._check(ranks)
        payload = protocol.dump((fn, args, kwargs))
        listener = OutputListener(targets, self.num_engines)
        tag = self._tag(targets, label=getattr(fn, "__name__", "call"))
        place = self._turns.take_place()

        def perform(call: RemoteCall) -> Outcome:
            with self._turns.turn(place):
                self._prepare(targets)
                request = self._live().apply(targets, engine.call, (payload,), tag)
                return self._follow(request, listener, wait=call.follow, label=tag.label)

        def request_stop() -> None:
            self._live().control(targets, "stop", run=tag.run)

        return RemoteCall(tag.label, listener, perform, request_stop)

    def push(self, ranks: Iterable[int] | None = None, /, **variables: Any) -> None:
        """Set variables on the engines: ``session.push(x=1, model=model)``."""
        targets = self._check(ranks)
        self._call(targets, engine.push, (protocol.dump(variables),), "push")

    def pull(self, name: str, ranks: Iterable[int] | None = None) -> Any:
        """A variable of the engines: a list by rank, or one logical tensor for a global tensor.

        Raises:
            CellError: a rank has no such variable, or it cannot be pickled.
        """
        targets = self._check(ranks)
        replies = self._call(targets, engine.pull, (name,), "pull")
        pulled = [protocol.load(reply) for reply in replies]
        if pulled and all(isinstance(item, protocol.Logical) for item in pulled):
            return pulled[0].tensor
        return pulled

    def status(self) -> list[protocol.RankStatus]:
        """What each rank is doing now; answers also while a cell runs or a rank is stuck."""
        calls = self._live().control(range(self.num_engines), "status")
        deadline_s = time.monotonic() + _STATUS_TIMEOUT_S
        statuses = []
        for rank in range(self.num_engines):
            answer = calls[rank].answer(max(0.0, deadline_s - time.monotonic())) if rank in calls else None
            statuses.append(answer or protocol.RankStatus(rank, alive=False, pid=self._facts.get(rank, {}).get("pid")))
        return statuses

    def ask(self, rank: int, operation: str, timeout_s: float = _STATUS_TIMEOUT_S, **arguments: Any) -> Any:
        """What a rank's control thread answers, also while a cell runs; None when no answer comes in time."""
        calls = self._live().control([rank], operation, **arguments)
        return calls[rank].answer(timeout_s) if rank in calls else None

    def restart(self, ranks: Iterable[int] | None = None) -> None:
        """Replace engines by new ones, all of them by default; what runs on them ends, their variables are lost.

        Other ranks keep their variables, and all ranks join a new world.
        """
        targets = self._check(ranks)
        for run in list(self._active):
            run.stop()
        with self._turns.turn(self._turns.take_place()):
            self._replace(targets)

    def close(self) -> None:
        """End the engines and everything the session started; safe to call twice."""
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        if self in _open:
            _open.remove(self)
        atexit.unregister(self.close)
        self._leave_quietly()
        for run in list(self._active):
            run.abandon("the session was closed")
        if self._engines is not None:
            self._engines.close()
        self._processes.stop()
        self._folder.remove()

    # What follows is used by the methods above.

    def _start(self) -> None:
        progress = StartProgress(self.num_engines)
        try:
            self._engines = Engines(self._processes.start(progress.engines_up))
            progress.joining()
            self._join(progress)
        except BaseException:
            progress.fail()
            self.close()
            raise
        transports = sorted({facts["transport"] for facts in self._facts.values()})
        progress.finish(f"{self.num_engines} engines ready on {self.device} ({', '.join(transports)})")

    def _join(self, listener: Listener) -> None:
        """Have all engines join a new world."""
        ranks = range(self.num_engines)
        store = self._choose_store(listener)
        arguments = [(rank, self.num_engines, store, self.device, sys.path) for rank in ranks]
        request = self._live().apply_each(ranks, engine.join, arguments, self._tag(ranks, label="join"))
        outcome = self._follow(request, listener)
        if not outcome.ok:
            raise EngineStartError(
                f"Session(engines={self.num_engines}): the engines could not join one world. "
                f"{cell_error(outcome, what='start')}"
            )
        self._facts = {rank: outcome.replies[rank] for rank in ranks}
        self._world_is_stale = False

    def _choose_store(self, listener: Listener) -> str:
        """Where the ranks of a new world meet."""
        if isinstance(self._processes, LocalProcesses):
            return self._folder.new_store()
        ranks = range(self.num_engines)
        towards = (self._processes.controller_address,)
        request = self._live().apply(ranks, find_meeting_point, towards, self._tag(ranks, label="meet"))
        outcome = self._follow(request, listener)
        _raise_unless_ok(outcome, "start")
        return store_for([outcome.replies[rank] for rank in ranks], self._folder)

    def _perform(
        self,
        send: Callable[[Engines], Request],
        targets: Sequence[int],
        listener: Listener,
        timeout_s: float | None = None,
        label: str = "",
    ) -> Outcome:
        place = self._turns.take_place()
        if not self._turns.is_next(place):
            busy = ", ".join(sorted(run.label for run in list(self._active) if run.label)) or "another request"
            print(f"workbench: the engines run {busy}; this waits its turn", file=sys.stderr)
        with self._turns.turn(place):
            self._prepare(targets)
            return self._follow(send(self._live()), listener, timeout_s, label=label)

    def _follow(
        self,
        request: Request,
        listener: Listener,
        timeout_s: float | None = None,
        wait: Callable[[Run], Outcome] = Run.wait,
        label: str = "",
    ) -> Outcome:
        live = self._live()
        run = Run(live, request, listener, self._processes, timeout_s, label)
        self._active.add(run)
        try:
            outcome = wait(run)
        finally:
            self._active.discard(run)
            live.forget()
        if outcome.stopped or outcome.dead or outcome.left_exchanges_open:
            self._world_is_stale = True
        return outcome

    def _call(self, targets: Sequence[int], function: Callable[..., Any], arguments: tuple, what: str) -> list[Any]:
        listener = OutputListener(targets, self.num_engines)
        tag = self._tag(targets, label=what)
        outcome = self._perform(
            lambda live: live.apply(targets, function, arguments, tag), targets, listener, label=what
        )
        _raise_unless_ok(outcome, what)
        return [outcome.replies[rank] for rank in targets]

    def _prepare(self, targets: Sequence[int]) -> None:
        """Replace engines that have died, and join a new world where the old one broke.

        Where engines cannot be replaced, the others still run what is sent to them alone.
        """
        missing = sorted(set(range(self.num_engines)) - set(self._live().ids()))
        if missing and not self._processes.replaces_engines and not set(missing) & set(targets):
            return
        if missing:
            if self._processes.replaces_engines:
                what = f"workbench: {say_ranks(missing)} died and is started again without its variables"
                print(what, file=sys.stderr)
            self._replace(missing)
        elif self._world_is_stale:
            self._join(OutputListener(range(self.num_engines), self.num_engines))

    def _replace(self, ranks: Sequence[int]) -> None:
        progress = StartProgress(len(ranks))
        self._processes.kill(ranks)
        self._live().wait_until_gone(ranks)
        self._processes.start_engines(self._live().client, ranks, progress.engines_up)
        progress.joining()
        self._join(progress)
        progress.finish(f"{say_ranks(ranks)} ready")

    def _leave_quietly(self) -> None:
        """Let idle engines leave their world in order; engines that are busy or broken are just ended."""
        if self._engines is None or self._active or len(self._engines.ids()) < self.num_engines:
            return
        ranks = range(self.num_engines)
        request = self._engines.apply(ranks, engine.leave, (), self._tag(ranks, label="close"))
        listener = OutputListener(ranks, self.num_engines)
        Run(self._engines, request, listener, _LeftAlone(), _LEAVE_TIMEOUT_S).wait()

    def _tag(self, targets: Sequence[int], wants_values: bool = False, label: str = "") -> protocol.CellTag:
        return protocol.CellTag(next(_run_numbers), len(targets) == self.num_engines, wants_values, label)

    def _check(self, ranks: Iterable[int] | None) -> tuple[int, ...]:
        self._live()
        return check_ranks(ranks, self.num_engines)

    def _live(self) -> Engines:
        if self._closed or self._engines is None:
            raise NotStartedError("this session is closed. Start a new one: session = wb.Session(engines=2)")
        return self._engines


class _LeftAlone:
    """Processes of a session that is being closed: they are ended anyway, right after."""

    def kill(self, ranks: Sequence[int]) -> None:
        pass

    def how_ended(self, rank: int) -> str:
        return ""

    def is_stopped(self, rank: int) -> bool:
        return False


def current() -> Session | None:
    """The session started last that is still open, or None."""
    return _open[-1] if _open else None


def _raise_unless_ok(outcome: Outcome, what: str, timeout_s: float | None = None) -> None:
    if outcome.stop_reason == "interrupt":
        raise Interrupted(outcome)
    if not outcome.ok:
        raise cell_error(outcome, what, timeout_s) from None


def _choose_gpus(device: str) -> list[str]:
    if device not in ("auto", "cpu", "cuda"):
        raise SessionError(f"Session(device={device!r}): the device is 'auto', 'cpu' or 'cuda'.")
    gpus = [] if device == "cpu" else find_gpus()
    if device == "cuda" and not gpus:
        raise SessionError(
            "Session(device='cuda'): 0 GPUs found (nvidia-smi and CUDA_VISIBLE_DEVICES), at least 1 needed. "
            "Use device='cpu', or 'auto' to take what is there."
        )
    return gpus


def _choose_num_engines(engines: int | None, gpus: Sequence[str]) -> int:
    if engines is None:
        return len(gpus) or 2
    if not isinstance(engines, int) or isinstance(engines, bool) or engines < 1:
        raise SessionError(f"Session(engines={engines!r}): a session has 1 or more engines, e.g. engines=2.")
    return engines
