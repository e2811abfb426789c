"""The functions that `driver` runs on every engine. They load no module of the notebook's side."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.errors import JobError
from workbench.flow.config import DeviceLimits
from workbench.flow.jobs import checkpoints
from workbench.flow.jobs.run import Job, ranks_of, run
from workbench.flow.jobs.store import common_store, known_store, store_of
from workbench.session import user_modules
from workbench.session.on_engine import failures as engine_failures
from workbench.tensors.world import current

_jobs: dict[str, Job] = {}


@dataclass(frozen=True)
class Reply:
    """The reply of one rank.

    Attributes:
        result: in the consistent view on rank 0 only, in the mirrored view of each device.
        ranks: the ranks of the job, in the order of the devices.
        serial: of the rank's store.
    """

    result: Any
    ranks: tuple[int, ...]
    serial: str


def keep_job(name: str, payload: bytes, sources: Mapping[str, tuple[str, list[str]]]) -> None:
    """Keep a job under its name. ``sources`` are the texts of its files with their titles, by file name."""
    for filename, (title, lines) in sources.items():
        engine_failures.user_files[filename] = title
        linecache.cache[filename] = (sum(map(len, lines)), None, lines, filename)
    _jobs[name], _ = user_modules.unpack(payload)


def run_job(name: str, arrays: Mapping[str, Any], limits: DeviceLimits, serials: tuple[str, ...] | None) -> Reply:
    """Run a job that was kept.

    Raises:
        JobError: this rank lacks the variables of earlier calls, because its process was replaced, or the number of
            ranks was changed.
    """
    world = current()
    known, job = known_store(world), _jobs.get(name)
    if job is None or (serials is not None and (known is None or serials[world.rank] != known.serial)):
        raise JobError(
            f"{name}: the process of rank {world.rank} is another one than in the calls before, or the number of ranks "
            f"({world.world_size}) is, and its variables are lost. All ranks have equal variables: begin anew with "
            "check_point.init(), or load a checkpoint with check_point.load(path), and call the job again."
        )
    store = store_of(world)
    result = run(job, arrays, store, limits, on_rank_0=True)
    return Reply(result, tuple(ranks_of(job, store, limits)), store.serial)


def change_variables(action: str, *options: Any) -> str:
    """Call ``init``, ``save`` or ``load`` of `checkpoints`; returns the serial of this rank's store."""
    store = common_store(current())
    getattr(checkpoints, action)(store, *options)
    return store.serial
