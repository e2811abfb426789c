"""An optimizer's state by names of parameters, in the form of torch's ``get_optimizer_state_dict``, and back.

    {"state": {"fc1.weight": {"step": ..., "exp_avg": ...}, ...},
     "param_groups": [{"params": ["fc1.weight", ...], "lr": ...}]}

``"class"`` has the name of its class. Optimizers within the optimizer (a chain, warm-up, lookahead) have the same form
in the list ``"within"``. What one keeps beside the state of its parameters is in ``"own"``: the other keys of
``state``, and the entries that its class adds to ``state_dict``.

Per-element state becomes global tensors in the layout of ``optim.state_layout``, and is split like weights. Optimizers
that are not elementwise already have global tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from workbench.errors import CheckpointError
from workbench.tensors.global_tensor import GlobalTensor, local_torch, new_placeholder, plain, wrap
from workbench.training.gradients.block_state import refuse_block_state
from workbench.training.gradients.nested_steps import distinct, optimizers_within, state_tensors
from workbench.training.gradients.optim import forget_layouts
from workbench.training.gradients.optimizer_kinds import is_elementwise, keeps_parts
from workbench.training.gradients.shard import spec_like, state_spec
from workbench.training.saving.flat import Path, unflatten
from workbench.training.saving.reading import Checkpoint, shape_of

OWN = "own"
Names = Mapping[int, str]
"""Names of parameters by the id of the parameter."""


def _places(optimizer: Optimizer, part: str) -> list[tuple[Path, Optimizer]]:
    """The distinct ones with their places in a checkpoint."""
    return [((part, "within", i - 1) if i else (part,), each) for i, each in enumerate(distinct(optimizer))]


def state_of(optimizer: Optimizer, names: Names, part: str) -> dict[str, Any]:
    """The nested state to save; ``part`` is the optimizer's name in messages."""
    first, *within = [_state_of(each, names, part) for each in distinct(optimizer)]
    return {**first, "within": within} if within else first


