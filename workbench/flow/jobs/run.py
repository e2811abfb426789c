"""One call of a job on one rank: arrays become tensors, the body runs, results become arrays again."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Broadcast, Split
from workbench.errors import JobError
from workbench.flow.config import DeviceLimits
from workbench.flow.jobs import training
from workbench.flow.jobs.context import RunningJob, in_job
from workbench.flow.jobs.micro_batches import MicroBatches
from workbench.flow.jobs.settings import FunctionConfig
from workbench.flow.jobs.store import Store
from workbench.flow.typing import Placeholder
from workbench.tensors import creation
from workbench.tensors.boxing.box import box
from workbench.tensors.global_tensor import GlobalTensor, plain
from workbench.tensors.object_collectives import all_gather_object
from workbench.training import torch_patches  # noqa: F401 - completes GlobalTensor and torch
from workbench.training.batches import of_kind


@dataclass(frozen=True)
class Job:
    """A job function in the form that is sent to ranks.

    Attributes:
        name: of the function.
        body: the function.
        view: ``"consistent"`` or ``"mirrored"``.
        trains: whether it updates variables.
        placeholders: of its arguments, by name.
        config: its settings.
    """

    name: str
    body: Callable[..., Any]
    view: str
    trains: bool
    placeholders: Mapping[str, Placeholder]
    config: FunctionConfig


def ranks_of(job: Job, store: Store, limits: DeviceLimits) -> list[int]:
    """The ranks of a job: those of its own settings, or as many as ``limits`` says."""
    scope = job.config.scope
    if scope is not None:
        return store.devices.ranks(scope.ranges, f"{scope} in the config of {job.name}")
    return store.devices.first(limits.num_devices, limits.num_hosts, f"{job.name} with flow.config.gpu_device_num")


def run(job: Job, arrays: Mapping[str, Any], store: Store, limits: DeviceLimits, on_rank_0: bool = False) -> Any:
    """Run a job. All ranks of the world call it with equal arguments.

    Args:
        job: the job function.
        arrays: the arguments, by name.
        store: this rank's variables.
        limits: the number of devices.
        on_rank_0: return results of the consistent view on rank 0 only; in the mirrored view, return each rank's own
            results (None if it has none).

    Returns:
        The results of the body as arrays: logical ones in the consistent view, lists by device in the mirrored one.
    """
    ranks = ranks_of(job, store, limits)
    running = RunningJob(
        job.name, job.view, job.trains, store, store.devices.placement(ranks), default_dtype=job.config.dtype
    )
    if running.is_mirrored:
        _check_lengths(job, arrays, ranks)
    draws = store.world.context.temporarily(generator=_generator(job, store))
    with draws, in_job(running), torch.set_grad_enabled(job.trains):
        training.clear_gradients(store)
        result = _mirrored(running, job, arrays) if running.is_mirrored else _consistent(running, job, arrays)
    with torch.no_grad():
        if running.is_mirrored:
            if on_rank_0:
                return result
            everywhere = all_gather_object(result, store.world, "the results of the devices")
            return zip_results([everywhere[rank] for rank in ranks])
        return map_tensors(result, lambda value: _logical(value, store, on_rank_0), job.name)


def _generator(job: Job, store: Store) -> torch.Generator:
    """A generator seeded by the job and the step, equal on all ranks."""
    step = store.num_steps.get(job.name, 0)
    return torch.Generator().manual_seed(zlib.crc32(f"{store.seed}/{job.name}/{step}".encode()))


def _consistent(running: RunningJob, job: Job, arrays: Mapping[str, Any]) -> Any:
    arguments = {name: _logical_tensor(array, running.placement) for name, array in arrays.items()}
    result = job.body(**arguments)
    if job.trains:
        training.finish(running, job.config)
    return result


def _logical_tensor(array: np.ndarray, placement: Placement) -> GlobalTensor:
    sbp = Split(0) if array.ndim and placement.num_ranks > 1 else Broadcast()
    return creation.tensor(array, placement=placement, sbp=sbp)


def _mirrored(running: RunningJob, job: Job, arrays: Mapping[str, Any]) -> Any:
    """Run the body on this device's arrays. Other ranks have nothing to do, because the body does not communicate."""
    placement, world = running.placement, running.store.world
    if world.rank not in placement:
        return None
    device = placement.grid.index(world.rank)
    arguments = {name: torch.tensor(array[device], device=world.device) for name, array in arrays.items()}
    result = job.body(**arguments)
    if job.trains:
        training.finish(running, job.config)
    return map_tensors(result, to_array, job.name)


def _check_lengths(job: Job, arrays: Mapping[str, Any], ranks: list[int]) -> None:
    for name, array in arrays.items():
        if len(array) != len(ranks):
            raise ValueError(
                f"{job.name}: the argument {name!r} is a list of {len(array)}, but the job runs on {len(ranks)} "
                f"devices. The mirrored view takes one array per device: cut the batch in {len(ranks)}, or set "
                f"flow.config.gpu_device_num({len(array)})."
            )


def zip_results(results: list[Any]) -> Any:
    """``[(a0, b0), (a1, b1)]`` -> ``([a0, a1], [b0, b1])``, nested as the results are."""
    return tree_map(lambda *values: None if values[0] is None else list(values), *results)


def map_tensors(result: Any, convert: Callable[[torch.Tensor], Any], job: str) -> Any:
    """The results of a body with every tensor converted. Numbers, arrays and None stay.

    Raises:
        JobError: a result of another type, or micro-batches that were not packed.
    """
    if isinstance(result, torch.Tensor):
        return convert(result)
    if isinstance(result, (tuple, list)):
        return of_kind(result, (map_tensors(item, convert, job) for item in result))
    if isinstance(result, dict):
        return {name: map_tensors(item, convert, job) for name, item in result.items()}
    if isinstance(result, MicroBatches):
        raise JobError(f"{job} returns {result!r}. Join them first: flow.pack(x, {len(result)}).")
    if result is None or isinstance(result, (int, float, np.ndarray)):
        return result
    raise JobError(
        f"{job} returns a {type(result).__name__}. A job returns tensors, or tuples, lists and dicts of tensors."
    )


def _logical(value: torch.Tensor, store: Store, on_rank_0: bool) -> np.ndarray | None:
    """The logical value as an array, on rank 0 or on every rank."""
    world = store.world
    if not isinstance(value, GlobalTensor):
        return to_array(value)
    ranks = [0] if on_rank_0 else list(range(world.world_size))
    layout = Layout(store.devices.placement(ranks), (Broadcast(),))
    whole = box(value.detach(), layout)
    return None if whole.is_placeholder else to_array(plain(whole))


def to_array(value: torch.Tensor) -> np.ndarray:
    """A copy of a plain tensor as an array. bfloat16, which numpy lacks, becomes float32."""
    value = value.detach()
    if value.dtype == torch.bfloat16:
        value = value.float()
    array: np.ndarray = value.cpu().numpy().copy()
    return array
