"""Nested state as one flat dictionary, with the dotted names of torch.distributed.checkpoint, and back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from workbench.errors import CheckpointError

Path = tuple[str | int, ...]
"""The place of a value in the nested state: ``("optimizer", "param_groups", 0, "lr")``."""


def flatten(state: Mapping[str, Any]) -> dict[Path, Any]:
    """The leaves of nested dictionaries, and of lists that hold tensors or dictionaries, by their paths.

    A dictionary that torch's names cannot represent (empty, of another class, with keys that are not strings) is a
    leaf.

    >>> flatten({"a": {"b": [1, 2]}, "c": {}})
    {('a', 'b'): [1, 2], ('c',): {}}

    Raises:
        CheckpointError: a tensor inside a tuple or another container that is stored as one piece; a sparse tensor; an
            optimizer or scheduler among values.
    """
    return dict(_leaves((), state))


def name_of(path: Path) -> str:
    """The dotted name of an entry in torch.distributed.checkpoint."""
    return ".".join(map(str, path))


def by_name(leaves: Mapping[Path, Any]) -> dict[str, Any]:
    """The leaves by their dotted names.

    Raises:
        CheckpointError: two leaves have the same name.
    """
    paths: dict[str, Path] = {}
    for path in leaves:
        if (other := paths.setdefault(name_of(path), path)) != path:
            raise CheckpointError(
                f"save: 2 values have the name {name_of(path)!r} in the checkpoint, those at {list(other)} and "
                f"{list(path)}. Names are the keys with dots between them, and each is of one value. Give one of them "
                "another name, without a dot."
            )
    return {name: leaves[path] for name, path in paths.items()}


def unflatten(leaves: Mapping[Path, Any]) -> Any:
    """The nested state of the leaves of ``flatten``; None for no leaves.

    >>> unflatten({("a", "b"): [1, 2], ("c", 0, "d"): 3})
    {'a': {'b': [1, 2]}, 'c': [{'d': 3}]}
    """
    if () in leaves:
        return leaves[()]
    if not leaves:
        return None
    below: dict[str | int, dict[Path, Any]] = {}
    for path, value in leaves.items():
        below.setdefault(path[0], {})[path[1:]] = value
    if all(isinstance(key, int) for key in below):
        return [unflatten(below[key]) for key in sorted(below)]
    return {key: unflatten(part) for key, part in below.items()}


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    if type(value) in (dict, OrderedDict) and value and all(isinstance(key, str) for key in value):
        for key, inner in value.items():
            yield from _leaves((*path, key), inner)
    elif isinstance(value, list) and any(isinstance(inner, torch.Tensor | dict) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves((*path, index), inner)
    else:
        _refuse_hidden(path, value)
        yield path, value


def _refuse_hidden(path: Path, value: Any) -> None:
    from workbench.tensors.global_tensor import GlobalTensor

    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        raise CheckpointError(
            f"checkpoint: {name_of(path)} is a {value.layout} tensor of shape {tuple(value.shape)}; a checkpoint has "
            "slices of strided ones. If it is made of the data, as the matrix of a graph is, leave it out: "
            "register_buffer(name, tensor, persistent=False). Or keep its indices and values as two buffers."
        )
    held = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list | set) else ()
    inside = tree_leaves([*held])
    if any(isinstance(inner, GlobalTensor) for inner in inside):
        raise CheckpointError(
            f"save: {name_of(path)} is a {type(value).__name__} with global tensors in it. Slices are saved from "
            "dictionaries with text keys and from lists: put the tensors into one of these. Of an optimizer give the "
            "object, not its state_dict()."
        )
    for inner in (value, *inside):
        if isinstance(inner, Optimizer | LRScheduler):
            raise CheckpointError(
                f"checkpoint: {name_of(path)} has a {type(inner).__name__} among plain values. It would be saved with "
                "copies of its parameters, and no load would fill the program's own. Give each optimizer and scheduler "
                "as a part of its own: wb.checkpoint.save(path, model=model, first=optimizers[0], "
                "second=optimizers[1])."
            )
