"""Which runs may be compared: what each has trained, and on which machine."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from workbench.core.metrics import RunRecord

_TASK = {
    "model": "model",
    "model_checksum": "checksum of the layers",
    "num_parameters": "number of parameters",
    "optimizer": "optimizer",
    "optimizer_options": "options of the optimizer",
    "loss": "loss",
    "sample_shape": "shape of a sample",
    "num_samples": "number of samples",
    "first_samples": "checksum of some samples",
    "shuffle": "shuffle",
    "drop_last": "drop_last",
    "count": "count of terms",
}
"""The settings that say what a run trains, in words."""


def task_of(run: RunRecord) -> tuple[Hashable, ...]:
    """What a run trains, but for the seed: model, optimizer, loss, samples, their order and batch size."""
    return *(run.settings.get(name) for name in _TASK), run.batch_size


def machine_of(run: RunRecord) -> tuple[Hashable, ...]:
    """Where a run was trained: the machine, and the kind of device."""
    return run.settings.get("machine"), run.settings.get("device")


def place_of(run: RunRecord) -> tuple[Hashable, ...]:
    """``machine_of`` and the threads of an engine: what the speed of one device depends on."""
    return *machine_of(run), run.settings.get("threads")


def one_device_of(run: RunRecord, truths: Iterable[RunRecord]) -> RunRecord | None:
    """The first of some one-device runs that trained what a run trains, with all its seeds; None without one."""
    seeds = _seeds(run)
    return next((truth for truth in truths if task_of(truth) == task_of(run) and seeds <= _seeds(truth)), None)


def timed_beside(run: RunRecord, truths: Iterable[RunRecord]) -> RunRecord | None:
    """``one_device_of`` on the machine, device and threads of the run: its speed may be compared with the run's."""
    return one_device_of(run, [truth for truth in truths if place_of(truth) == place_of(run)])


def _seeds(run: RunRecord) -> set[Hashable]:
    return set(run.settings.get("seeds") or [run.settings.get("seed")])


def other_task(run: RunRecord, num_ranks: int, settings: Mapping[str, Any]) -> str:
    """How a run differs from those on ``num_ranks`` ranks with these settings: ``"its model is gpt, here it is mlp"``.

    Empty if it does not. Settings that only one of both has are not compared.
    """
    words = {**_TASK, "batch_size": "batch size", "ranks": "number of ranks"}
    its = {**run.settings, "batch_size": run.batch_size, "ranks": run.num_ranks}
    own = {**settings, "ranks": num_ranks}
    other = [name for name in words if name in its and name in own and its[name] != own[name]]
    return "; ".join(f"its {words[name]} is {_text(its[name])}, here it is {_text(own[name])}" for name in other)


def _text(value: object) -> str:
    """A setting on one line; a description of an optimizer may have several."""
    return " ".join(str(value).split())
