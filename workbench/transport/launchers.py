"""Environment variables of launchers: torchrun's, and those of Open MPI's ``mpirun``."""

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
"""Open MPI's folder for a job on this host, private to this user and removed at the end of the job."""


def launcher_value(what: str, default: int) -> int:
    """The launcher's ``"rank"``, ``"world_size"``, ``"local_rank"`` or ``"local_world_size"``; else ``default``."""
    return next((int(os.environ[name]) for name in _NAMES[what] if name in os.environ), default)


def default_init_method() -> str:
    """The init method of a launcher: ``env://``, or under ``mpirun`` on one host a file in the job's folder.

    Raises:
        WorldError: ``mpirun`` has started ranks on several hosts without an address for their rendezvous.
    """
    if "MASTER_ADDR" in os.environ or "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return "env://"
    here, everywhere = launcher_value("local_world_size", 0), launcher_value("world_size", 1)
    folder = os.environ.get(_MPI_FOLDER)
    if here == everywhere and folder is not None and Path(folder).is_dir():
        return (Path(folder) / "workbench-rendezvous").as_uri()
    raise WorldError(
        f"init(): mpirun has started {everywhere} ranks, {here} of them on this host, without an address for their "
        f"rendezvous. Name rank 0's host and a port that is free there: "
        f"mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ..."
    )
