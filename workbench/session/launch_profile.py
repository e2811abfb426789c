"""A session whose processes are started by an ipyparallel profile: SSH, MPI, Slurm and others, on any number of hosts.

The profile decides where engines run and with which environment. They end with their controller, whose
heartbeat they watch, not with the notebook process, which may be on another host.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence

import ipyparallel as ipp

from workbench.errors import EngineStartError, SessionError
from workbench.session.folder import SessionFolder
from workbench.session.ranks import say_ranks

START_TIMEOUT_S = 600  # batch systems queue
_POLL_S = 0.1


class ProfileProcesses:
    """Controller and engines of a profile; the same interface as `LocalProcesses`."""

    def __init__(self, profile: str, num_ranks: int) -> None:
        self.profile, self.num_ranks = profile, num_ranks
        self._client: ipp.Client | None = None
        self._cluster = ipp.Cluster(profile=profile, n=num_ranks, shutdown_atexit=False, log_level=logging.CRITICAL)

    def start(self, on_progress: Callable[[int], None]) -> ipp.Client:
        """Start everything and return a client that sees all ranks; engine ids become ranks.

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
            f"Session(profile={self.profile!r}): {say_ranks(ranks)} ended, and engines of a profile are started "
            f"only all together. Close this session and start a new one."
        )

    def stop(self) -> None:
        """Stop the profile's engines and controller."""
        self._cluster.stop_cluster_sync()

    def kill(self, ranks: Sequence[int]) -> None:
        """End engines at once, through their nannies."""
        if self._client is not None:
            alive = [rank for rank in ranks if rank in self._client.ids]
            if alive:
                self._client.send_signal("SIGKILL", targets=alive, block=False)

    def how_ended(self, rank: int) -> str:
        """The notebook does not see how processes of a profile end."""
        return "its process has ended"

    def _start_failure(self, num_up: int) -> str:
        log = "\n".join(engines.get_output() for engines in self._cluster.engines.values())
        tail = "\n".join(f"    {line}" for line in log.splitlines()[-12:]) or "    (nothing)"
        return (
            f"Session(profile={self.profile!r}): {num_up} of {self.num_ranks} engines are up. "
            f"The last lines they wrote:\n{tail}"
        )


def rendezvous_host() -> tuple[str, int]:
    """This engine's host name and a port that is free on it; runs on rank 0."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return socket.gethostname(), probe.getsockname()[1]


def store_for(hosts: Sequence[tuple[str, int]], folder: SessionFolder) -> str:
    """Where the ranks meet: a file if all of them are on this host, else a TCP store on rank 0's host."""
    here = socket.gethostname()
    if all(host == here for host, _ in hosts):
        return folder.new_store()
    host, port = hosts[0]
    return f"tcp://{host}:{port}"
