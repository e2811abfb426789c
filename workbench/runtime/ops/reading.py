"""Reading values: ``item``, ``tolist``, ``bool``, printing. They give the logical value on every rank of the world."""

from __future__ import annotations

from typing import Any

import torch

from workbench.core.layout import Layout, format_sbp
from workbench.core.placement import Placement
from workbench.core.sbp import broadcast
from workbench.runtime.boxing.box import box
from workbench.runtime.ops.registry import handler
from workbench.runtime.tensor import GlobalTensor, local_torch


def everywhere(tensor: GlobalTensor) -> torch.Tensor:
    """The logical value as a plain tensor on every rank of the world; all ranks call it."""
    spec = tensor._spec
    if spec.world.running is not None:
        spec.world.running.check_reading(tensor)
    ranks = Placement.of(spec.layout.placement.device_type, list(range(spec.world.world_size)))
    with torch.no_grad():
        detached: Any = tensor.detach()
        value = box(detached, Layout(ranks, (broadcast,)))
    with local_torch():
        return value.detach().as_subclass(torch.Tensor)


@handler(
    "item",
    "tolist",
    "bool",
    "float",
    "int",
    "index",
    "complex",
    "array",
    "dlpack",
    "numpy",
    "contains",
    "is_nonzero",
    "equal",
    "allclose",
)
def read(func: Any, args: Any, kwargs: Any) -> Any:
    """Plain Python or numpy value of the whole tensor."""
    if func.__name__ in ("bool", "float", "int", "complex"):  # Tensor.float(), torch.complex: conversions, not reads
        return NotImplemented
    plain_args = [everywhere(arg) if isinstance(arg, GlobalTensor) else arg for arg in args]
    return func(*plain_args, **kwargs)


@handler("format")
def format_value(func: Any, args: Any, kwargs: Any) -> str:
    """``f"{loss:.4f}"`` of a scalar formats its value, of anything else its text."""
    tensor, text = args
    return format(tensor.item(), text) if not tensor._spec.shape and text else format(str(tensor), text)


def show(tensor: GlobalTensor) -> str:
    """The logical values and the layout, the same text on every rank; all ranks call it."""
    spec = tensor._spec
    values = str(everywhere(tensor))
    grad = ", requires_grad" if tensor.requires_grad else ""
    return (
        f"{values}\n  {format_sbp(spec.layout.sbp)} on "
        f"{spec.layout.placement.device_type}:{spec.layout.placement.ranks}{grad}"
    )
