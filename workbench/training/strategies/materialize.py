"""Gives storage and values to models built on ``meta``. Only this rank's shards get storage.

Values come from files, or from the modules' own initialisation on the shards. Its random numbers depend on the logical
position, so they are equal for every strategy and number of ranks. Values that a constructor has computed (rotary
frequencies, masks) are lost on ``meta``, and no file has them. The model computes them again if it has a method for
that; otherwise it is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from workbench.errors import CheckpointError, StrategyError
from workbench.tensors.global_tensor import plain, wrap
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World
from workbench.training.strategies.loading import find_weights, load_safetensors
from workbench.training.strategies.safetensors_file import SafetensorsFiles
from workbench.training.strategies.state import STATE, ParallelState

Init = str | os.PathLike[str] | Callable[[nn.Module], Any] | None
"""Where values come from: the modules' own initialisation (None), a function of a module, files, or ``"empty"``."""


def names_on_meta(module: nn.Module) -> list[str]:
    """Parameters and buffers without storage, or to which an earlier call failed to give values."""
    state: ParallelState | None = module.__dict__.get(STATE)
    failed = state.without_values if state is not None else ()
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [name for name, tensor in tensors if tensor.is_meta or name in failed]


def materialize(module: nn.Module, names: list[str], init: Init, world: World) -> None:
    """Give storage and values to the tensors ``names``, which `shard_parameters` has made from tensors on meta.

    All ranks call it. After an error a second call begins anew.

    Raises:
        StrategyError: some tensors got no value. The message lists all of them.
        CheckpointError: the files do not fit the module.
    """
    tensors = {n: t for n, t in (*module.named_parameters(), *module.named_buffers()) if n in set(names)}
    versions = {name: _allocate(tensor) for name, tensor in tensors.items()}
    from_files = isinstance(init, str | os.PathLike)
    with torch.no_grad():
        if not from_files:
            new = {id(tensor) for tensor in tensors.values()}
            chosen = [(n, m) for n, m in module.named_modules() if callable(init) or _can_initialize(m, new)]
            _initialize(module, chosen, init if callable(init) else None)
        else:
            given = _in_state(module) if init == "empty" else _in_files(module, init)  # type: ignore[arg-type]
            rest = [name for name, tensor in tensors.items() if id(tensor) not in given]
            owners = {name.rpartition(".")[0] for name in rest}
            _initialize(module, [(n, m) for n, m in module.named_modules() if n in owners], None)
            if init != "empty":
                load_safetensors(module, init)  # type: ignore[arg-type]
            tensors = {name: tensors[name] for name in rest}
    unset = [_is_unset(tensor, versions[name]) for name, tensor in tensors.items()]
    every = all_gather_object(unset, world, "values of tensors on meta")
    missing = [name for name, *flags in zip(tensors, *every, strict=True) if any(flags)]
    if missing:
        raise StrategyError(
            f"parallelize: {len(missing)} of {len(names)} tensors on meta got no value: {', '.join(missing[:20])}. "
            "Tensors on meta get values from modules' reset_parameters (transformers: _init_weights) or from files. "
            "Call it again with init=function(module) that fills them in place, or make the module anew, with buffers "
            "that constructors compute on cpu."
        )


def _can_initialize(module: nn.Module, new: set[int]) -> bool:
    """Whether it has some of the new tensors, or none at all: the values of others are a program's own."""
    held = [id(tensor) for tensor in (*module.parameters(), *module.buffers())]
    return not held or not new.isdisjoint(held)


def _in_state(module: nn.Module) -> set[int]:
    return {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}


def _in_files(module: nn.Module, path: str | os.PathLike[str]) -> set[int]:
    try:
        with SafetensorsFiles(path) as files:
            return {id(tensor) for _, tensor in find_weights(module, files)}
    except (CheckpointError, OSError):
        return _in_state(module)  # load_safetensors will say it, on all ranks


def _initialize(root: nn.Module, chosen: list[tuple[str, nn.Module]], init: Callable[[nn.Module], Any] | None) -> None:
    """Run the initialisation of modules, children before parents, as ``nn.Module.apply`` does."""
    modules = dict(root.named_modules())
    for name, module in sorted(chosen, key=lambda item: -len(item[0].split(".") if item[0] else [])):
        if init is not None:
            init(module)
            continue
        of_transformers = _nearest_with(modules, name, "_init_weights")
        if of_transformers is not None:
            of_transformers(module)
            continue
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if reset is not None:
            reset()


def _nearest_with(modules: dict[str, nn.Module], name: str, method: str) -> Any:
    """The method of a module, or of the nearest module around it that has such a method."""
    while True:
        if hasattr(modules[name], method):
            return getattr(modules[name], method)
        if not name:
            return None
        name = name.rpartition(".")[0]


def _allocate(tensor: Any) -> int:
    """Allocate this rank's shard, filled with values that no initialisation writes. Returns its version."""
    if tensor.is_placeholder:
        return 0
    spec, local = tensor._spec, plain(tensor)
    if local.untyped_storage().nbytes() < local.nbytes:  # else ZeRO has cut its shard out of nothing
        local = torch.empty(spec.local_shape, dtype=tensor.dtype, device=spec.world.device)
    if local.is_floating_point() or local.is_complex():
        local.fill_(float("nan"))
    tensor._take_data(wrap(local, spec))
    return plain(tensor)._version


def _is_unset(tensor: Any, version: int) -> bool:
    local = plain(tensor)
    if tensor.is_placeholder or not local.numel():
        return False
    if local.is_floating_point() or local.is_complex():
        return bool(local.sum().isnan())
    return local._version == version
