"""A function call on a rank outside the placement: no data, but the same links in the autograd graph.

Every rank runs the whole program, so that boxings are reached in the same order everywhere, forward and backward. A
ghost's gradient is None from end to end: autograd still visits every node, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from workbench.core.layout import Shape
from workbench.runtime.tensor import GlobalTensor, Spec, ghost_storage, local_torch

TENSOR = object()
"""Stands among the leaves of a result where a tensor is."""
OutputInfo = tuple[Shape, torch.dtype, bool]
"""Logical shape, dtype and requires_grad of one result."""


def infer_outputs(
    func: Callable[..., Any], args: Any, kwargs: Any, with_grad: bool = False
) -> tuple[list[OutputInfo], Any, list[Any]]:
    """Run ``func`` on meta tensors of the logical shapes.

    Returns:
        info of every tensor in the result, the result's structure, and its leaves with ``TENSOR`` for tensors.
    """
    leaves, structure = tree_flatten((args, kwargs))
    memo: dict[int, torch.Tensor] = {}
    meta_leaves = [_as_meta(leaf, memo, with_grad) for leaf in leaves]
    meta_args, meta_kwargs = tree_unflatten(meta_leaves, structure)
    if meta_kwargs.get("device") is not None:
        meta_kwargs = {**meta_kwargs, "device": "meta"}
    with local_torch(), torch.set_grad_enabled(with_grad and torch.is_grad_enabled()):
        result = func(*meta_args, **meta_kwargs)
    out_leaves, out_structure = tree_flatten(result)
    infos = [
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) for leaf in out_leaves if isinstance(leaf, torch.Tensor)
    ]
    return infos, out_structure, [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in out_leaves]


def _as_meta(leaf: Any, memo: dict[int, torch.Tensor], with_grad: bool) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if id(leaf) not in memo:
        with local_torch():
            shape = leaf._spec.shape if isinstance(leaf, GlobalTensor) else leaf.shape
            meta = torch.empty(shape, dtype=leaf.dtype, device="meta")
            if with_grad and leaf.requires_grad:
                meta = meta.requires_grad_()
                meta = meta if leaf.is_leaf else meta.clone()  # in-place is legal on what is no leaf
            memo[id(leaf)] = meta
    return memo[id(leaf)]


class _Ghost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, infos: list[OutputInfo], device: torch.device, *inputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.leaves = [tensor for tensor in inputs if tensor.is_leaf and tensor.requires_grad]
        ctx.num_inputs = len(inputs)
        outputs = tuple(ghost_storage(shape, dtype, device) for shape, dtype, _ in infos)
        ctx.mark_non_differentiable(*(out for out, info in zip(outputs, infos, strict=True) if not info[2]))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        for leaf in ctx.leaves:
            leaf._ghost_grad = True  # its owner has a gradient now, so ``leaf.grad is None`` must agree
        return (None,) * (2 + ctx.num_inputs)


class _GhostInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, target: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.leaves = [tensor for tensor in inputs if tensor.is_leaf and tensor.requires_grad]
        ctx.num_inputs = len(inputs)
        ctx.mark_dirty(target)
        return target

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        for leaf in ctx.leaves:
            leaf._ghost_grad = True
        return (None,) * (1 + ctx.num_inputs)


def ghost_outputs(
    infos: list[OutputInfo], operands: list[GlobalTensor], specs: list[Spec], device: torch.device
) -> list[torch.Tensor]:
    """Plain ghost tensors for the results, linked to every operand that carries a gradient."""
    with local_torch():
        linked = [operand for operand in operands if operand.requires_grad] if any(info[2] for info in infos) else []
        if linked:
            return list(_Ghost.apply(infos, device, *linked))
        return [ghost_storage(shape, dtype, device) for shape, dtype, _ in infos]


def ghost_in_place(target: GlobalTensor, operands: list[GlobalTensor]) -> GlobalTensor:
    """Mirror an in-place operation on a ghost: no data, but the target's history continues from here."""
    with local_torch():
        others = [operand for operand in operands if operand is not target and operand.requires_grad]
        if torch.is_grad_enabled() and (others or target.requires_grad) and target.is_floating_point():
            _GhostInPlace.apply(target, *others)
    return target
