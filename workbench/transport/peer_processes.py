"""The processes of peers on this host: whether one has ended or is stopped."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Mapping

from workbench.errors import WorldError
from workbench.transport.system_calls import has_process_files, process_file

GRACE_VARIABLE = "WORKBENCH_STOPPED_GRACE_S"
STOPPED_GRACE_S = 1.0
"""Time for which a process may be stopped (SIGSTOP, Ctrl+Z) before a wait for it fails."""


class PeerProcesses:
    """Watches processes of this host, given by rank.

    A process that a debugger holds does not count as stopped. The environment variable WORKBENCH_STOPPED_GRACE_S
    changes the grace period of a stopped process; ``inf`` waits for ever.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.pids = dict(pids)
        self.grace_s = grace_from_environment()
        self._files = {rank: process_file(pid) for rank, pid in pids.items()} if has_process_files() else {}
        self._stopped_since: dict[int, float] = {}

    def has_ended(self, rank: int, within_s: float = 0.0) -> bool:
        """Whether the process has ended, or ends within ``within_s``; False where the system cannot tell."""
        if rank not in self._files:
            return False
        poll = select.poll()  # kill(pid, 0) would succeed on a zombie
        poll.register(self._files[rank], select.POLLIN)
        return bool(poll.poll(within_s * 1e3))

    def stopped_reason(self, rank: int) -> str | None:
        """A text if the process was found stopped at every check during the grace period; else None."""
        if rank not in self.pids or not self.is_stopped(rank):
            self._stopped_since.pop(rank, None)
            return None
        since = self._stopped_since.setdefault(rank, time.monotonic())
        if time.monotonic() - since < self.grace_s:
            return None
        return f"process {self.pids[rank]} of rank {rank} is stopped (SIGSTOP)"

    def is_stopped(self, rank: int) -> bool:
        """Whether the process is stopped now."""
        try:
            with open(f"/proc/{self.pids[rank]}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "T"
        except (OSError, KeyError):
            return False

    def close(self) -> None:
        """Close the file descriptors of the processes."""
        for file in self._files.values():
            os.close(file)
        self._files = {}


def grace_from_environment() -> float:
    """The grace period in seconds.

    Raises:
        WorldError: the environment variable is no number >= 0.
    """
    text = os.environ.get(GRACE_VARIABLE, str(STOPPED_GRACE_S))
    try:
        grace_s = float(text)
    except ValueError:
        grace_s = -1.0
    if not grace_s >= 0:
        raise WorldError(
            f"{GRACE_VARIABLE}={text}: the grace period of a stopped process is 0 or more seconds, e.g. 1, or inf."
        )
    return grace_s
