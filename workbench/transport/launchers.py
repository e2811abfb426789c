"""What a launcher tells each of its processes: torchrun in the usual variables, Open MPI's ``mpirun`` in its own."""

from __future__ import annotations

import os
from pathlib import Path

from workbench.errors import WorldError

_NAMES = {
    "rank": ("RANK", "OMPI_COMM_WORLD_RANK"),
    "world_size": ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
    "local_rank": ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "local_world_size": ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
}
_MPI_FOLDER = "PMIX_SERVER_TMPDIR"
"""Open MPI's own folder for a job on this host, of this user alone, removed at the end of the job."""


def told(what: str, default: int) -> int:
    """``"rank"``, ``"world_size"``, ``"local_rank"`` or ``"local_world_size"``, where a launcher has set it."""
    return next((int(os.environ[name]) for name in _NAMES[what] if name in os.environ), default)


def meeting_place() -> str:
    """Where the ranks meet: what torchrun says, or under ``mpirun`` on one host a file in the job's own folder.

    Raises:
        WorldError: ``mpirun`` has started ranks on several hosts, and nothing says where they meet.
    """
    if "MASTER_ADDR" in os.environ or "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return "env://"
    here, everywhere = told("local_world_size", 0), told("world_size", 1)
    folder = os.environ.get(_MPI_FOLDER)
    if here == everywhere and folder is not None and Path(folder).is_dir():
        return (Path(folder) / "workbench-meeting").as_uri()
    raise WorldError(
        f"init(): mpirun has started {everywhere} ranks, {here} of them on this host, and nothing says where they "
        f"meet. Name rank 0's host and a port that is free there: "
        f"mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."
    )
