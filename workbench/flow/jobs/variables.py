"""``flow.get_variable``: the variables of jobs, by name. They stay on the devices between calls; jobs share them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workbench.core.sbp import Broadcast, Sbp, Split
from workbench.errors import JobError, SbpError
from workbench.flow.initializers import Initializer, zeros_initializer
from workbench.flow.jobs.context import RunningJob, running_job
from workbench.flow.jobs.store import store_of
from workbench.flow.world_join import launched_world
from workbench.tensors.boxing.box import box
from workbench.tensors.global_tensor import GlobalTensor, plain


def get_variable(
    name: str,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    initializer: Initializer | None = None,
    *,
    trainable: bool = True,
    distribute: Sbp | None = None,
    reuse: bool = True,
) -> torch.Tensor:
    """The variable of this name. The first job that calls it makes the variable; others get the same one.

    Args:
        name: of the variable.
        shape: logical sizes.
        dtype: default: the job's ``default_data_type``.
        initializer: default: zeros. Values depend on the name and the position, not on the layout.
        trainable: whether this job updates it, if it trains.
        distribute: ``flow.distribute.split(axis)`` splits it over the devices of the scope; default: whole on each.
        reuse: False refuses a variable that exists.

    Raises:
        JobError: outside of a job; no shape; the variable has another shape or dtype; in the mirrored view, a device
            does not have all of it.
        SbpError: an axis that the variable does not have, or a split variable in the mirrored view.

    ``w = flow.get_variable("w", (10, 512), initializer=flow.truncated_normal(0.1))``
    """
    job = running_job(f"get_variable({name!r})")
    if shape is None:
        raise JobError(f"get_variable({name!r}): it has no shape. Give the logical sizes, e.g. shape=(10, 512).")
    if initializer is not None and not isinstance(initializer, Initializer):
        raise TypeError(
            f"get_variable({name!r}, initializer={initializer!r}): an initializer is made by a function of flow, e.g. "
            "flow.truncated_normal(0.1)."
        )
    if not reuse and name in job.store.variables.by_name:
        raise JobError(f"get_variable({name!r}, reuse=False): it exists already. Take another name.")
    sizes = tuple(int(size) for size in shape)
    sbp = _checked(distribute, name, sizes, job)
    variable = job.store.variable(
        name, sizes, dtype or job.default_dtype, initializer or zeros_initializer(), trainable, job.layout(sbp)
    )
    job.used[name] = variable
    if job.is_mirrored:
        return _replica(job, name)
    return box(variable, job.layout(sbp).normalized(sizes))


def get_all_variables() -> dict[str, GlobalTensor]:
    """The variables of all jobs by name, on this rank; for example in a cell under ``%%global``.

    Raises:
        JobError: in a process that drives engines, which has no variables.
    """
    world = launched_world()
    if world is None:
        raise JobError(
            "get_all_variables(): this process drives engines, and variables lie there. Call it in a job, or on the "
            "engines: a cell under %%global."
        )
    return dict(store_of(world).variables.by_name)


def _checked(distribute: Any, name: str, shape: tuple[int, ...], job: RunningJob) -> Sbp:
    if distribute is None or isinstance(distribute, Broadcast):
        return Broadcast()
    where = f"get_variable({name!r}, distribute={distribute})"
    if not isinstance(distribute, Split):
        raise SbpError(f"{where}: write flow.distribute.split(axis), broadcast() or auto().")
    if job.is_mirrored:
        raise SbpError(
            f"{where} in {job.name}, a job in the mirrored view: there every device has all variables whole. Take the "
            "consistent view, or leave the split out."
        )
    if not -len(shape) <= distribute.dim < len(shape):
        raise SbpError(
            f"{where}: split(axis={distribute.dim}) of a variable of shape {shape}, which has {len(shape)} dims. The "
            f"axis is one of {', '.join(map(str, range(len(shape))))}."
        )
    return Split(distribute.dim % len(shape))


def _replica(job: RunningJob, name: str) -> torch.Tensor:
    """This device's own leaf for the variable. Its gradient becomes one term of the variable's.

    Raises:
        JobError: a device of the job does not have the whole variable, or another one has it too and does not train.
    """
    replica = job.replicas.get(name)
    if replica is None:
        variable = job.used[name]
        lies, trains = variable._spec.layout, variable.requires_grad and job.trains
        fits = lies.placement.has_ranks_of if trains else lies.placement.includes
        if not lies.is_broadcast or not fits(job.placement):
            raise JobError(
                f"get_variable({name!r}) in {job.name}, a job in the mirrored view on devices {job.placement.ranks}: "
                f"it lies as {lies}, and there every device has it whole. Run the jobs that share it on the same "
                "devices, without distribute, or take the consistent view."
            )
        replica = job.replicas[name] = plain(variable).requires_grad_(trains)
    return replica
