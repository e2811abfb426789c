"""Variables, optimizers and steps of one rank in the project's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.errors import CheckpointError
from workbench.flow.jobs.store import PART, Store, Variables
from workbench.flow.jobs.training import optimizer_part
from workbench.tensors.object_collectives import run_on_all_ranks
from workbench.training.saving import reading
from workbench.training.saving.store import load as load_parts
from workbench.training.saving.store import save as save_parts

_STEPS = "steps"


def init(store: Store) -> None:
    """Drop variables, optimizers and steps: the next job makes them anew."""
    store.variables, store.optimizers, store.num_steps, store.to_load = Variables(), {}, {}, None


def save(store: Store, path: str) -> None:
    """Write everything. All ranks call it.

    Raises:
        CheckpointError: there are no variables yet, or a rank cannot write.
    """

    def check() -> None:  # a rank without jobs may have none
        if not store.variables.by_name and store.world.rank == store.devices.by_host[0][0]:
            raise CheckpointError(
                f"CheckPoint.save({path!r}): there are 0 variables, for no job has run yet. Variables are made by the "
                "first call that uses them: save after it."
            )

    run_on_all_ranks(check, store.world, f"CheckPoint.save({path!r})")
    parts: dict[str, Any] = {optimizer_part(job): optimizer for job, optimizer in store.optimizers.items()}
    save_parts(path, **parts | {PART: store.variables, _STEPS: store.num_steps})


def load(store: Store, path: str, strict: bool = True) -> None:
    """Read the variables that exist. Later variables are read when a job makes them. All ranks call it.

    ``strict``: refuse variables that the checkpoint does not have. Otherwise they keep their values, or get their
    initial ones.

    Raises:
        CheckpointError: no checkpoint, or one of another model.
    """
    world, what = store.world, f"CheckPoint.load({path!r})"
    folder = run_on_all_ranks(lambda: reading.find(Path(path)), world, what)
    checkpoint = run_on_all_ranks(lambda: reading.Checkpoint(folder), world, what)
    run_on_all_ranks(lambda: _check(store, checkpoint, strict), world, what)
    if store.variables.by_name:
        load_parts(path, strict=False, random_state=False, **{PART: store.variables})
    store.optimizers, store.to_load, store.is_strict = {}, checkpoint, strict
    store.num_steps = dict(checkpoint.value(_STEPS) or {})


def _check(store: Store, checkpoint: reading.Checkpoint, strict: bool) -> None:
    saved = {str(path[0]): tuple(entry.size) for path, entry in checkpoint.below(PART).items()}
    if not saved:
        raise CheckpointError(
            f"CheckPoint.load({str(checkpoint.folder)!r}): it holds {', '.join(sorted(checkpoint.kinds))} and no "
            "variables of job functions. Load a folder that CheckPoint.save has written."
        )
    ours = {name: tuple(variable.shape) for name, variable in store.variables.by_name.items()}
    problems = [f"{name} is not in the checkpoint" for name in ours if strict and name not in saved]
    problems += [
        f"{name} has shape {saved[name]} in the checkpoint, {shape} here"
        for name, shape in ours.items()
        if saved.get(name, shape) != shape
    ]
    if problems:
        raise CheckpointError(
            f"CheckPoint.load({str(checkpoint.folder)!r}): the checkpoint is of another model: {'; '.join(problems)}. "
            f"It has {', '.join(sorted(saved))}. Nothing was loaded. Load the checkpoint of this model, or begin anew "
            "with check_point.init() before."
        )
