"""The Triton kernels of ``cross_entropy_terms``: a row per program forward, a block of columns of a row backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workbench.kernels.launch import accumulator, ceil_div, launch
from workbench.kernels.triton_types import FLOATS

_MAX_COLUMNS = 4096
Terms = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@triton.jit
def _forward(
    logits: tl.tensor,
    target: tl.tensor,
    lse: tl.tensor,
    picked: tl.tensor,
    total: tl.tensor,
    first: tl.tensor,
    num_classes: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    wide: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Online softmax: keeps the largest logit and the sum of exponentials relative to it, rescaled as it grows."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((), float("-inf"), wide)
    exponentials = tl.full((), 0.0, wide)
    added = tl.full((), 0.0, wide)
    for start in range(0, num_classes, columns):
        column = start + tl.arange(0, columns).to(tl.int64)
        inside = column < num_classes
        x = tl.load(logits + row * row_stride + column * column_stride, mask=inside, other=0.0).to(wide)
        added += tl.sum(x, 0)
        x = tl.where(inside, x, float("-inf"))
        larger = tl.maximum(largest, tl.max(x, 0))
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # all logits so far are minus infinity
        exponentials = exponentials * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift), 0)
        largest = larger
    place = tl.load(target + row) - first
    here = (place >= 0) & (place < num_classes)
    at = tl.load(logits + row * row_stride + place * column_stride, mask=here, other=0.0).to(wide)
    any_possible = largest != float("-inf")
    tl.store(lse + row, tl.where(any_possible, largest + tl.log(tl.where(any_possible, exponentials, 1.0)), largest))
    tl.store(picked + row, at)
    tl.store(total + row, added)


@triton.jit
def _backward(
    logits: tl.tensor,
    target: tl.tensor,
    lse: tl.tensor,
    grad_lse: tl.tensor,
    grad_picked: tl.tensor,
    grad_total: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    num_classes: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    wide: tl.constexpr,
    narrow: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * columns + tl.arange(0, columns)
    inside = column < num_classes
    x = tl.load(logits + row * row_stride + column * column_stride, mask=inside, other=0.0).to(wide)
    grad = tl.exp(x - tl.load(lse + row)) * tl.load(grad_lse + row) + tl.load(grad_total + row)
    is_target = column == tl.load(target + row) - first
    grad += tl.where(is_target, tl.load(grad_picked + row), 0.0)
    tl.store(out + row * num_classes + column, grad.to(narrow), mask=inside)


def forward(logits: torch.Tensor, target: torch.Tensor, first: int) -> Terms:
    """See ``cross_entropy_terms``."""
    num_rows, num_classes = logits.shape
    dtype = accumulator(logits.dtype)
    lse = logits.new_full((num_rows,), float("-inf"), dtype=dtype)
    picked, total = (logits.new_zeros(num_rows, dtype=dtype) for _ in range(2))
    if logits.numel():
        launch(
            _forward, (num_rows,), logits,
            logits, target.contiguous(), lse, picked, total, first, num_classes, *logits.stride(), FLOATS[dtype],
            _columns(num_classes), num_warps=8,
        )  # fmt: skip
    return lse, picked, total


def backward(logits: torch.Tensor, target: torch.Tensor, first: int, lse: torch.Tensor, grads: Terms) -> torch.Tensor:
    """See ``cross_entropy_terms_backward``."""
    num_rows, num_classes = logits.shape
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if out.numel():
        columns = _columns(num_classes)
        rows = [grad.to(lse.dtype).contiguous() for grad in grads]
        launch(
            _backward, (num_rows, ceil_div(num_classes, columns)), logits,
            logits, target.contiguous(), lse, *rows, out, first, num_classes, *logits.stride(), FLOATS[lse.dtype],
            FLOATS[logits.dtype], columns, num_warps=8,
        )  # fmt: skip
    return out


def _columns(num_classes: int) -> int:
    return min(_MAX_COLUMNS, triton.next_power_of_2(max(1, num_classes)))
