"""``masked_scatter``: the elements of a source, in order, where a mask is True.

A running count over the mask tells each element which one of the source is its own. From there on it works element by
element in any layout of the input and the mask, with the source whole on each rank.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.core.rules import Signature
from workbench.core.sbp import Sbp, Split, broadcast
from workbench.tensors.dispatch.dispatcher import call_by_plan
from workbench.tensors.dispatch.local_call import can_read
from workbench.tensors.dispatch.registry import USER_FUNCTION_NAMES, Call, Resolution, handler, rule
from workbench.tensors.global_tensor import GlobalTensor


@handler("masked_scatter")
def masked_scatter(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.masked_scatter(mask, source)``, in place or not."""
    given, mask, source = args
    if mask.dtype != torch.bool or source.dtype != given.dtype:
        raise RuntimeError(
            f"{func.__name__}: input is {given.dtype}, mask {mask.dtype} and source {source.dtype}. The mask is "
            "boolean, and input and source have one dtype: convert one of them."
        )
    in_place = func.__name__.endswith("_")
    if in_place and not isinstance(given, GlobalTensor):
        return NotImplemented
    shape = given.shape if in_place else torch.broadcast_shapes(given.shape, mask.shape)
    mask = mask.expand(shape)
    result = call_by_plan(take_where, (given.expand(shape), mask, _count(mask), source.reshape(-1)))
    return given.copy_(result) if in_place else result


def _count(mask: Any) -> Any:
    """How often the mask has been True up to each element: row by row, so that a batch that is split stays so."""
    if mask.dim() < 2:
        return mask.reshape(-1).cumsum(0).reshape(mask.shape)
    within = mask.flatten(1).cumsum(1)
    of_rows = mask.flatten(1).sum(1)
    return (within + (of_rows.cumsum(0) - of_rows).unsqueeze(1)).reshape(mask.shape)


def take_where(x: torch.Tensor, mask: torch.Tensor, counted: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Where ``mask`` is True, the element number ``counted`` of ``source`` (from one), elsewhere ``x``."""
    if can_read(counted) and counted.numel() and (count := int(counted.max())) > source.numel():
        raise RuntimeError(
            f"masked_scatter: source has {source.numel()} elements, and the mask is True for at least {count}. Each "
            "True takes the next element of source: give as many."
        )
    if not source.numel():
        return x.clone()
    return torch.where(mask, source[(counted - 1).clamp(min=0)], x)


USER_FUNCTION_NAMES[take_where] = "workbench.take_where"


@rule("workbench.take_where")
def _take_where(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    entries: list[Sbp] = [*map(Split, range(ndim)), broadcast]
    return Resolution([Signature((e, e, e, broadcast), (e,), str(e)) for e in entries])
