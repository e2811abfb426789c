"""Starts and stops the processes of a session with ipyparallel's own launchers.

One engine runs per rank, and its id is the rank. The launcher sets an engine's environment before torch loads or a GPU
is touched, the only safe moment for OMP_NUM_THREADS and CUDA_VISIBLE_DEVICES. All connections are encrypted and on
loopback. On Linux, a process that has loaded torch (`fork_server`) forks the engines on the CPU. Other engines start an
interpreter each.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import ipyparallel as ipp
import psutil
from ipyparallel.cluster.launcher import LocalControllerLauncher, LocalEngineLauncher, LocalEngineSetLauncher
from traitlets import Any as AnyTrait
from traitlets import Instance, Integer, List, Unicode
from traitlets.config import Config

from workbench.core.cores import num_cores, shared_threads
from workbench.errors import EngineStartError
from workbench.session.processes import fork_server, oom_kills, watchdog
from workbench.session.processes.folder import EngineFacts, ProcessId, SessionFolder
from workbench.session.processes.ports import reserved_ports
from workbench.session.processes.rendezvous_address import INTERFACE_VARIABLES, interface_of
from workbench.session.ranks import describe_ranks
from workbench.units import counted

START_TIMEOUT_S = 120
_POLL_S = 0.05
_LOG_LINES = 12
_NUM_PORTS = 20  # of a controller
WATCHDOG = [sys.executable, "-m", "workbench.session.processes.watchdog"]
KEEP_NO_MESSAGES = "--IPController.db_class=NoDB"
"""The option of a controller that would keep the last messages: up to 1 GB of what cells push and pull."""
_CONTROLLER_OPTIONS = [
    "--IPController.use_threads=True",
    "--IPController.ip=127.0.0.1",
    KEEP_NO_MESSAGES,
    "--HeartMonitor.period=1000",
    "--log-level=WARN",
]
_ENGINE_OPTIONS = ["--IPEngine.timeout=60", "--log-level=ERROR", "--InteractiveShell.xmode=Plain"]


def rank_environment(rank: int, num_ranks: int, gpus: Sequence[str] = ()) -> dict[str, str]:
    """The environment of one engine. ``gpus`` are the devices of all engines, empty for engines on the CPU."""
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        **shared_threads(num_ranks),
    }
    # gloo and NCCL ask for no password, and would listen wherever the host's name leads
    loopback = interface_of("127.0.0.1")
    environment |= {name: os.environ.get(name, loopback) for name in INTERFACE_VARIABLES if loopback}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[rank % len(gpus)]
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            # the numbers are those of nvidia-smi; CUDA by itself counts from the fastest GPU
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return environment


class WatchedControllerLauncher(LocalControllerLauncher):
    """A controller that ends with the notebook, and ends the rest of the session then."""

    stop_seconds_until_kill = Integer(1)

    def find_args(self) -> list[str]:
        return [*WATCHDOG, "ipyparallel.controller", *self.cluster_args, *self.controller_args]


class RankEngineLauncher(LocalEngineLauncher):
    """One engine. It knows its rank and ends with the notebook."""

    stop_seconds_until_kill = Integer(1)

    @property
    def rank(self) -> int:
        return self.parent.ranks[int(self.identifier)]

    @property
    def forks(self) -> fork_server.ForkServer | None:
        """The server that forks this engine, and with which it ends."""
        return self.parent.forks

    def find_args(self) -> list[str]:
        return [*WATCHDOG, "ipyparallel.engine", *self.cluster_args, *self.engine_args, f"--IPEngine.id={self.rank}"]

    def start(self) -> Any:
        self.parent.started[self.rank] = self
        own = rank_environment(self.rank, self.parent.num_ranks, self.parent.gpus)
        self.set_trait("environment", {**self.environment, **own})
        self.work_dir = self.parent.started_in
        if self.forks is None:
            return super().start()
        arguments = self.find_args()[len(WATCHDOG) :]
        self.process = self.forks.fork(arguments, {**os.environ, **self.get_env()}, self.work_dir, self.output_file)
        self.pid = self.process.pid
        self.notify_start(self.pid)
        self._start_waiting()
        return None


class RankEngineSetLauncher(LocalEngineSetLauncher):
    """Engines for some ranks of a session: all of them at its start, fewer at a restart.

    ``started`` keeps the launcher of each rank. ``launchers`` loses those whose process has ended. ``started_in`` is
    the folder in which the engines begin: that of the session's start.
    """

    launcher_class = RankEngineLauncher
    started: Any = AnyTrait()
    ranks: Any = List()
    num_ranks, started_in = Integer(), Unicode()
    gpus: Any = List()
    forks: Any = Instance(fork_server.ForkServer, allow_none=True)


class LocalProcesses:
    """Controller and engines of one session on this host.

    ``start`` starts them or raises `EngineStartError`. ``stop`` ends all of them. Both leave nothing behind.
    """

    replaces_at_once = True

    def __init__(self, folder: SessionFolder, num_ranks: int, gpus: Sequence[str] = (), keep: bool = False) -> None:
        self.folder, self.num_ranks, self.gpus, self.keep = folder, num_ranks, list(gpus), keep
        self._started_in = os.getcwd()  # where all engines begin, whatever the notebook's folder is by then
        self.engines: dict[int, psutil.Process] = {}
        self._ids: dict[int, ProcessId] = {}
        self._controller: ProcessId | None = None
        self._since_s = time.time()
        self._oom_kills = oom_kills.count()
        self._launchers: dict[int, RankEngineLauncher] = {}
        self._known: set[ProcessId] = set()
        self._forks: fork_server.ForkServer | None = None
        self._cluster = ipp.Cluster(
            profile_dir=str(folder.path / "profile"),
            cluster_id="",
            cluster_file="",
            config=Config(),
            load_profile=False,
            shutdown_atexit=False,
            delay=0,
            send_engines_connection_env=False,  # it waits for the controller; engines can load torch meanwhile
            log_level=logging.CRITICAL,
            controller_args=_CONTROLLER_OPTIONS,
            engines=RankEngineSetLauncher,
            controller=WatchedControllerLauncher,
        )

    def start(self, on_progress: Callable[[int], None]) -> tuple[ipp.Client, range]:
        """Start controller and engines. Returns a client that sees all ranks, and the engines' ids, which are ranks.

        ``on_progress`` gets the number of engines that are up, about 20 times a second.

        Raises:
            EngineStartError: the controller or an engine ended. The message quotes the last lines it wrote.
        """
        self._find_fork_server()  # it loads torch while the controller starts
        with reserved_ports(_NUM_PORTS) as ports:
            self._write_controller_settings(ports)
            self._cluster.start_controller_sync(environment=self._environment())
            assert self._cluster.controller is not None
            self._controller = ProcessId.of(self._cluster.controller.pid)
            self._launch(range(self.num_ranks), on_progress)
            try:
                client = self._cluster.connect_client_sync()
            except Exception as error:
                log = _indented_tail(self._cluster.controller.get_output())
                raise EngineStartError(
                    f"Session: the controller did not start ({error}). The last lines it wrote:\n{log}"
                ) from error
        self._wait_for(client, range(self.num_ranks), on_progress)
        return client, range(self.num_ranks)

    def attach(self, facts: EngineFacts) -> ipp.Client:
        """A client for engines that an earlier notebook has started and left (``keep``)."""
        self._controller, self._since_s, self._started_in = facts.controller, facts.since_s, facts.started_in
        client = self.observe(facts)
        self._known = set(self.folder.processes())
        self._record()
        return client

    def observe(self, facts: EngineFacts) -> ipp.Client:
        """A client for engines that serve another notebook. Records nothing in the folder."""
        self.find_engines(facts)
        return ipp.Client(str(self.folder.path / "profile" / "security" / "ipcontroller-client.json"))

    def find_engines(self, facts: EngineFacts) -> None:
        """Find the engines' processes: those of the folder's list that still run."""
        self._ids = dict(facts.engines)
        found = {rank: process.find() for rank, process in self._ids.items()}
        self.engines = {rank: process for rank, process in found.items() if process is not None}

    def start_engines(
        self, client: ipp.Client, ranks: Sequence[int], on_progress: Callable[[int], None]
    ) -> Sequence[int]:
        """Start engines for these ranks and wait until the client sees them. Returns their ids; raises as `start`."""
        self.num_ranks = max(self.num_ranks, *(rank + 1 for rank in ranks))
        self._launch(ranks, on_progress)
        self._wait_for(client, ranks, on_progress)
        return ranks

    def forget(self, ranks: Sequence[int]) -> None:
        """Give back ranks, the last ones of the session, whose engines have ended."""
        self.num_ranks = min([self.num_ranks, *ranks])
        for rank in ranks:
            self.engines.pop(rank, None)
            self._launchers.pop(rank, None)
        self._record()

    def _launch(self, ranks: Sequence[int], on_progress: Callable[[int], None]) -> None:
        """Start the processes of engines. They connect once the controller has written its address."""
        for rank in ranks:
            self._launchers.pop(rank, None)  # what engines before them wrote explains no failure from now on
        self._find_fork_server()
        self._wait_for_fork_server(ranks, on_progress)
        started: dict[int, RankEngineLauncher] = {}
        places = {"ranks": list(ranks), "num_ranks": self.num_ranks, "gpus": self.gpus, "started_in": self._started_in}
        options = {"forks": self._forks, "engine_args": _ENGINE_OPTIONS, "environment": self._environment()}
        try:
            self._cluster.start_engines_sync(len(ranks), started=started, delay=0, **places, **options)
        except EOFError:
            raise EngineStartError(self._start_failure(ranks, "ended before they were ready")) from None
        self._launchers.update(started)
        fork_server.release(self, still_used=[each.forks for each in self._launchers.values()])
        self.engines.update({rank: launcher.process for rank, launcher in started.items()})
        self._ids.update({rank: ProcessId.of(launcher.pid) for rank, launcher in started.items()})
        self._record()

    def stop(self) -> None:
        """End all processes and remove the folder. Safe to call twice.

        SIGKILL comes without a request first: Jupyter kills the kernel of a closed notebook two seconds later.
        """
        with suppress(OSError):  # on a full disk they are known all the same
            self._record()
        for process in self._known:
            process.kill()
        self.folder.remove()
        self._cluster.stop_engines_sync()
        self._cluster.stop_controller_sync()
        deadline_s = time.monotonic() + 1.0
        while any(process.find() for process in self._known) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S / 2)
        self._known.clear()
        self.leave()

    def leave(self) -> None:
        """Stop using the engines. Kept engines go on running."""
        fork_server.release(self)
        self._forks = None

    def kill(self, ranks: Sequence[int]) -> None:
        """End engines at once."""
        for rank in ranks:
            try:
                self.engines[rank].kill()
            except (KeyError, psutil.NoSuchProcess):
                continue

    def pids(self) -> list[int]:
        """The engines' processes."""
        return [process.pid for process in self.engines.values()]

    def is_stopped(self, rank: int) -> bool:
        """Whether the engine's process is stopped, by SIGSTOP for example."""
        try:
            return bool(self.engines[rank].status() == psutil.STATUS_STOPPED)
        except (KeyError, psutil.NoSuchProcess):
            return False

    def _find_fork_server(self) -> None:
        """Find the fork server that fits the present environment. Engines that use GPUs are not forked."""
        if self.gpus or sys.platform != "linux":
            return
        environment = {**os.environ, **rank_environment(0, self.num_ranks)}
        self._forks = fork_server.ForkServer.shared(environment, user=self)

    def _wait_for_fork_server(self, ranks: Sequence[int], on_progress: Callable[[int], None]) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self._forks is not None and not self._forks.is_ready():
            if self._forks.has_ended():
                raise EngineStartError(self._start_failure(ranks, "ended before they were ready"))
            if time.monotonic() > deadline_s:
                raise EngineStartError(self._start_failure(ranks, _too_late()))
            on_progress(0)
            time.sleep(_POLL_S)

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Those of the ranks whose process has ended."""
        return [rank for rank in ranks if rank not in self.engines or self._ids[rank].find() is None]

    def record_oom_kills(self) -> None:
        """Remember the kernel's count of OOM kills. `how_ended` explains a SIGKILL by lack of memory if it grows."""
        self._oom_kills = oom_kills.count()

    def _environment(self) -> dict[str, str]:
        """Variables for `watchdog`. They name the process to watch: the notebook, or a kept session's controller."""
        connection = self.folder.path / "profile" / "security" / "ipcontroller-engine.json"
        environment = {"WORKBENCH_SESSION_FOLDER": str(self.folder.path), watchdog.CONNECTION: str(connection)}
        if not self.keep:
            environment[watchdog.OWNER] = str(os.getpid())
        elif self._controller is not None:
            environment[watchdog.CONTROLLER] = str(self._controller)
        return environment

    def _write_controller_settings(self, ports: Sequence[int]) -> None:
        """Encrypt, sign (ipyparallel signs no message that it encrypts unless it gets a key), and name the ports."""
        path = self.folder.path / "profile" / "ipcontroller_config.py"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(
            f"c = get_config()\n"
            f"c.Session.key = {secrets.token_hex(32).encode()!r}\n"
            f"c.IPController.enable_curve = True\n"
            f"c.IPController.ports = {ports}\n"
        )

    def how_ended(self, rank: int) -> str:
        """How an engine ended, as far as it is known: ``killed by SIGKILL`` or ``exit code 3``."""
        try:
            code = self.engines[rank].wait(timeout=0.5)
            if code is None and (forks := self._launchers[rank].forks) is not None:
                code = forks.exit_code(self.engines[rank].pid)
        except (KeyError, psutil.Error):
            code = None
        if code in (None, -signal.SIGKILL) and oom_kills.count() > self._oom_kills:
            return "out of memory: the kernel ended it, or another process at that time, because memory had run out"
        if code is None:
            return "its process has ended"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def _wait_for(self, client: ipp.Client, ranks: Sequence[int], on_progress: Callable[[int], None]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not set(ranks) <= set(client.ids):
            dead = self.dead(ranks)
            if dead:
                raise EngineStartError(self._start_failure(dead, "ended before they were ready"))
            if time.monotonic() > deadline:
                missing = sorted(set(ranks) - set(client.ids))
                raise EngineStartError(self._start_failure(missing, _too_late()))
            on_progress(len(set(ranks) & set(client.ids)))
            time.sleep(_POLL_S)
        self._record()

    def _start_failure(self, ranks: Sequence[int], what: str) -> str:
        logs = "\n".join(f"rank {rank}:\n{self._log_of(rank)}" for rank in ranks[:2])
        return (
            f"Session(engines={self.num_ranks}): {len(ranks)} of {self.num_ranks} engines "
            f"({describe_ranks(ranks)}) {what}. Engines run {sys.executable} in {self._started_in}. "
            f"The last lines they wrote:\n{logs}"
        )

    def _log_of(self, rank: int) -> str:
        if rank in self._launchers:
            return _indented_tail(self._launchers[rank].get_output())
        return _indented_tail(self._forks.output() if self._forks is not None else "")

    def _record(self) -> None:
        """Record every process of the session in its folder, so that another process can end them later."""
        controller = self._controller.find() if self._controller is not None else None
        for root in [*self.engines.values(), *([controller] if controller is not None else [])]:
            try:
                self._known.update(ProcessId.of(each.pid) for each in [root, *root.children(recursive=True)])
            except psutil.NoSuchProcess:
                continue
        self._known = {process for process in self._known if process.find() is not None}
        if self.folder.path.exists():
            self.folder.record(self._known, self._facts(), self.keep)

    def _facts(self) -> EngineFacts | None:
        """What other processes need to reach the engines. None before all engines have been started."""
        if self._controller is None or len(self.engines) < self.num_ranks:
            return None
        engines = {rank: self._ids[rank] for rank in self.engines}
        return EngineFacts(self._controller, engines, tuple(self.gpus), self._since_s, self._started_in)


def _too_late() -> str:
    return f"did not answer within {START_TIMEOUT_S} s on {counted(num_cores(), 'core')}: start fewer if they are many"


def _indented_tail(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()][-_LOG_LINES:]
    return "\n".join(f"    {line}" for line in lines) or "    (nothing)"
