"""In-place forms that change a tensor's shape: ``unsqueeze_``, ``squeeze_``, ``transpose_``."""

from __future__ import annotations

from typing import Any

import torch

from workbench.errors import LayoutError
from workbench.tensors.dispatch.aliasing import BoxedView
from workbench.tensors.dispatch.registry import EXACT
from workbench.tensors.global_tensor import local_torch


def _become(input: Any, view: Any, name: str) -> Any:
    """Give ``input`` the strides and the spec of a view of it."""
    if type(view) is BoxedView or type(input) is BoxedView:
        raise LayoutError(
            f"{name}: the result has shape {tuple(view.shape)}, for which {input._spec.layout} of shape "
            f"{tuple(input.shape)} has to be boxed. In place a tensor keeps its storage: write x = "
            f"x.{name.removesuffix('_')}(...)."
        )
    with local_torch():
        input.as_strided_(view.size(), view.stride(), view.storage_offset())
    input._spec = view._spec
    input._boxings = None
    return input


def unsqueeze_(input: Any, dim: int) -> Any:
    """Insert a dim of size one."""
    return _become(input, input.unsqueeze(dim), "unsqueeze_")


def squeeze_(input: Any, dim: Any = None) -> Any:
    """Remove dims of size one of the logical shape."""
    return _become(input, input.squeeze() if dim is None else input.squeeze(dim), "squeeze_")


def transpose_(input: Any, dim0: int, dim1: int) -> Any:
    """Swap two dims."""
    return _become(input, input.transpose(dim0, dim1), "transpose_")


def swapaxes_(input: Any, axis0: int, axis1: int) -> Any:
    """``transpose_`` by another name."""
    return _become(input, input.transpose(axis0, axis1), "swapaxes_")


def swapdims_(input: Any, dim0: int, dim1: int) -> Any:
    """``transpose_`` by another name."""
    return _become(input, input.transpose(dim0, dim1), "swapdims_")


for _function in (unsqueeze_, squeeze_, transpose_, swapaxes_, swapdims_):
    EXACT[getattr(torch.Tensor, _function.__name__)] = _function
