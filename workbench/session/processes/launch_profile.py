"""Starts a session's processes by an ipyparallel profile: SSH, MPI, Slurm and others, on any number of hosts.

The profile decides where engines run and with which environment. They watch the controller's heartbeat and end with
it. The controller ends with the notebook. Engines start in *engine sets*: over SSH a few per host, else one for all.
Engines that replace others, or that are added, are one more set.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import ipyparallel as ipp
from ipyparallel.cluster.launcher import BaseLauncher, MPILauncher, SSHEngineSetLauncher
from traitlets.config import Config

from workbench.core.suggest import suggest
from workbench.errors import EngineStartError, SessionError
from workbench.session.adapter import Engines
from workbench.session.processes import ssh, watchdog
from workbench.session.processes.batch_jobs import BatchJob, find_job
from workbench.session.processes.folder import SessionFolder
from workbench.session.processes.launch import KEEP_NO_MESSAGES, WATCHDOG
from workbench.session.processes.make_profile import profiles_folder
from workbench.session.processes.rendezvous_address import ENGINE_SET, RendezvousAddress
from workbench.session.processes.ssh_engines import SshEngineSet
from workbench.units import counted

START_TIMEOUT_S = 600
"""Of engines without SSH, which a batch system may let wait. The wait of a Slurm job does not count."""
_SSH_START_TIMEOUT_S = 120
_STOP_TIMEOUT_S = 30
_POLL_S = 0.1
_ASK_PERIOD_S = 5.0
"""Between questions to a batch system."""
_SETS_PER_HOST = 4
"""An sshd lets in 10 connections at a time that have not shown a key yet."""
_ANYWHERE = ""
"""The host of an engine set whose launcher chooses the hosts."""


class ProfileProcesses:
    """Controller and engines of a profile; the same interface as `LocalProcesses`.

    Args:
        num_ranks: default: as many as the profile names.

    Raises:
        SessionError: there is no such profile.
    """

    replaces_at_once = False
    """To start engines takes a batch system minutes; ranks that are left do not wait for it."""

    def __init__(self, profile: str, num_ranks: int | None, folder: SessionFolder) -> None:
        _check_exists(profile)
        self.profile = profile
        self._folder = folder
        self._client: ipp.Client | None = None
        self._engines: Engines | None = None
        self._cluster = ipp.Cluster(
            profile=profile,
            shutdown_atexit=False,
            cluster_file="",
            log_level=logging.CRITICAL,
            config=self._watched(),
        )
        self._cluster.controller_args = [KEEP_NO_MESSAGES, *self._cluster.controller_args]  # the profile's win
        if self._cluster.engine_launcher_class is SSHEngineSetLauncher:
            self._cluster.engine_launcher_class = SshEngineSet
        self._cluster.engine_launcher_class = _in_folder(self._cluster.engine_launcher_class, os.getcwd())
        self._launcher: Any = self._cluster.engine_launcher_class(
            parent=self._cluster, profile_dir=self._cluster.profile_dir
        )
        self._on_hosts: dict[str, Any] = (
            dict(self._launcher.engines) if isinstance(self._launcher, SSHEngineSetLauncher) else {}
        )
        self._capacity = {
            host: each.get("n", 1) if isinstance(each, dict) else each for host, each in self._on_hosts.items()
        }
        self.num_ranks = num_ranks or sum(self._capacity.values()) or self._cluster.n or 2
        self._set_numbers = itertools.count(1)
        self._set_hosts: dict[str, str] = {}
        self._ended_jobs: dict[str, BatchJob] = {}
        self._addresses: dict[int, RendezvousAddress] = {}

    def _watched(self) -> Config:
        """Options by which a controller on this host watches the notebook."""
        environment = {watchdog.OWNER: str(os.getpid()), "WORKBENCH_SESSION_FOLDER": str(self._folder.path)}
        command = [*WATCHDOG, "ipyparallel.controller"]
        return Config(LocalControllerLauncher={"controller_cmd": command, "environment": environment})

    @property
    def is_over_ssh(self) -> bool:
        """Whether the profile starts engines over SSH, and names their hosts."""
        return bool(self._capacity)

    @property
    def controller_address(self) -> str:
        """The address at which the engines reach the controller; its host's name if it listens on all interfaces."""
        assert self._client is not None
        address = str(self._client._config["interface"]).rpartition("/")[2]
        listens_everywhere = self._cluster.controller_ip in ("*", "0.0.0.0")
        return str(self._client._config.get("location") or address) if listens_everywhere else address

    def start(self, on_progress: Callable[[int, str], None]) -> tuple[ipp.Client, list[int]]:
        """Start controller and engines. Returns a client that sees all engines, and the id of each rank's.

        Raises:
            EngineStartError: the profile's launchers failed, or engines did not register in time.
        """
        hosts = self._hosts_of_start()
        try:
            self._cluster.start_controller_sync()
            self._client = client = self._cluster.connect_client_sync()
        except Exception as error:
            raise EngineStartError(
                f"Session(profile={self.profile!r}): the controller did not start: {error}"
            ) from error
        return client, self._bring_up(client, hosts, on_progress)

    def start_engines(
        self, client: ipp.Client, ranks: Sequence[int], on_progress: Callable[[int, str], None]
    ) -> list[int]:
        """Start engines for these ranks, on their own hosts if these answer. Returns their ids; raises as `start`."""
        ids = self._bring_up(client, self._hosts_for(ranks), on_progress)
        self.num_ranks = max(self.num_ranks, *(rank + 1 for rank in ranks))
        return ids

    def learn(self, engines: Engines, addresses: Sequence[RendezvousAddress]) -> None:
        """Take the engines that signals go through, and the place of each rank."""
        self._engines, self._addresses = engines, dict(enumerate(addresses))

    def order(self, addresses: Sequence[RendezvousAddress]) -> list[int]:
        """The engines in an order in which those of one host are neighbours, the hosts as in the profile."""
        first = {each.host: index for index, each in reversed(list(enumerate(addresses)))}
        return sorted(
            range(len(addresses)), key=lambda i: (int(addresses[i].engine_set or 0), first[addresses[i].host], i)
        )

    def stop(self) -> None:
        """Stop the controller, and engines that may run still, where their hosts can be reached."""
        self._stop_sets(list(self._cluster.engines))
        try:
            self._cluster.stop_controller_sync()
        except Exception as error:  # noqa: BLE001 - a profile may start it by any launcher
            self._report_left("the controller", error)

    def kill(self, ranks: Sequence[int]) -> None:
        """End engines at once, through their nannies."""
        if self._engines is not None:
            self._engines.signal(ranks, "SIGKILL")

    def forget(self, ranks: Sequence[int]) -> None:
        """Give back ranks whose engines have ended, and their engine sets if these have no others."""
        used = {each.engine_set for rank, each in self._addresses.items() if rank not in ranks}
        given_back = {self._addresses.pop(rank).engine_set for rank in ranks if rank in self._addresses}
        if not self._capacity:  # a batch system waits for the end of its job
            self._stop_sets(sorted(given_back - used))
        self.num_ranks = min([self.num_ranks, *ranks])

    def pids(self) -> list[int]:
        """The notebook does not see the processes of a profile."""
        return []

    def is_stopped(self, rank: int) -> bool:
        """The notebook does not see the processes of a profile."""
        return False

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Those of the ranks whose batch job has ended."""
        return [rank for rank in ranks if self._ended_job(rank)]

    def how_ended(self, rank: int) -> str:
        """Where an engine ran, and how its batch job has ended; the notebook does not see how the engine has ended."""
        where = self._addresses.get(rank)
        if where is None:
            return "its process has ended"
        ended = f"its process on {where.host.split()[0]} has ended, or the host"
        return f"{ended}; {job}" if (job := self._ended_job(rank)) else ended

    def record_oom_kills(self) -> None:
        """The notebook does not see the memory of other hosts."""

    def _ended_job(self, rank: int) -> BatchJob | None:
        """The batch job of a rank, if it has ended."""
        found = self._jobs([self._addresses[rank].engine_set]) if rank in self._addresses else []
        return next((job for job in found if job.has_ended), None)

    def _jobs(self, names: Collection[str]) -> list[BatchJob]:
        """The batch jobs of engine sets; none for launchers of other kinds. Those that have ended stay as they are."""
        launchers = {name: self._cluster.engines.get(name) for name in names}
        found = {name: self._ended_jobs.get(name) or find_job(launcher) for name, launcher in launchers.items()}
        self._ended_jobs |= {name: job for name, job in found.items() if job is not None and job.has_ended}
        return [job for job in found.values() if job is not None]

    def _hosts_of_start(self) -> dict[str, int]:
        """How many engines start on which host."""
        if not self._capacity:
            return {_ANYWHERE: self.num_ranks}
        if self.num_ranks > (most := sum(self._capacity.values())):
            named = ", ".join(f"{number} on {host}" for host, number in self._capacity.items())
            raise SessionError(
                f"Session(engines={self.num_ranks}, profile={self.profile!r}): it has {most} engines: {named}. "
                f"Ask for at most {most}, or change SSHEngineSetLauncher.engines in {self._cluster.profile_dir}."
            )
        hosts, left = {}, self.num_ranks
        for host, number in self._capacity.items():
            hosts[host] = min(number, left)
            left -= hosts[host]
        return {host: number for host, number in hosts.items() if number}

    def _hosts_for(self, ranks: Sequence[int]) -> dict[str, int]:
        """How many engines start on which host, for ranks that were lost or are new."""
        if not self._capacity:
            return {_ANYWHERE: len(ranks)}
        problems = ssh.ask_all(list(self._capacity), lambda host: ssh.why_silent(self._ssh_command(), host))
        answering = [host for host, problem in problems.items() if not problem]
        silent = "; ".join(f"{host}: {problem}" for host, problem in problems.items() if problem)
        if not answering:
            raise EngineStartError(
                f"Session(profile={self.profile!r}): no host answers, so no engine can be started. {silent}"
            )
        homes = {rank: self._set_hosts.get(each.engine_set, "") for rank, each in self._addresses.items()}
        taken = Counter(host for rank, host in homes.items() if rank not in ranks)
        chosen = Counter[str]()
        for rank in ranks:
            least = min(answering, key=lambda host: (taken + chosen)[host] / max(1, self._capacity[host]))
            chosen[homes[rank] if homes.get(rank) in answering else least] += 1
        if any(problems.get(homes.get(rank, "")) for rank in ranks):
            where = ", ".join(f"{number} on {host}" for host, number in chosen.items())
            print(f"workbench: {silent}. The engines start elsewhere: {where}", file=sys.stderr)
        return dict(chosen)

    def _bring_up(
        self, client: ipp.Client, hosts: Mapping[str, int], on_progress: Callable[[int, str], None]
    ) -> list[int]:
        """Start the engine sets of all hosts at the same time; returns the ids of their engines."""
        before, wanted = set(client.ids), sum(hosts.values())
        limit_s = _SSH_START_TIMEOUT_S if self._capacity else START_TIMEOUT_S
        deadline_s = time.monotonic() + limit_s
        sets = {str(next(self._set_numbers)): each for each in _engine_sets(hosts)}
        self._set_hosts |= {name: host for name, (host, _) in sets.items()}
        pool = ThreadPoolExecutor(len(sets), "workbench-launch")
        launches = {name: pool.submit(self._start_set, name, host, count) for name, (host, count) in sets.items()}
        pool.shutdown(wait=False)
        jobs: list[BatchJob] = []
        ask_s = 0.0
        try:
            while len(found := sorted(set(client.ids) - before)) < wanted:
                if time.monotonic() > ask_s:
                    jobs, ask_s = self._jobs(sets), time.monotonic() + _ASK_PERIOD_S
                    if any(job.is_waiting for job in jobs):
                        deadline_s = time.monotonic() + limit_s
                is_over = time.monotonic() > deadline_s or any(job.has_ended for job in jobs)
                self._check_launches(launches, len(found), wanted, is_over)
                on_progress(len(found), ", ".join(map(str, jobs)))
                time.sleep(_POLL_S)
        except BaseException:
            wait(launches.values(), _STOP_TIMEOUT_S)  # what starts only now would not be stopped
            self._stop_sets(sets)
            raise
        return found

    def _start_set(self, name: str, host: str, count: int) -> None:
        environment = {**self._launcher.environment, ENGINE_SET: name}
        own: dict[str, Any] = {}
        if host != _ANYWHERE:
            given = self._on_hosts[host]
            own["engines"] = {host: {**given, "n": count} if isinstance(given, dict) else count}
        self._cluster.start_engines_sync(count, engine_set_id=name, environment=environment, **own)

    def _check_launches(self, launches: Mapping[str, Future[None]], num_up: int, wanted: int, is_over: bool) -> None:
        """Raise `EngineStartError` if engines cannot come any more."""
        done = {name: launch.exception() for name, launch in launches.items() if launch.done()}
        failed = {self._set_hosts[name]: error for name, error in done.items() if error is not None}
        problems = [f"{host or 'its launcher'}: {_describe(error)}" for host, error in failed.items()]
        sets = [self._cluster.engines[name] for name in done if name in self._cluster.engines]
        has_ended = any(map(_has_ended, sets))
        if not (problems or has_ended or is_over):
            return
        came = [f"{num_up} of {counted(wanted, 'engine')} came", *map(str, self._jobs(launches))]
        what = "; ".join(problems or came)
        log = "" if problems else "\n".join(each.get_output() for each in sets)
        tail = "".join(f"\n    {line}" for line in log.splitlines()[-12:])
        on_hosts = dict.fromkeys(host for name in launches if (host := self._set_hosts[name]))
        hint = f" Look for the cause: workbench doctor --hosts {','.join(on_hosts)}" if on_hosts else ""
        said = f" The last lines that they wrote:{tail}" if tail else ""
        raise EngineStartError(f"Session(profile={self.profile!r}): {what}.{hint}{said}")

    def _stop_sets(self, names: Collection[str]) -> None:
        """Stop engine sets at the same time, and say what could not be reached."""

        def stop(name: str) -> None:
            if name in self._cluster.engines:
                self._cluster.stop_engines_sync(name)

        pool = ThreadPoolExecutor(max(1, len(names)), "workbench-stop")
        stops = {name: pool.submit(stop, name) for name in names}
        pool.shutdown(wait=False)
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        for name, each in stops.items():
            try:
                each.result(max(0.0, deadline_s - time.monotonic()))
            except Exception as error:  # noqa: BLE001 - launchers run programs on other hosts, which may be gone
                self._report_left(f"engines on {self._set_hosts[name] or 'their hosts'}", error)

    def _report_left(self, what: str, error: BaseException) -> None:
        hint = "Engines end by themselves when they miss the controller."
        print(f"workbench: profile {self.profile!r}: could not end {what}: {_describe(error)}. {hint}", file=sys.stderr)

    def _ssh_command(self) -> list[str]:
        return [*self._launcher.ssh_cmd, *self._launcher.ssh_args]


def _check_exists(profile: str) -> None:
    """Raise `SessionError` if there is no such profile. ipyparallel would make an empty one, of engines here."""
    place = profiles_folder()
    known = sorted(path.name.removeprefix("profile_") for path in place.glob("profile_*"))
    if profile not in known:
        meant = f", did you mean {near[0]!r}?" if (near := suggest(profile, known)) else "."
        raise SessionError(
            f"Session(profile={profile!r}): there is no folder profile_{profile} in {place}{meant} Profiles there: "
            f"{', '.join(known) or 'none'}. %workbench start --hosts or --slurm writes one; ipython profile create "
            f"{profile} --parallel makes one to fill in."
        )


def _engine_sets(hosts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Host and number of engines of each set: a few sets per host, since one set starts its engines one by one.

    >>> _engine_sets({"a": 6, "b": 1})
    [('a', 2), ('a', 2), ('a', 1), ('a', 1), ('b', 1)]
    """
    found = []
    for host, number in hosts.items():
        parts = min(number, _SETS_PER_HOST) if host != _ANYWHERE else 1
        found += [(host, number // parts + (part < number % parts)) for part in range(parts)]
    return found


def _in_folder(launcher: type[BaseLauncher], folder: str) -> type[BaseLauncher]:
    """This launcher of engines, which begin in a folder whatever the notebook's is by then."""

    class InFolder(launcher):
        def __init__(self, work_dir: str = "", **options: Any) -> None:
            super().__init__(work_dir=folder, **options)

    return InFolder


def _describe(error: BaseException) -> str:
    if isinstance(error, TimeoutError) or getattr(error, "returncode", 0) == 255:
        return "no answer"
    output = getattr(error, "output", None)
    said = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
    return f"{error}" + (f" ({said.strip()[-300:]})" if said.strip() else "")


def _has_ended(engine_set: Any) -> bool:
    """Whether an engine of a set has ended, as far as its launcher sees it."""
    if isinstance(engine_set, MPILauncher | SshEngineSet) and engine_set.state == "running":
        engine_set.poll()
    return bool(engine_set.state == "after")
