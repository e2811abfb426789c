"""The outputs of micro-batches as the output of their batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from workbench.errors import RunError


def join(outputs: list[Any], shares: list[float], sizes: list[int] | None = None) -> Any:
    """The outputs of micro-batches as one: tensors joined along dim 0, scalars as means weighted by ``shares``.

    A list with a dict for each sample (boxes of each image) is joined by its entries.

    Args:
        sizes: samples of the micro-batches, of which dim 0 of a tensor must be a multiple. None: it may be anything.

    Raises:
        RunError: dim 0 of a tensor does not count samples.

    >>> join([(torch.ones(2, 3), torch.tensor(1.0)), (torch.ones(1, 3), torch.tensor(4.0))], [2 / 3, 1 / 3])[1]
    tensor(2.)
    """
    flat = [tree_flatten(output, _lists_dicts) for output in outputs]
    joined = [_join_leaf(list(parts), shares, sizes) for parts in zip(*(leaves for leaves, _ in flat), strict=True)]
    return tree_unflatten(joined, flat[0][1])


def _lists_dicts(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and all(isinstance(entry, Mapping) for entry in part)


def refuse_dataclasses(value: Any, what: str, rule: str) -> None:
    """Raise for a dataclass in a batch or an output that is handled tensor by tensor: its tensors are not seen.

    Args:
        what, rule: for the message, e.g. ``"the batch has"`` and why its tensors have to be seen.

    Raises:
        RunError: it is not registered.
    """
    for leaf in tree_leaves(value):
        held = [getattr(leaf, each.name, None) for each in fields(leaf)] if is_dataclass(leaf) else []
        if any(isinstance(value, torch.Tensor) for value in tree_leaves(held)):
            kind = type(leaf).__name__
            raise RunError(
                f"{what} a {kind}, a dataclass, of which torch finds 0 tensors. {rule}. Call "
                f"torch.export.register_dataclass({kind}) once, or give a dict or a tuple."
            )


def refuse_packed_sequence(value: Any) -> None:
    """Raise for torch's ``PackedSequence``, a named tuple of which no tensor has a row for each sample.

    Raises:
        RunError: it is one.
    """
    if isinstance(value, PackedSequence):
        raise RunError(
            f"the batch has a PackedSequence of {value.data.shape[0]} rows. They are the steps of several samples, and "
            "batches are cut along dim 0, the samples. Give the padded tensor and its lengths (one for each sample), "
            "and call pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False) in the model."
        )


def _join_leaf(parts: list[Any], shares: list[float], sizes: list[int] | None) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], list):
        return _join_lists(parts, shares, sizes)
    if not isinstance(parts[0], torch.Tensor):
        return parts[0] if all(type(part) is type(parts[0]) and part == parts[0] for part in parts[1:]) else parts
    if parts[0].dim() == 0:
        return torch.stack([part * share for part, share in zip(parts, shares, strict=True)]).sum()
    if sizes is not None:
        _check_counts_samples(parts, sizes)
    return torch.cat(parts)


def _join_lists(parts: list[list[Any]], shares: list[float], sizes: list[int] | None) -> list[Any]:
    """Lists with a dict for each sample, one after the other. The tensors of other lists, such as one of the results of
    several heads, have a row for each sample, and are joined.
    """
    if sizes is not None and [len(part) for part in parts] == sizes:
        tensors = [(leaf, size) for part, size in zip(parts, sizes, strict=True) for leaf in tree_leaves(part)]
        if any(leaf.shape[:1] != (size,) for leaf, size in tensors if isinstance(leaf, torch.Tensor)):
            return [entry for part in parts for entry in part]
    return [join(list(entries), shares, sizes) for entries in zip(*parts, strict=True)]


def _check_counts_samples(parts: list[torch.Tensor], sizes: list[int]) -> None:
    """Refuse a tensor whose dim 0 does not count samples, or as many rows of each."""
    shapes = [tuple(part.shape) for part in parts]
    rows = shapes[0][0] // sizes[0]
    counts = all(shape[0] == rows * size for shape, size in zip(shapes, sizes, strict=True))
    is_dim_1 = rows != 1 and all(shape[1:2] == (size,) for shape, size in zip(shapes, sizes, strict=True))
    if not counts or is_dim_1:
        raise RunError(
            f"the module's output has a tensor of shapes {shapes} for {len(sizes)} micro-batches of {sizes} samples. "
            "Outputs of micro-batches are joined along dim 0, which has to count samples. Return it with its samples "
            "along dim 0 (state.transpose(0, 1)), leave it out, or use mb=1."
        )
