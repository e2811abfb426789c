"""Environment variables of launchers: torchrun's, and those of Open MPI's ``mpirun``, of Slurm's ``srun``, and of the
``mpiexec`` of MPICH and Intel MPI.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from workbench.errors import WorldError

_NAMES = {
    "rank": ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"),
    "world_size": ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "PMI_SIZE"),
    "local_rank": ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID"),
    "local_world_size": ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
_MPI_FOLDER = "PMIX_SERVER_TMPDIR"
"""Open MPI's folder for a job on this host, private to this user and removed at the end of the job."""
_SLURM_SIZES = "SLURM_STEP_TASKS_PER_NODE"
"""Ranks of each host of a step, such as ``2(x3),1``; Slurm has no variable for this host alone."""


def launcher_value(what: str, default: int) -> int:
    """The launcher's ``"rank"``, ``"world_size"``, ``"local_rank"`` or ``"local_world_size"``; else ``default``.

    Raises:
        WorldError: the variable of the environment is no whole number.
    """
    for name in _NAMES[what]:
        if name in os.environ:
            try:
                return int(os.environ[name])
            except ValueError:
                raise WorldError(
                    f"init(): the environment variable {name} is {os.environ[name]!r}, and a launcher sets it to a "
                    f"whole number. Start the program with torchrun, or set {name} to the number of this "
                    "process, or unset it."
                ) from None
    if what == "local_world_size" and _SLURM_SIZES in os.environ:
        return _sizes(os.environ[_SLURM_SIZES])[int(os.environ["SLURM_NODEID"])]
    return default


def default_init_method() -> str:
    """The init method of a launcher: ``env://``, or under ``mpirun`` on one host a file in the job's folder.

    Raises:
        WorldError: ``mpirun`` has started ranks on several hosts, or ``srun`` ranks, without an address for their
            rendezvous.
    """
    if "MASTER_ADDR" in os.environ:
        return "env://"
    here, everywhere = launcher_value("local_world_size", 0), launcher_value("world_size", 1)
    started = f"has started {everywhere} ranks, {here} of them on this host, without an address for their rendezvous."
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        folder = os.environ.get(_MPI_FOLDER)
        if here == everywhere and folder is not None and Path(folder).is_dir():
            return f"file://{folder}/workbench-rendezvous"  # torch decodes no %20
        raise WorldError(
            f"init(): mpirun {started} Name rank 0's host and a port that is free there: "
            f"mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."
        )
    if "SLURM_STEP_NUM_TASKS" in os.environ and "WORLD_SIZE" not in os.environ:
        raise WorldError(
            f"init(): srun {started} Name rank 0's host and a port that is free there, above srun: "
            f'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500'
        )
    return "env://"


def _sizes(text: str) -> list[int]:
    """
    >>> _sizes("2(x3),1")
    [2, 2, 2, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(size) for size, times in found for _ in range(int(times or 1))]
