"""Gradient accumulation fusion: products and look-ups with large weights add to the weight's gradient in place.

torch makes the gradient of every micro-batch anew, as large as the weight, and adds it to that of the ones before: four
passes through memory for a table of which a micro-batch has touched some rows, and a second gradient at the peak. In a
scheduled step of several micro-batches, the first makes the gradient and the others add to it: rows to their rows, a
product into what it is added to. Small weights stay with torch: their gradients lie in the caches, and a function in
Python takes as long as it saves.

So do weights with hooks (sums over ranks wait for each gradient), backwards in two halves, checkpoints, autocast,
transforms of torch.func, complex numbers, blocks that run as plain torch, and tables on a GPU, where additions to rows
come in any order, or of 16 bits, in which a sum of many is lost beside few. A hook on the node that accumulates a
gradient, which nothing tells of, gets None from the second micro-batch on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from workbench.core import gradient_accumulation
from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.leaf_gradients import has_hooks, read_grad, will_accumulate

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def embedding(indices: torch.Tensor, weight: torch.Tensor, padding: int | None = None) -> torch.Tensor:
    """``F.embedding`` of plain indices or shards, and a local table."""
    running = _step_that_adds(weight)
    if running is None or weight.device.type == "cuda" or weight.element_size() < 4:
        return F.embedding(indices, weight, padding)
    found: torch.Tensor = _Embedding.apply(indices, weight, -1 if padding is None else padding, running)
    return found


def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` of shards."""
    running = _step_that_adds(weight)
    if running is None or input.dtype != weight.dtype or torch._C._is_any_autocast_enabled():
        return F.linear(input, weight, bias)
    found: torch.Tensor = _Linear.apply(input, weight, bias, running)
    return found


def _step_that_adds(weight: Any) -> Any:
    """The scheduled step whose micro-batches accumulate in place; None where torch makes the weight's gradient."""
    if weight.numel() < gradient_accumulation.SMALLEST_NUMEL or not weight.is_floating_point():
        return None
    if not (isinstance(weight, GlobalTensor) and weight._is_param and weight.is_leaf and weight.requires_grad):
        return None  # it may be made of a parameter
    running = weight._spec.world.context.running
    if running is None or running.num_micro_batches == 1 or running.splits_backward or not torch.is_grad_enabled():
        return None
    # A block that is being recorded must show torch's functions, a recomputation must save the same tensors, and a
    # transform must see functions that it knows.
    is_observed = running.observer is not None or torch._C._are_functorch_transforms_active()
    hooks = _top_hooks(True)
    is_observed = is_observed or (
        hooks is not None and not getattr(getattr(hooks[0], "__self__", None), "only_moves", False)
    )
    return None if is_observed else running


def _gradient_to_add_to(weight: Any, running: Any, ctx: Any) -> torch.Tensor | None:
    """The weight's gradient so far, where this backward is about to add to it and nobody has to see what.

    A hook or a function's backward may ask for other gradients meanwhile (``torch.autograd.grad``), which leave it.
    """
    if not running.runs_backward or torch.is_grad_enabled() or has_hooks(weight):
        return None
    if not any(getattr(node, "variable", None) is weight and will_accumulate(node) for node, _ in ctx.next_functions):
        return None
    found = read_grad(weight)
    fits = found is not None and found.dtype == weight.dtype and found.is_contiguous() and not found.requires_grad
    return found if fits else None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, weight: torch.Tensor, padding: int, running: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        ctx.weight, ctx.padding, ctx.running = weight, padding, running
        return torch.embedding(weight, indices, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (indices,), weight, (grad,) = ctx.saved_tensors, ctx.weight, grads
        if grad is None:  # the result's reader has stopped the gradient: no gradient, not zeros
            return None, None, None, None
        with local_torch():
            total = _gradient_to_add_to(weight, ctx.running, ctx)
            if total is None:
                made = torch.ops.aten.embedding_dense_backward(grad, indices, weight.shape[0], ctx.padding, False)
                return None, made, None, None
            rows = grad.reshape(-1, weight.shape[1])
            if ctx.padding >= 0:
                rows = rows.masked_fill((indices == ctx.padding).reshape(-1, 1), 0)
            total.index_add_(0, indices.reshape(-1), rows)
        return None, None, None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, running: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        # As in torch, code may write a weight that backward does not read
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.weight, ctx.running = weight, running
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        if grad is None:
            return None, None, None, None
        with local_torch():
            rows, inputs = grad.reshape(-1, ctx.weight.shape[0]), x.reshape(-1, ctx.weight.shape[1])
            of_x = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
            of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
            total = _gradient_to_add_to(ctx.weight, ctx.running, ctx)
            if total is None:
                return of_x, rows.t() @ inputs, of_bias, None
            torch.addmm(total, rows.t(), inputs, out=total)  # torch's counter of operations does not know addmm_
        return of_x, None, of_bias, None
