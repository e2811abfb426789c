"""Functions that meet plain sparse tensors, such as the adjacency matrix of a graph, which every rank holds.

These stay plain and whole. Their product with a matrix works on its columns and on terms of a sum as they lie; all
other functions take whole operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from workbench.core.layout import Layout
from workbench.core.sbp import Split, broadcast, partial_sum
from workbench.errors import LayoutError
from workbench.tensors.boxing.box import box_implicitly
from workbench.tensors.conversion import refuse_nested
from workbench.tensors.dispatch.fallback import run_fallback
from workbench.tensors.dispatch.planning import Plan, operands_of
from workbench.tensors.dispatch.registry import fold_name
from workbench.tensors.global_tensor import GlobalTensor, local_torch, spec_of, wrap

PRODUCTS = frozenset({"matmul", "mm", "mv", "spmm", "_sparse_mm"})
"""Folded names of functions whose result has the columns of the second operand, and is linear in it."""
_KEPT = (partial_sum, Split(1))


def is_sparse(leaf: Any) -> bool:
    """Whether this is a plain tensor without strides: COO, CSR and their like."""
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, GlobalTensor) and leaf.layout is not torch.strided


def holds_sparse(args: Any, kwargs: Any) -> bool:
    """Whether one of the arguments is a plain sparse tensor."""
    return any(map(is_sparse, tree_leaves((args, kwargs))))


def call_beside_sparse(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``func``, whose global operands are on one placement.

    Raises:
        LayoutError: the sparse tensor requires a gradient.
    """
    operands, name = operands_of(args, kwargs), fold_name(func)
    world, placement = operands[0]._spec.world, operands[0]._spec.layout.placement
    args, kwargs = tree_map(lambda leaf: _checked(leaf, name.folded, world.device), (args, kwargs))
    if name.folded in PRODUCTS and args[-1] is operands[0] and not kwargs and placement.num_ranks == world.world_size:
        sbp = tuple(entry if entry in _KEPT else broadcast for entry in operands[0]._spec.layout.sbp)
        boxed = box_implicitly(operands[0], Layout(placement, sbp), name.folded)
        with local_torch():
            result = func(args[0], boxed)
        shape = args[0].shape[0], *boxed._spec.shape[1:]
        return wrap(result, spec_of(world, boxed._spec.layout, shape))
    targets = [operand._spec.layout.broadcast() for operand in operands]
    return run_fallback(Plan(None, targets, None, None, func, name, world), func, args, kwargs)


def _checked(leaf: Any, function: str, device: torch.device) -> Any:
    if not is_sparse(leaf):
        return leaf
    refuse_nested(leaf, f"{function}: an operand")
    if leaf.requires_grad and torch.is_grad_enabled():
        raise LayoutError(
            f"{function}: a sparse tensor of shape {tuple(leaf.shape)} requires a gradient, and meets a global tensor. "
            "Gradients of sparse tensors are not summed over ranks. Make it dense: x.to_dense()."
        )
    return leaf.to(device)
