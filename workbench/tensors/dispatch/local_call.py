"""Run a function on shards under declared layouts: the primitive of composites."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from workbench.core.layout import Layout, Shape
from workbench.tensors.boxing.box import box_implicitly
from workbench.tensors.boxing.exchange import without_view_relations
from workbench.tensors.dispatch.placeholder_calls import OutputInfo, placeholder_outputs
from workbench.tensors.global_tensor import GlobalTensor, local_torch, spec_of, wrap

Out = tuple[Layout, Shape, torch.dtype]
"""Layout, logical shape and dtype of one result."""


def local_call(
    function: Callable[..., torch.Tensor], operands: Sequence[GlobalTensor], layouts: Sequence[Layout], out: Out,
    name: str,
) -> GlobalTensor:  # fmt: skip
    """`on_shards` for one result."""
    return on_shards(function, operands, layouts, [out], name)[0]


def on_shards(
    function: Callable[..., Any], operands: Sequence[GlobalTensor], layouts: Sequence[Layout], outs: Sequence[Out],
    name: str,
) -> list[GlobalTensor]:  # fmt: skip
    """Run ``function`` on the shards of ``operands`` boxed to ``layouts``. It returns one tensor per entry of ``outs``;
    the only one without a tuple.

    Under grad mode, every differentiable result must depend on every operand that needs a gradient, on every rank,
    because placeholders link them so.
    """
    boxed = [box_implicitly(operand, layout, name) for operand, layout in zip(operands, layouts, strict=True)]
    world = boxed[0]._spec.world
    specs = [spec_of(world, layout, shape) for layout, shape, _ in outs]
    with local_torch():
        if specs[0].is_placeholder:
            linked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in boxed)
            infos: list[OutputInfo] = [
                (shape, dtype, linked and (dtype.is_floating_point or dtype.is_complex)) for _, shape, dtype in outs
            ]
            results: Any = placeholder_outputs(infos, boxed, world.device)
        else:
            with nullcontext() if torch.is_grad_enabled() else without_view_relations():
                results = function(*boxed)
            results = [results] if isinstance(results, torch.Tensor) else results
            results = [r.view_as(r) if type(r) is GlobalTensor else r for r in results]
    return [wrap(result, spec) for result, spec in zip(results, specs, strict=True)]


def sum_terms(tensor: Any, name: str = "a function that is not linear") -> GlobalTensor:
    """``tensor`` with its partial sums summed, for the function ``name``."""
    spec = tensor._spec
    summed: GlobalTensor = box_implicitly(tensor, spec.layout.without_terms(), name) if spec.has_partial else tensor
    return summed


def scale_terms(total: GlobalTensor, divisor: GlobalTensor, dtype: torch.dtype) -> GlobalTensor:
    """``total / divisor`` in ``dtype``. Of a partial sum every term is divided."""
    layout = total._spec.layout
    return local_call(
        lambda term, by: (term / by).to(dtype),
        [total, divisor],
        [layout, divisor._spec.layout.broadcast()],
        (layout, total._spec.shape, dtype),
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
