"""Run a function on shards under declared layouts: the primitive of composites and of ``wb.local_map``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from workbench.core.layout import Layout, Shape
from workbench.tensors.boxing.box import box_implicitly
from workbench.tensors.dispatch.placeholder_calls import placeholder_outputs
from workbench.tensors.global_tensor import GlobalTensor, local_torch, spec_of, wrap


def local_call(
    function: Callable[..., torch.Tensor],
    operands: Sequence[GlobalTensor],
    layouts: Sequence[Layout],
    out: tuple[Layout, Shape, torch.dtype],
    name: str,
) -> GlobalTensor:
    """``function`` on the shards of ``operands`` boxed to ``layouts``; its result has the layout and shape ``out``."""
    layout, shape, dtype = out
    boxed = [box_implicitly(operand, target, name) for operand, target in zip(operands, layouts, strict=True)]
    world = operands[0]._spec.world
    spec = spec_of(world, layout, shape)
    with local_torch():
        if spec.is_placeholder:
            needs_grad = torch.is_grad_enabled() and dtype.is_floating_point and any(t.requires_grad for t in boxed)
            result = placeholder_outputs([(shape, dtype, needs_grad)], boxed, [spec], world.device)[0]
        else:
            result = function(*boxed)
            if type(result) is GlobalTensor:
                result = result.view_as(result)
    return wrap(result, spec)


def sum_terms(tensor: Any, name: str = "a function that is not linear") -> GlobalTensor:
    """``tensor`` with its partial sums summed, for the function ``name``."""
    spec = tensor._spec
    summed: GlobalTensor = box_implicitly(tensor, spec.layout.without_terms(), name) if spec.has_partial else tensor
    return summed


def scale_terms(total: GlobalTensor, divisor: GlobalTensor) -> GlobalTensor:
    """``total / divisor`` where ``total`` may be a partial sum: dividing every term divides the sum."""
    layout = total._spec.layout
    return local_call(
        torch.div,
        [total, divisor],
        [layout, divisor._spec.layout.broadcast()],
        (layout, total._spec.shape, total.dtype),
        "div",
    )


def can_read(tensor: torch.Tensor) -> bool:
    """Whether a check may read values: not where that would wait for a device, nor where they are fake or being
    recorded.
    """
    if tensor.device.type != "cpu":
        return False
    if not torch._C._len_torch_dispatch_stack():
        return True
    return all(getattr(mode, "lets_read", False) for mode in _get_current_dispatch_mode_stack())
