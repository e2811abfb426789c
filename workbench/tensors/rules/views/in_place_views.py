"""In-place forms that change a tensor's shape (``unsqueeze_``, ``squeeze_``, ``transpose_``), and ``as_strided``, which
gathers: a view by steps in memory, which are those of one device.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from workbench.errors import LayoutError
from workbench.tensors.dispatch.aliasing import BoxedView
from workbench.tensors.dispatch.dispatcher import call_by_plan
from workbench.tensors.dispatch.registry import EXACT, handler
from workbench.tensors.dispatch.strides import on_meta
from workbench.tensors.global_tensor import local_torch
from workbench.tensors.tensor_state import count_write, separate_views


def _become(input: Any, view: Any, name: str) -> Any:
    """Give ``input`` the strides and the spec of a view of it."""
    if type(view) is BoxedView or type(input) is BoxedView:
        raise LayoutError(
            f"{name}: the result has shape {tuple(view.shape)}, for which {input._spec.layout} of shape "
            f"{tuple(input.shape)} has to be boxed. In place a tensor keeps its storage: write x = "
            f"x.{name.removesuffix('_')}(...)."
        )
    with local_torch():
        separate_views(input)
        input.as_strided_(view.size(), view.stride(), view.storage_offset())
        if input._spec.is_placeholder:
            count_write(input)  # as torch does where tensors share memory
    input._spec, input._strides = view._spec, view._strides
    input._boxings = None
    return input


def _register(name: str, view: Any) -> None:
    @functools.wraps(view)
    def written(tensor: Any, **given: Any) -> Any:
        return _become(tensor, view(tensor, **given), name)

    EXACT[getattr(torch.Tensor, name)] = written


_register("unsqueeze_", lambda tensor, dim: tensor.unsqueeze(dim))
_register("squeeze_", lambda tensor, dim=None: tensor.squeeze() if dim is None else tensor.squeeze(dim))
_register("transpose_", lambda tensor, dim0, dim1: tensor.transpose(dim0, dim1))
_register("t_", lambda tensor: tensor.t())
_register("swapaxes_", lambda tensor, axis0, axis1: tensor.transpose(axis0, axis1))
_register("swapdims_", lambda tensor, dim0, dim1: tensor.transpose(dim0, dim1))


@handler("as_strided", "as_strided_copy", "as_strided_scatter")
def as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """The view of the whole tensor, gathered in the order of dims that it has in memory.

    Raises:
        LayoutError: the tensor is a slice, whose memory has gaps here and other elements on one device.
    """
    tensor, *others = args
    if tensor._spec.layout.is_broadcast and tensor._origin is None:
        return call_by_plan(func, args, kwargs)  # each rank's memory is that of one device
    is_scatter = func.__name__ == "as_strided_scatter"
    meta = on_meta(tensor)
    dense, is_dense, order = _in_order_of_memory(tensor, meta)
    position, offset = 2 + is_scatter, meta.storage_offset()
    given = others[position] if len(others) > position else kwargs.get("storage_offset")
    has_gaps = not is_dense or (is_scatter and dense.dim() < tensor.dim())
    if has_gaps or (given is not None and given < offset):
        raise LayoutError(
            f"{func.__name__} of a tensor {tuple(tensor.shape)} in {tensor._spec.layout}, with strides {meta.stride()} "
            f"and offset {offset} on one device: a view by strides shows memory, and this tensor is part of a larger "
            f"one. Write .contiguous() (or .clone()) before it, or take the view of the larger tensor."
        )
    if given is not None:
        others, kwargs = others[:position], {**kwargs, "storage_offset": given - offset}
    result = call_by_plan(func, (dense, *others), kwargs)
    return result.permute([order.index(dim) for dim in range(len(order))]) if is_scatter else result


def _in_order_of_memory(tensor: Any, meta: torch.Tensor) -> tuple[Any, bool, list[int]]:
    """A view whose dims go from outer to inner ones, whether it has no gaps, and the order; dims that are expanded keep
    one element.
    """
    expanded = [dim for dim, (size, stride) in enumerate(zip(meta.shape, meta.stride(), strict=True)) if not stride]
    for dim in reversed(expanded):
        tensor, meta = tensor.select(dim, 0), meta.select(dim, 0)
    sizes, strides = tuple(meta.shape), meta.stride()
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], sizes[dim] == 1))
    dense = tensor if order == list(range(len(sizes))) else tensor.permute(order)
    return dense, meta.permute(order).is_contiguous(), order