def _state_of(optimizer: Optimizer, names: Names, part: str) -> dict[str, Any]:
    refuse_block_state(optimizer, part, CheckpointError)
    is_part, state = keeps_parts(optimizer), dict[str, Any]()
    for parameter in _with_state(optimizer):
        if values := optimizer.state.get(parameter):
            name = _name(parameter, names, part)
            state[name] = {k: _wrapped(parameter, k, value, name) if is_part else value for k, value in values.items()}
    groups = [
        {**group, "params": [_name(parameter, names, part) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    own = _own_state(optimizer, part)
    saved = {"class": type(optimizer).__qualname__, "state": state, "param_groups": groups}
    return {**saved, OWN: own} if any(own) else saved


def _own_state(optimizer: Optimizer, part: str) -> tuple[dict[Any, Any], dict[str, Any]]:
    """(state by keys that are no parameters, entries of ``state_dict`` beside torch's two). Entries with the state of
    parameters are left out: that of optimizers within is saved by itself.
    """
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    entries: dict[str, Any] = {}
    if type(optimizer).state_dict is not Optimizer.state_dict or optimizer._optimizer_state_dict_post_hooks:
        held = {id(tensor) for tensor in state_tensors(optimizer)}
        entries = {
            key: value
            for key, value in optimizer.state_dict().items()
            if key not in ("state", "param_groups") and not any(id(leaf) in held for leaf in _tensors_of(value))
        }
    for key, value in (others | entries).items():
        if any(isinstance(leaf, GlobalTensor) for leaf in _tensors_of(value)):
            raise CheckpointError(
                f"{part}: {type(optimizer).__name__} keeps global tensors under {key!r}, beside the state of its "
                "parameters. Slices are saved of the state of a parameter only: keep them in state[parameter]."
            )
    return others, entries


def _tensors_of(value: Any) -> list[torch.Tensor]:
    inside = [*value.values()] if isinstance(value, Mapping) else [value]  # of a defaultdict, and by any keys
    return [leaf for leaf in tree_leaves(inside) if isinstance(leaf, torch.Tensor)]


def _name(parameter: torch.Tensor, names: Names, part: str) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"{part}: one of its parameters, of shape {shape_of(parameter)}, is in none of the modules that are saved "
            "or loaded with it. State is kept by the names of parameters: give the module too, e.g. model=model."
        )
    return names[id(parameter)]


def _wrapped(parameter: torch.Tensor, key: str, value: Any, name: str) -> Any:
    """A state value as a global tensor if it has one value per element of the parameter; other values unchanged.
    Lists and dictionaries are looked through.
    """
    if type(value) is list:
        return [_wrapped(parameter, key, inner, name) for inner in value]
    if type(value) is dict:
        return {inner: _wrapped(parameter, key, part, name) for inner, part in value.items()}
    if not isinstance(value, torch.Tensor) or isinstance(value, GlobalTensor):
        return value
    if not isinstance(parameter, GlobalTensor) or value.dim() == 0:
        return value
    spec = state_spec(parameter)
    if tuple(value.shape) == spec.local_shape:
        return wrap(plain(value), spec)
    if spec.layout.is_broadcast:
        return value
    raise CheckpointError(
        f"optimizer state {key!r} of {name} has shape {tuple(value.shape)} on this rank, which has {spec.local_shape} "
        f"of the parameter {tuple(spec.shape)}. State that is neither per element nor a scalar cannot be split again. "
        "Save under a strategy that keeps this parameter whole, or leave the optimizer out."
    )


def saved_names(optimizer: Optimizer, part: str, checkpoint: Checkpoint) -> set[str]:
    """The names of parameters in the groups that a checkpoint has of the optimizer and of those within it."""
    groups = [checkpoint.value(*place, "param_groups") or [] for place, _ in _places(optimizer, part)]
    return {name for group in chain(*groups) for name in group["params"]}


def problems(optimizer: Optimizer, names: Names, part: str, checkpoint: Checkpoint, strict: bool = True) -> list[str]:
    """The mismatches, one line each. Parameters that the checkpoint lacks, or has beside, and another class are some
    only if strict.
    """
    places, saved = _places(optimizer, part), {rest[0] for rest in checkpoint.below(part, "within")}
    if len(saved) != len(places) - 1:
        return [
            f"{part}: {len(saved)} optimizers within it in {checkpoint.title}, {len(places) - 1} in the optimizer: "
            + ", ".join(type(each).__name__ for _, each in places[1:])
        ]
    return [problem for place, each in places for problem in _problems(each, names, part, place, checkpoint, strict)]


def _problems(
    optimizer: Optimizer, names: Names, part: str, place: Path, checkpoint: Checkpoint, strict: bool
) -> list[str]:
    groups, where, found = _saved_groups(optimizer, names, part, place, checkpoint), checkpoint.title, list[str]()
    part = part if len(place) == 1 else f"{part}, its {type(optimizer).__name__}"
    saved_class, own_class = checkpoint.value(*place, "class"), type(optimizer).__qualname__
    if strict and saved_class not in (None, own_class):  # older files, and torch's, have none
        found.append(f"{part}: {saved_class} in {where}, {own_class} in the optimizer")
    is_flat = not groups and bool(optimizer.param_groups)
    if is_flat or any(type(name) is int for group in groups for name in group["params"]):
        found.append(
            f"{part}: {where} has {'no groups' if is_flat else 'numbers'} in place of names of parameters in groups. "
            "Save what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer) gives, not "
            f"{'its flat form' if is_flat else 'optimizer.state_dict()'}, or load without the optimizer"
        )
        return found
    if len(groups) != len(optimizer.param_groups):
        text = f"{part}: {len(groups)} parameter groups in {where}, {len(optimizer.param_groups)} in the optimizer"
        return [*found, text]
    for index, (ours, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        have, want = {_name(parameter, names, part) for parameter in ours["params"]}, set(saved["params"])
        for text, some in ((f"missing in {where}", have - want), ("unexpected", want - have)):
            if some and strict:
                found.append(f"{part}, group {index}: {len(some)} {text}: {', '.join(sorted(some))}")
    return found


def _saved_groups(optimizer: Optimizer, names: Names, part: str, place: Path, checkpoint: Checkpoint) -> list[Any]:
    """The parameter groups in a checkpoint; in the optimizer's order where it has the same ones in another order."""
    groups = checkpoint.value(*place, "param_groups") or []
    saved = {frozenset(group["params"]): group for group in groups}
    own = [frozenset(_name(p, names, part) for p in group["params"]) for group in optimizer.param_groups]
    is_same = saved.keys() == set(own) and len(saved) == len(own) == len(groups)
    return [saved[each] for each in own] if is_same else groups


def targets(
    optimizer: Optimizer, names: Names, part: str, checkpoint: Checkpoint
) -> Iterator[tuple[Any, torch.Tensor]]:
    """(path, new tensor to fill) for all tensors of the state; ``assign`` moves them into the optimizer."""
    for place, each in _places(optimizer, part):
        groups = zip(each.param_groups, _saved_groups(each, names, part, place, checkpoint), strict=True)
        options = {id(p): {**ours, **saved} for ours, saved in groups for p in ours["params"]}
        for parameter in _with_state(each):
            name = _name(parameter, names, part)
            path, saved = (*place, "state", name), _saved_dtype(name, checkpoint)
            for rest, entry in checkpoint.below(*path).items():
                if checkpoint.is_tensor((*path, *rest)):
                    yield (*path, *rest), _new_state(parameter, options[id(parameter)], str(rest[0]), entry, saved)


def _saved_dtype(name: str, checkpoint: Checkpoint) -> torch.dtype | None:
    """The dtype that a parameter had; None if its module is not in the checkpoint."""
    for part in checkpoint.kinds:
        for path in ((part, name), (part, name.removeprefix(f"{part}."))):
            if path in checkpoint.entries and checkpoint.is_tensor(path):
                dtype: torch.dtype = checkpoint.entries[path].properties.dtype
                return dtype
    return None


def _with_state(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Parameters with state on this rank; those of placeholders only if the step itself runs on placeholders: else what
    an optimizer makes for them when it is made stays as it was.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            is_placeholder = isinstance(parameter, GlobalTensor) and parameter._spec.is_placeholder
            if not (is_placeholder and is_elementwise(optimizer)):
                yield parameter


def _new_state(
    parameter: torch.Tensor, options: Mapping[str, Any], key: str, entry: Any, saved: torch.dtype | None
) -> torch.Tensor:
    """An empty tensor for one state value, on torch's device for it: steps on the CPU, unless kernels read them.

    State of the dtype ``saved``, which the parameter had, takes the dtype that it has now. Other state keeps its own.
    """
    with local_torch():
        device = parameter.device
    dtype, shape = entry.properties.dtype, tuple(entry.size)
    if key == "step":
        is_read = options.get("capturable") or options.get("fused")
        device, dtype = (device, torch.float32) if is_read else (torch.device("cpu"), dtype)
    elif saved in (dtype, None) and dtype.is_floating_point and parameter.is_floating_point():
        dtype = parameter.dtype
    if not isinstance(parameter, GlobalTensor) or not shape:
        return torch.empty(shape, dtype=dtype, device=device)
    spec = spec_like(state_spec(parameter), shape)
    if spec.is_placeholder:
        return wrap(new_placeholder(shape, dtype, spec.world.device), spec)
    return wrap(torch.empty(spec.local_shape, dtype=dtype, device=device), spec)


def assign(
    optimizer: Optimizer, names: Names, part: str, checkpoint: Checkpoint, filled: Mapping[Any, torch.Tensor]
) -> None:
    """Set hyperparameters, and state whose tensors have been filled."""
    places = _places(optimizer, part)
    _load_own(optimizer, places, checkpoint)
    for place, each in places:  # before any is filled: some may share it
        saved = {name for group in checkpoint.value(*place, "param_groups") for name in group["params"]}
        for key in list(each.state):
            if (name := names.get(id(key))) is None or name in saved:
                del each.state[key]
    for place, each in places:
        _assign(each, names, part, place, checkpoint, filled)


def _load_own(optimizer: Optimizer, places: list[tuple[Path, Optimizer]], checkpoint: Checkpoint) -> None:
    """Give each class the entries that it has added to ``state_dict``. The state of parameters and the groups, which
    optimizers may share, stay the same objects.
    """
    kept = [
        (vars(each), {key: value for key, value in vars(each).items() if key in ("state", "param_groups")})
        for each in (optimizer, *optimizers_within(optimizer))
    ]
    for place, each in places:
        _, entries = checkpoint.value(*place, OWN) or ({}, {})
        if entries:
            each.load_state_dict(each.state_dict() | entries)
    for attributes, before in kept:
        attributes.update(before)


def _assign(
    optimizer: Optimizer,
    names: Names,
    part: str,
    place: Path,
    checkpoint: Checkpoint,
    filled: Mapping[Any, torch.Tensor],
) -> None:
    groups = _saved_groups(optimizer, names, part, place, checkpoint)
    for ours, saved in zip(optimizer.param_groups, groups, strict=True):
        ours.update({key: value for key, value in saved.items() if key != "params"})
    others, _ = checkpoint.value(*place, OWN) or ({}, {})
    optimizer.state.update(others)
    forget_layouts(optimizer)
    keeps_local = is_elementwise(optimizer)
    for parameter in _with_state(optimizer):
        path = (*place, "state", _name(parameter, names, part))
        leaves = {}
        for rest in checkpoint.below(*path):
            full = (*path, *rest)
            value = filled[full] if full in filled else checkpoint.value(*full)
            leaves[rest] = plain(value) if keeps_local and isinstance(value, GlobalTensor) else value
        if leaves:
            optimizer.state[parameter] = unflatten(leaves)
