"""Strides and storage offsets as one device has them, derived from those of a shard.

A shard lies in memory as the whole tensor does, but for the sizes of split dims: the strides of the dims around those
are longer in the whole. Where memory does not tell (a slice around a split dim), asking is an error. Of dims that have
one row in a shard torch keeps no order: elementwise functions keep it here, and what others compute is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map

from workbench.core.layout import Layout, Shape
from workbench.core.sbp import Split
from workbench.errors import LayoutError
from workbench.tensors.dispatch.arguments import with_numbers
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.transport.messaging.shared_memory import contiguous_strides

Views = tuple[list[bool], list[tuple[int, ...] | None]]
"""For each tensor that a call gives: whether it shares the memory of its operand, and its strides; None where it is
contiguous.
"""


def on_meta(tensor: GlobalTensor, may_guess: bool = False) -> torch.Tensor:
    """A meta tensor with the shape, strides and storage offset that one device has for ``tensor``.

    With ``may_guess`` its strides are the likeliest ones where the shard does not tell, and its offset may be any.

    Raises:
        LayoutError: the shard does not tell them.
    """
    spec = tensor._spec
    if tensor._view_call is not None:
        return _viewed_on_meta(tensor, may_guess)
    with local_torch():
        shard: Any = tensor.detach()
        dtype, strides, offset = shard.dtype, shard.stride(), shard.storage_offset()
    if spec.is_placeholder:
        return _meta(spec.shape, tensor._strides or contiguous_strides(spec.shape), 0, dtype)
    logical = logical_strides(spec.local_shape, strides, spec.shape)
    start = _logical_offset(offset, strides, logical, spec.layout, 0 not in spec.local_shape)
    if (
        not may_guess
        and logical != contiguous_strides(spec.shape)
        and any(is_thinner(other, spec.local_shape) for other in _shard_shapes(spec))
    ):
        _refuse(tensor, strides, "other ranks have a single row of a split dim, of which torch keeps no order")
    if start is None and not may_guess:
        _refuse(tensor, strides, f"it is part of a larger tensor, from element {offset} of its memory")
    return _meta(spec.shape, logical, start or 0, dtype)


def _meta(shape: Shape, strides: Sequence[int], start: int, dtype: torch.dtype) -> torch.Tensor:
    reached = start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    return torch.empty(max(reached, start), dtype=dtype, device="meta").as_strided(shape, strides, start)


def on_one_device(known: dict[Any, Views], call: tuple[Any, Any, Any], base: GlobalTensor) -> Views:
    """What one device makes of ``base`` in a call of a function, given with its arguments. torch says so itself, on
    metadata with the strides of one device. ``known`` keeps its answers by the strides of the base.

    What one device refuses, such as a ``view`` that its strides do not allow, is a new contiguous tensor.
    """
    if base._view_call is not None:
        return _ask_torch(*call, base)
    with local_torch():
        key = base.dtype, base._strides if base._spec.is_placeholder else base.stride()
    found = known.get(key)
    if found is None:
        found = known[key] = _ask_torch(*call, base)
    return found


def _ask_torch(func: Callable[..., Any], args: Any, kwargs: Any, base: GlobalTensor) -> Views:
    with local_torch(), hidden_from_modes(), torch.no_grad():
        meta = on_meta(base, may_guess=True)
        try:
            found = func(*tree_map(lambda leaf: meta if leaf is base else leaf, args), **kwargs)
        except RuntimeError:
            return [False], [None]
        leaves = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        strides = [None if leaf.is_contiguous() else leaf.stride() for leaf in leaves]
        return [share_storage(leaf, meta) for leaf in leaves], strides


def of_elementwise_placeholder(known: dict[Any, Any], call: tuple[Any, Any, Any], operands: list[GlobalTensor]) -> Any:
    """The strides that one device has for what an elementwise function makes of placeholders; None where it is
    contiguous. ``known`` keeps what torch says.
    """
    key = tuple(operand._strides for operand in operands)
    if key not in known:
        func, args, kwargs = call
        with local_torch(), hidden_from_modes(), torch.no_grad():
            args, kwargs = tree_map(
                lambda leaf: on_meta(leaf, may_guess=True) if isinstance(leaf, GlobalTensor) else leaf, (args, kwargs)
            )
            made = func(*args, **kwargs)
            known[key] = None if made.is_contiguous() else made.stride()
    return known[key]


def keeping_order(function: Callable[..., Any], shape: Shape) -> Callable[..., Any]:
    """A local elementwise function whose result, of that shape, has its dims in the order of its operand's. Of dims
    with one row torch keeps no order, and the whole may have more.
    """
    contiguous = contiguous_strides(shape)

    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        like = args[0]
        if not isinstance(like, torch.Tensor) or like.shape != shape:
            like = next((arg for arg in args if isinstance(arg, torch.Tensor) and arg.shape == shape), None)
        if like is None or (given := like.stride()) == contiguous or 0 in given:
            return result
        kept, within = [0] * len(shape), 1
        for dim in sorted(range(len(shape)), key=lambda dim: (given[dim], shape[dim] > 1, -dim)):
            kept[dim], within = within, within * max(shape[dim], 1)
        found = result.stride()
        is_known = all(new == old or size < 2 for new, old, size in zip(kept, found, shape, strict=True))
        return result.as_strided(shape, kept) if is_known and found != tuple(kept) else result

    return run


def share_storage(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two local tensors have one memory. The caller has switched off ``__torch_function__``."""
    return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


def is_thinner(part: Shape, other: Shape) -> bool:
    """Whether ``part`` has one row, or none, of a dim of which ``other`` has more."""
    return any(size > 1 >= rows for rows, size in zip(part, other, strict=True))


def has_thin_shards(spec: Spec) -> bool:
    """Whether a rank has one row, or none, of a dim of which the whole has more."""
    return any(is_thinner(shard, spec.shape) for shard in _shard_shapes(spec))


def _shard_shapes(spec: Spec) -> list[Shape]:
    return [spec.layout.local_shape(spec.shape, rank) for rank in spec.layout.placement]


def _viewed_on_meta(view: GlobalTensor, may_guess: bool) -> torch.Tensor:
    """What the view function gives of a tensor that lies as its base does on one device."""

    def as_meta(leaf: Any) -> Any:
        if isinstance(leaf, GlobalTensor):
            return on_meta(leaf, may_guess)
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


def logical_strides(local: Shape, strides: Sequence[int], shape: Shape) -> tuple[int, ...]:
    """The strides of a tensor of ``shape`` whose shard, of shape ``local``, has ``strides``.

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
        elif strides[dim] != within_shard and local[dim] > 1 and 0 not in local:  # a slice around a split dim
            within_shard, within_whole = strides[dim], strides[dim] * within_whole // within_shard
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
