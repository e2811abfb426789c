"""Gradients in other layouts than autograd's dual one, for functions whose backward is not torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from workbench.core.layout import Layout
from workbench.errors import LayoutError
from workbench.tensors.boxing.box import box
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, spec_of, wrap
from workbench.tensors.leaf_gradients import mark_placeholder_leaves


class _GradientLayout(torch.autograd.Function):
    """Nothing forward; backward, the gradient is taken to lie as ``source`` and boxed to ``target``."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Spec, source: Layout, target: Layout, name: str) -> torch.Tensor:
        ctx.spec, ctx.source, ctx.target, ctx.name = spec, source, target, name
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        spec = ctx.spec
        with local_torch():
            gradient = wrap(grads[0].view_as(grads[0]), spec_of(spec.world, ctx.source, spec.shape))
            return box(gradient, ctx.target, ctx.name).as_subclass(torch.Tensor), None, None, None, None


def box_gradient_of(tensor: GlobalTensor, source: Layout, target: Layout, name: str) -> GlobalTensor:
    """``tensor``, whose gradient comes as ``source`` and goes on as ``target``."""
    with local_torch():
        if not (tensor.requires_grad and torch.is_grad_enabled()):
            return tensor
        return wrap(_GradientLayout.apply(tensor, tensor._spec, source, target, name), tensor._spec)


class _DividedGradient(torch.autograd.Function):
    """Nothing forward; backward, the gradient divided by what ``divisor`` holds by then."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, divisor: list[int]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.divisor = divisor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is None:  # of a placeholder
            mark_placeholder_leaves(ctx)
            return None, None
        return grads[0] / ctx.divisor[0], None


def with_whole_gradients(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """``function(*args)``, whose backward is given whole gradients and no terms of a sum.

    Of a result that lies as B, every rank then computes the same gradients of the operands; each passes on its share.
    """
    num_copies: list[int] = []

    def divide(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with local_torch():
            if not leaf.requires_grad:
                return leaf
            divided = _DividedGradient.apply(leaf, num_copies)
            return wrap(divided, leaf._spec) if isinstance(leaf, GlobalTensor) else divided

    def make_whole(leaf: Any) -> Any:
        if not isinstance(leaf, GlobalTensor):
            return leaf
        layout = leaf._spec.layout
        if num_copies and num_copies != [layout.num_replicas]:
            raise LayoutError(
                f"a custom autograd.Function whose backward is not linear: its results lie in {num_copies[0]} and in "
                f"{layout.num_replicas} copies ({layout}), and one backward serves both. Declare another equation with "
                "wb.register_rule, or its layouts with wb.local_map."
            )
        num_copies[:] = [layout.num_replicas]
        dual = layout.dual()
        whole = dual.without_terms()
        return leaf if whole == dual else box_gradient_of(leaf, dual, whole, "a backward that is not linear")

    return tree_map(make_whole, function(*tree_map(divide, args)))
