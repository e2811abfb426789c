"""Reading values: ``item``, ``tolist``, ``bool``, printing, ``full_tensor``: the logical value on every rank."""

from __future__ import annotations

from typing import Any

import torch

from workbench.core.layout import Layout, format_sbp
from workbench.core.placement import Placement
from workbench.core.sbp import broadcast
from workbench.errors import StrategyError
from workbench.tensors.boxing.box import box
from workbench.tensors.boxing.explicit import Need, check_explicit
from workbench.tensors.dispatch.registry import handler
from workbench.tensors.global_tensor import GlobalTensor, local_torch


def value_on_all_ranks(tensor: GlobalTensor) -> torch.Tensor:
    """The logical value as a plain tensor on every rank of the world; all ranks call it."""
    with torch.no_grad():
        detached: Any = tensor.detach()
        detached._is_read_in_place = tensor._is_read_in_place
        value = on_all_ranks(detached)
    with local_torch():
        return value.detach().as_subclass(torch.Tensor)


def on_all_ranks(tensor: GlobalTensor) -> GlobalTensor:
    """The tensor as B on every rank of the world, wherever it lies; all ranks call it.

    Raises:
        StrategyError: inside a scheduled step whose stages cannot wait for it; in a hook on a parameter of one stage.
        ExplicitBoxingError: inside such a step under ``wb.debug.explicit_boxing()``, if it has to move between stages.
    """
    whole, context = _whole(tensor), tensor._spec.world.context
    running, placement = context.running, tensor._spec.layout.placement
    if context.in_parameter_hook and whole.placement != placement and running is None:
        raise StrategyError(
            f"reading a value of a tensor of shape {tuple(tensor._spec.shape)} in a hook of register_hook on a "
            f"parameter: {placement} has {placement.num_ranks} of {whole.placement.num_ranks} ranks, and the other "
            "ranks may run the hooks of a layer's parameters in another order, so that values would be exchanged. Use "
            "register_post_accumulate_grad_hook, or read p.grad after backward()."
        )
    if running is not None:
        check_reading(tensor, "reading a value")
        running.prepare_reading(tensor, whole != tensor._spec.layout)
    return box(tensor, whole)


def check_reading(tensor: GlobalTensor, function: str) -> None:
    """Under ``wb.debug.explicit_boxing()``, refuse to read a value on ranks outside its placement.

    Raises:
        ExplicitBoxingError: it has to move from one placement to another.
    """
    spec, whole = tensor._spec, _whole(tensor)
    if not spec.world.context.implicit_boxing_allowed and whole.placement != spec.layout.placement:
        check_explicit(function, [Need("the tensor", tensor, whole)])


def _whole(tensor: GlobalTensor) -> Layout:
    """B on all ranks that read it: those of the world, or of the placement for state of an optimizer."""
    layout, world_size = tensor._spec.layout, tensor._spec.world.world_size
    if tensor._is_read_in_place or layout.placement.num_ranks == world_size:
        return layout.broadcast()
    return Layout(Placement.of(layout.placement.device_type, list(range(world_size))), (broadcast,))


READS = (
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
"""Functions whose result is a value of Python or numpy; some conversions have these names, too."""


@handler(*READS)
def read(func: Any, args: Any, kwargs: Any) -> Any:
    """Plain Python or numpy value of the whole tensor."""
    if func.__name__ in ("bool", "float", "int", "complex"):  # Tensor.float(), torch.complex: conversions, not reads
        return NotImplemented
    for arg in args:
        if isinstance(arg, GlobalTensor):
            check_reading(arg, func.__name__)
    plain_args = [value_on_all_ranks(arg) if isinstance(arg, GlobalTensor) else arg for arg in args]
    return func(*plain_args, **kwargs)


def format_values(tensor: GlobalTensor) -> str:
    """The logical values and the layout, the same text on every rank; all ranks call it."""
    spec = tensor._spec
    check_reading(tensor, "print")
    values = str(value_on_all_ranks(tensor))
    grad = ", requires_grad" if tensor.requires_grad else ""
    return (
        f"{values}\n  {format_sbp(spec.layout.sbp)} on "
        f"{spec.layout.placement.device_type}:{spec.layout.placement.ranks}{grad}"
    )


def describe(tensor: GlobalTensor) -> str:
    """Shape, dtype and layout; never communicates."""
    spec = tensor._spec
    with local_torch():
        dtype, grad = str(tensor.dtype).removeprefix("torch."), tensor.requires_grad
    where = "; not on this rank" if spec.is_placeholder else ""
    needs = ", requires_grad=True" if grad else ""
    name = "Parameter of GlobalTensor" if tensor._is_param else "GlobalTensor"
    return f"{name}({tuple(spec.shape)}, {dtype}, {spec.layout}{needs}{where})"
