"""An embedding over a slice of the table's rows: rows of other ranks give zeros, so the results sum to the embedding.

The gradient of a row sums the gradients of its positions in order, without atomics: it has the same bits on every run.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.kernels.launch import can_launch


@torch.library.custom_op("workbench::embedding_rows", mutates_args=())
def embedding_rows(weight: torch.Tensor, indices: torch.Tensor, first: int, padding: int = -1) -> torch.Tensor:
    """Rows ``indices - first`` of ``weight``; zeros for indices outside the slice.

    Args:
        weight: (rows of this slice, width).
        indices: (positions,), int64, row numbers of the full table.
        first: number of the slice's first row.
        padding: number of the row of the full table that gets no gradient; -1 if all rows do.

    Returns:
        (positions, width).

    >>> embedding_rows(torch.ones(2, 3), torch.tensor([0, 2]), 2).tolist()
    [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """
    if can_launch(weight):
        from workbench.kernels.embedding_rows_triton import forward

        return forward(weight, indices, first)
    return embedding_rows_reference(weight, indices, first)


@embedding_rows.register_fake
def _(weight: torch.Tensor, indices: torch.Tensor, *_: int) -> torch.Tensor:
    return weight.new_empty(indices.shape[0], weight.shape[1])


@torch.library.custom_op("workbench::embedding_rows_backward", mutates_args=())
def embedding_rows_backward(
    grad: torch.Tensor, indices: torch.Tensor, first: int, num_rows: int, padding: int = -1
) -> torch.Tensor:
    """Gradient of the slice: for each of its ``num_rows`` rows, the sum over the positions with its index."""
    if can_launch(grad):
        from workbench.kernels.embedding_rows_triton import backward

        return backward(grad, indices, first, num_rows, padding)
    return embedding_rows_backward_reference(grad, indices, first, num_rows, padding)


@embedding_rows_backward.register_fake
def _(grad: torch.Tensor, indices: torch.Tensor, first: int, num_rows: int, *_: int) -> torch.Tensor:
    return grad.new_empty(num_rows, grad.shape[1])


def _save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    weight, indices, ctx.first, ctx.padding = inputs
    ctx.num_rows = weight.shape[0]
    ctx.save_for_backward(indices)


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    (indices,) = ctx.saved_tensors
    return embedding_rows_backward(grad, indices, ctx.first, ctx.num_rows, ctx.padding), None, None, None


embedding_rows.register_autograd(_differentiate, setup_context=_save)


def _save_backward(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    _, indices, ctx.first, _, ctx.padding = inputs
    ctx.save_for_backward(indices)


def _differentiate_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
    """The sum over positions is linear; its transpose is a lookup."""
    (indices,) = ctx.saved_tensors
    learned = indices.masked_fill(indices == ctx.padding, -1)  # -1 is outside every slice and gives zeros
    return embedding_rows(grad, learned, ctx.first), None, None, None, None


embedding_rows_backward.register_autograd(_differentiate_backward, setup_context=_save_backward)


def embedding_rows_reference(weight: torch.Tensor, indices: torch.Tensor, first: int) -> torch.Tensor:
    """``embedding_rows`` in torch."""
    place = indices - first
    inside = (place >= 0) & (place < weight.shape[0])
    out = weight.new_zeros(indices.shape[0], weight.shape[1])
    out[inside] = weight[place[inside]]
    return out


def embedding_rows_backward_reference(
    grad: torch.Tensor, indices: torch.Tensor, first: int, num_rows: int, padding: int = -1
) -> torch.Tensor:
    """``embedding_rows_backward`` in torch; low precision is summed in 32 bits."""
    place = indices - first
    inside = (place >= 0) & (place < num_rows) & (indices != padding)
    wide = grad.float() if grad.dtype.itemsize < 4 else grad
    out = wide.new_zeros(num_rows, grad.shape[1])
    return out.index_add_(0, place[inside], wide[inside]).to(grad.dtype)
