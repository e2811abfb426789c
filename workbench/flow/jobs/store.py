"""The state that a rank keeps between calls of jobs: variables by name, optimizers, and a checkpoint that is still to
be read.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from workbench.core.layout import Layout
from workbench.errors import CheckpointError, JobError
from workbench.flow.hosts import Devices
from workbench.flow.initializers import Initializer
from workbench.tensors import creation, random
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World
from workbench.training.saving.reading import Checkpoint, shape_of

PART = "variables"
"""The name of the variables in a checkpoint."""


class Variables(nn.Module):
    """Variables by name, as a module for checkpoints. Any text is a name."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, GlobalTensor] = {}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return dict(self.by_name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return iter(self.by_name.items())


@dataclass(eq=False)
class Store:
    """The store of one rank.

    Attributes:
        world: the ranks.
        devices: the ranks by host.
        variables: by name. A variable has one layout, whichever job made it.
        optimizers: by job; ``rules`` has the settings that made them.
        num_steps: finished training steps, by job.
        to_load: a checkpoint for variables that do not exist yet; they are read when they are made.
        is_strict: whether it must have all of them.
        serial: unique for each store; it shows that a rank has lost its variables.
        seed: of the initial values.
    """

    world: World
    devices: Devices
    variables: Variables = field(default_factory=Variables)
    optimizers: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)
    num_steps: dict[str, int] = field(default_factory=dict)
    to_load: Checkpoint | None = None
    is_strict: bool = True
    serial: str = field(default_factory=lambda: uuid.uuid4().hex)
    seed: int = 0

    def variable(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        initializer: Initializer,
        trainable: bool,
        layout: Layout,
    ) -> GlobalTensor:
        """The variable of this name; it is made if it does not exist.

        Raises:
            JobError: it exists with another shape or dtype.
            CheckpointError: the loaded checkpoint has no variable of this name and shape.
        """
        found = self.variables.by_name.get(name)
        if found is None:
            found = self._make(name, shape, dtype, initializer, layout)
            found._is_param = True  # operations follow its layout: they slice it, and never gather or move it
            self.variables.by_name[name] = found
        elif (tuple(found.shape), found.dtype) != (shape, dtype):
            raise JobError(
                f"get_variable({name!r}): shape {shape} and {dtype} are asked for, but the variable has "
                f"{tuple(found.shape)} and {found.dtype}. One name is one variable in all jobs: take another name, or "
                "begin anew with check_point.init()."
            )
        found.requires_grad_(trainable and dtype.is_floating_point)  # each job says whether it trains it
        return found

    def _make(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, initializer: Initializer, layout: Layout
    ) -> GlobalTensor:
        key = int.from_bytes(hashlib.sha256(f"{self.seed}/{name}".encode()).digest()[:8], "little") >> 1
        placed: Any = {"placement": layout.placement, "sbp": layout.sbp}
        if self.to_load is not None and (self.is_strict or (name,) in self.to_load.below(PART)):
            variable = creation.zeros(shape, dtype=dtype, **placed)
            _read(self.to_load, name, variable)
        elif isinstance(initializer.sampler, float):
            variable = creation.full(shape, initializer.sampler, dtype=dtype, **placed)
        else:
            sampler = initializer.sampler(shape)

            def fill(where: Layout, world: World) -> torch.Tensor:
                return random.sample_shard(sampler, key, where, shape, dtype, world)

            variable = creation.create(shape, dtype, layout.placement, layout.sbp, fill)
        return variable


def _read(checkpoint: Checkpoint, name: str, variable: GlobalTensor) -> None:
    entry = checkpoint.below(PART).get((name,))
    if entry is None:
        known = ", ".join(sorted(str(path[0]) for path in checkpoint.below(PART)))
        raise CheckpointError(
            f"get_variable({name!r}): the checkpoint {checkpoint.folder} was loaded, which has no variable of this "
            f"name. It has {known}. Load the checkpoint of this model, call check_point.load(path, strict=False), "
            "which gives new variables their initial values, or begin anew with check_point.init()."
        )
    if tuple(entry.size) != shape_of(variable):
        raise CheckpointError(
            f"get_variable({name!r}): shape {shape_of(variable)} is asked for, but the checkpoint {checkpoint.folder} "
            f"has {tuple(entry.size)}. Load the checkpoint of this model, or begin anew with check_point.init()."
        )
    target = ((PART, name), variable)
    checkpoint.check([target])
    checkpoint.read(*target)


_stores: WeakKeyDictionary[World, Store] = WeakKeyDictionary()


def known_store(world: World) -> Store | None:
    """This rank's store in a world of so many ranks, if it has one; no communication."""
    store = _stores.get(world)
    return store if store is not None and sum(map(len, store.devices.by_host)) == world.world_size else None


def store_of(world: World) -> Store:
    """This rank's store in a world, made by the first call; all ranks call it together."""
    store = known_store(world)
    if store is None:
        store = _stores[world] = Store(world, Devices.of_world(world))
    return store


def common_store(world: World) -> Store:
    """``store_of`` after a rank's process may have been replaced, or a resize: all ranks then begin with new stores."""
    if not all(all_gather_object(known_store(world) is not None, world, "which ranks have variables")):
        _stores.pop(world, None)
    return store_of(world)
