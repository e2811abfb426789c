"""Strides and storage offsets as one device has them, derived from those of a shard.

A shard lies in memory as the whole tensor does, but for the sizes of split dims: the strides of the dims around those
are longer in the whole. Where memory does not tell (a slice around a split dim), asking is an error. Of dims that have
one row in every shard torch keeps no order, so a tensor computed from a transposed one counts as contiguous there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map

from workbench.core.layout import Layout, Shape
from workbench.core.sbp import Split
from workbench.errors import LayoutError
from workbench.tensors.dispatch.arguments import with_numbers
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch


def on_meta(tensor: GlobalTensor) -> torch.Tensor:
    """A meta tensor with the shape, strides and storage offset that one device has for ``tensor``.

    Raises:
        LayoutError: the shard does not tell them.
    """
    spec = tensor._spec
    if tensor._view_call is not None:
        return _viewed_on_meta(tensor)
    with local_torch():
        shard: Any = tensor.detach()
        dtype, strides, offset = shard.dtype, shard.stride(), shard.storage_offset()
    if spec.is_placeholder:
        return torch.empty(spec.shape, dtype=dtype, device="meta")
    logical = logical_strides(spec.local_shape, strides, spec.shape)
    if logical is not None and logical != contiguous_strides(spec.shape) and _others_are_thinner(spec):
        _refuse(tensor, strides, "other ranks have a single row of a split dim, of which torch keeps no order")
    is_filled = 0 not in spec.local_shape
    start = None if logical is None else _logical_offset(offset, strides, logical, spec.layout, is_filled)
    if logical is None or start is None:
        _refuse(tensor, strides, f"it is part of a larger tensor, from element {offset} of its memory")
    reached = start + sum((size - 1) * stride for size, stride in zip(spec.shape, logical, strict=True)) + 1
    return torch.empty(max(reached, start), dtype=dtype, device="meta").as_strided(spec.shape, logical, start)


def _viewed_on_meta(view: GlobalTensor) -> torch.Tensor:
    """What the view function gives of a tensor that lies as its base does on one device."""

    def as_meta(leaf: Any) -> Any:
        if isinstance(leaf, GlobalTensor):
            return on_meta(leaf)
        return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

    call = view._view_call
    given = with_numbers(call.func, call.args, call.kwargs) or (call.args, call.kwargs)
    args, kwargs = tree_map(as_meta, given)
    try:
        made: torch.Tensor = tree_leaves(call.func(*args, **kwargs))[call.number]
    except RuntimeError as error:
        raise LayoutError(
            f"strides of a tensor {tuple(view._spec.shape)} in {view._spec.layout}, a view that was boxed: on one "
            f"device torch refuses it ({error}). Write .reshape(...) in place of .view(...)."
        ) from error
    return made


def contiguous_strides(shape: Shape) -> tuple[int, ...]:
    """The strides of a contiguous tensor.

    >>> contiguous_strides((4, 0, 3))
    (3, 3, 1)
    """
    found, within = [], 1
    for size in reversed(shape):
        found.append(within)
        within *= max(size, 1)
    return tuple(reversed(found))


def _logical_offset(
    offset: int, strides: Sequence[int], logical: Sequence[int], layout: Layout, is_filled: bool
) -> int | None:
    """The storage offset of the whole: the elements that were passed along each dim, from outer to inner ones. None
    where some of a split dim were. An empty shard lies anywhere.
    """
    found, split = 0, {entry.dim for entry in layout.sbp if isinstance(entry, Split)}
    for dim in sorted(range(len(strides)), key=lambda dim: -strides[dim]):
        if strides[dim]:
            passed, offset = divmod(offset, strides[dim])
            if passed and dim in split:
                return None if is_filled else 0
            found += passed * logical[dim]
    return found + offset


def _others_are_thinner(spec: Spec) -> bool:
    """Whether another shard has one row, or none, of a dim of which this one has more."""
    others = [spec.layout.local_shape(spec.shape, rank) for rank in spec.layout.placement]
    return any(mine > 1 >= theirs for other in others for mine, theirs in zip(spec.local_shape, other, strict=True))


def logical_strides(local: Shape, strides: Sequence[int], shape: Shape) -> tuple[int, ...] | None:
    """The strides of a tensor of ``shape`` whose shard, of shape ``local``, has ``strides``; None where these do not
    tell.

    >>> logical_strides((4, 6, 3), (18, 3, 1), (4, 12, 3)), logical_strides((2, 3), (1, 2), (4, 3))
    ((36, 3, 1), (1, 4))
    """
    found = [0] * len(shape)
    within_shard = within_whole = 1  # elements in memory of the dims further inside
    inner_first = sorted(range(len(shape)), key=lambda d: (strides[d], local[d] > 1, -d))
    for dim in inner_first:
        if not strides[dim]:
            continue
        if strides[dim] != within_shard and within_shard == within_whole:
            within_shard = within_whole = strides[dim]  # the tensor is a slice, and no dim further inside is split
        elif strides[dim] != within_shard and local[dim] > 1 and 0 not in local:
            return None
        found[dim] = within_whole
        within_shard *= max(local[dim], 1)
        within_whole *= max(shape[dim], 1)
    return tuple(found)


def _refuse(tensor: GlobalTensor, strides: Sequence[int], why: str) -> NoReturn:
    spec = tensor._spec
    raise LayoutError(
        f"strides of a tensor {tuple(spec.shape)} in {spec.layout}: this rank's shard {tuple(spec.local_shape)} has "
        f"{tuple(strides)}, and {why}, so it does not tell those of one device. Strides and offsets of a global tensor "
        "are those of one device. Write x = x.contiguous() (or .clone()) before you ask for them."
    )
