"""Starts a session's processes by an ipyparallel profile: SSH, MPI, Slurm and others, on any number of hosts.

The profile decides where engines run and with which environment. They watch the controller's heartbeat and end with
it. The controller ends with the notebook.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence

import ipyparallel as ipp
from traitlets.config import Config

from workbench.errors import EngineStartError, SessionError
from workbench.session.processes import watchdog
from workbench.session.processes.folder import SessionFolder
from workbench.session.processes.launch import WATCHDOG
from workbench.session.ranks import describe_ranks

START_TIMEOUT_S = 600  # batch systems queue
_POLL_S = 0.1


class ProfileProcesses:
    """Controller and engines of a profile; the same interface as `LocalProcesses`."""

    replaces_engines = False
    """A profile's launchers do not know single engines by their ids."""

    def __init__(self, profile: str, num_ranks: int, folder: SessionFolder) -> None:
        self.profile, self.num_ranks = profile, num_ranks
        self._folder = folder
        self._client: ipp.Client | None = None
        self._cluster = ipp.Cluster(
            profile=profile,
            n=num_ranks,
            shutdown_atexit=False,
            log_level=logging.CRITICAL,
            config=self._watched(),
        )

    def _watched(self) -> Config:
        """Options by which a controller on this host watches the notebook."""
        environment = {watchdog.OWNER: str(os.getpid()), "WORKBENCH_SESSION_FOLDER": str(self._folder.path)}
        command = [*WATCHDOG, "ipyparallel.controller"]
        return Config(LocalControllerLauncher={"controller_cmd": command, "environment": environment})

    @property
    def controller_address(self) -> str:
        """The address at which the engines reach the controller."""
        assert self._client is not None
        return str(self._client._config["interface"]).rpartition("/")[2]

    def start(self, on_progress: Callable[[int], None]) -> ipp.Client:
        """Start controller and engines. Returns a client that sees all ranks; engine ids become ranks.

        Raises:
            EngineStartError: the profile's launchers failed, or engines did not register in time.
        """
        try:
            self._cluster.start_cluster_sync()
            self._client = client = self._cluster.connect_client_sync()
        except Exception as error:
            raise EngineStartError(f"Session(profile={self.profile!r}): its launchers failed: {error}") from error
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while client.ids != list(range(self.num_ranks)):
            running = any(engines.state == "running" for engines in self._cluster.engines.values())
            if not running or time.monotonic() > deadline_s:
                raise EngineStartError(self._start_failure(len(client.ids)))
            on_progress(len(client.ids))
            time.sleep(_POLL_S)
        return client

    def start_engines(self, client: ipp.Client, ranks: Sequence[int], on_progress: Callable[[int], None]) -> None:
        """Single engines of a profile cannot be replaced, because its launchers do not know their ids."""
        raise SessionError(
            f"Session(profile={self.profile!r}): {describe_ranks(ranks)} ended, and engines of a profile are started "
            f"only all together. Save what the other ranks hold (%%global --ranks runs there), close this session and "
            f"start a new one."
        )

    def stop(self) -> None:
        """Stop the profile's engines and controller where their hosts can still be reached."""
        for end in (self._cluster.stop_engines_sync, self._cluster.stop_controller_sync):
            try:
                end()
            except Exception as error:  # noqa: BLE001 - launchers run programs on other hosts, which may be gone
                what = f"workbench: not all processes of profile {self.profile!r} could be ended"
                print(f"{what}: {error}", file=sys.stderr)

    def kill(self, ranks: Sequence[int]) -> None:
        """End engines at once, through their nannies."""
        if self._client is not None:
            alive = [rank for rank in ranks if rank in self._client.ids]
            if alive:
                self._client.send_signal("SIGKILL", targets=alive, block=False)

    def pids(self) -> list[int]:
        """The notebook does not see the processes of a profile."""
        return []

    def is_stopped(self, rank: int) -> bool:
        """The notebook does not see the processes of a profile."""
        return False

    def how_ended(self, rank: int) -> str:
        """The notebook does not see how processes of a profile end."""
        return "its process has ended"

    def record_oom_kills(self) -> None:
        """The notebook does not see the memory of other hosts."""

    def _start_failure(self, num_up: int) -> str:
        log = "\n".join(engines.get_output() for engines in self._cluster.engines.values())
        tail = "\n".join(f"    {line}" for line in log.splitlines()[-12:]) or "    (nothing)"
        return (
            f"Session(profile={self.profile!r}): {num_up} of {self.num_ranks} engines are up. "
            f"The last lines they wrote:\n{tail}"
        )
