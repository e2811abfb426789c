"""What ranks tell each other of the parts of a batch that they have read.

A rank that holds no part of a tensor learns its dtype and shape so, and what all samples share is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from workbench.errors import LayoutError
from workbench.tensors.agreement import is_identical
from workbench.training.batches import TARGET_KEYS
from workbench.training.sample_rows import may_count


@dataclass(frozen=True)
class Leaf:
    """Description of a tensor with one row per sample, for ranks that hold no part of it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} ({', '.join(['rows', *map(str, self.shape)])})"

    def may_be(self, value: Any) -> bool:
        """Whether the tensor may be ``value``: a shared tensor may have as many rows as samples by chance."""
        return isinstance(value, torch.Tensor) and (value.dtype, tuple(value.shape[1:])) == (self.dtype, self.shape)


@dataclass(frozen=True)
class Shared:
    """A number, or a tensor that belongs to all samples; equal on all ranks."""

    value: Any

    def __str__(self) -> str:
        return str(self.value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Leaf):
            return other.may_be(self.value)
        mine, others = self.value, getattr(other, "value", None)
        if isinstance(mine, torch.Tensor) and isinstance(others, torch.Tensor):
            return is_identical(mine, others)
        return type(mine) is type(others) and (mine == others or repr(mine) == repr(others))  # nan is equal to nan


def describe_part(part: Any, num_rows: int, what: str, have_rows: Sequence[bool] | None) -> Any:
    """Each leaf of a rank's part as a ``Leaf`` or ``Shared``; None for no part.

    ``have_rows`` says of each leaf whether it has a row per sample. None: those that have ``num_rows`` rows.
    """
    if part is None:
        return None
    leaves, structure = tree_flatten(part)
    is_clear = have_rows is not None or may_count(num_rows, leaves)
    if have_rows is None:
        have_rows = [isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (num_rows,) for leaf in leaves]

    def describe(leaf: Any, has_rows: bool) -> Leaf | Shared:
        if has_rows:
            return Leaf(leaf.dtype, tuple(leaf.shape[1:]))
        if isinstance(leaf, torch.Tensor) and (is_clear or not leaf.dim()):
            return Shared(leaf)
        if isinstance(leaf, Number) or leaf is None:
            return Shared(leaf)
        found = f"a tensor {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"
        raise LayoutError(
            f"GlobalDataLoader, {what}: collate_fn made {found} of {num_rows} samples. A global batch has "
            "tensors with one row per sample, and values that all samples share: remove everything else in the dataset "
            "or in collate_fn."
        )

    return tree_unflatten([describe(*one) for one in zip(leaves, have_rows, strict=True)], structure)


def agreed(several: Sequence[Leaf | Shared], what: str) -> Leaf | Shared:
    """The description of one leaf, from all ranks that read it. It is shared if any of them says so."""
    first = next((one for one in several if isinstance(one, Shared)), several[0])
    for other in several:
        if first != other:
            raise LayoutError(
                f"GlobalDataLoader, {what}: ranks have read {first} and {other}. The parts of one batch must have "
                "one dtype and shape, up to dim 0, and what all samples share one value: pad in the dataset to one "
                "size, or give a collate_fn that pads. A collate_fn gets the same samples on all ranks: seed its own "
                "generators."
            )
    return first


def target_leaves(described: Any) -> list[bool]:
    """For each tensor of a batch, whether it is a target."""
    if isinstance(described, (tuple, list)) and len(described) > 1:
        last = len(described) - 1
        return [index == last for index, entry in enumerate(described) for _ in tree_leaves(entry)]
    if isinstance(described, Mapping):
        return [key in TARGET_KEYS for key, inner in described.items() for _ in tree_leaves(inner)]
    return [False] * len(tree_leaves(described))
