"""What Slurm says about the job in which a profile's engines run."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass

from ipyparallel.cluster.launcher import BaseLauncher, SlurmLauncher

_TIMEOUT_S = 2.0
_POLL_S = 0.1
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED"}
_ALIVE = _WAITING | {"RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"}


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A job's number, and Slurm's words for its state and the reason of it: ``PENDING`` and ``Resources``."""

    number: str
    state: str
    reason: str

    @property
    def has_ended(self) -> bool:
        """Whether no engine of this job runs, or will run."""
        return self.state not in _ALIVE

    @property
    def is_waiting(self) -> bool:
        """Whether it has no nodes yet, or these are being started."""
        return self.state in _WAITING

    def __str__(self) -> str:
        known = self.reason not in ("", "None")
        return f"Slurm job {self.number} is {self.state}" + (f" ({self.reason})" if known else "")


def find_job(launcher: BaseLauncher | None) -> BatchJob | None:
    """The job that a launcher has submitted; None for launchers of other kinds, and while Slurm does not answer.

    A job that is being ended is asked for again until it has, for at most 2 s.
    """
    if not isinstance(launcher, SlurmLauncher) or not launcher.job_id:
        return None
    command = ["squeue", "--noheader", "--states=all", "--format=%T|%r", f"--jobs={launcher.job_id}"]
    deadline_s = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            asked = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        state, _, reason = asked.stdout.strip().partition("|")
        if asked.returncode or not state:
            return None
        if state != "COMPLETING" or time.monotonic() > deadline_s:
            return BatchJob(launcher.job_id, state, reason)
        time.sleep(_POLL_S)
