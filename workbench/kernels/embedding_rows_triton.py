"""The Triton kernels of ``embedding_rows``; backward sorts positions by row, and one program sums the run of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from workbench.kernels.launch import ceil_div, launch
from workbench.kernels.triton_types import FLOATS, wide_type

_MAX_COLUMNS = 512


@triton.jit
def _forward(
    weight: tl.tensor,
    indices: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    columns: tl.constexpr,
) -> None:
    position = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * columns + tl.arange(0, columns)
    row = tl.load(indices + position) - first + tl.zeros((columns,), tl.int64)
    inside = column < width
    here = inside & (row >= 0) & (row < num_rows)
    value = tl.load(weight + row * row_stride + column * column_stride, mask=here, other=0.0)
    tl.store(out + position * width + column, value, mask=inside)


@triton.jit
def _backward(
    grad: tl.tensor,
    rows: tl.tensor,
    order: tl.tensor,
    runs: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    padding: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    wide: tl.constexpr,
    narrow: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """``rows`` is sorted; the program at the start of a run of equal rows sums the run, the others do nothing.

    ``runs`` holds the number of positions from here on with the same row.
    """
    position = tl.program_id(0)
    number = tl.load(rows + position)
    before = tl.load(rows + tl.maximum(position - 1, 0))
    row = (number - first).to(tl.int64)
    starts_run = (position == 0) | (number != before)
    if starts_run & (number != padding) & (row >= 0) & (row < num_rows):
        column = tl.program_id(1).to(tl.int64) * columns + tl.arange(0, columns)
        inside = column < width
        total = tl.zeros((columns,), wide)
        at = position
        stop = position + tl.load(runs + position)
        while at < stop:
            source = tl.load(order + at)
            total += tl.load(grad + source * row_stride + column * column_stride, mask=inside, other=0.0).to(wide)
            at += 1
        tl.store(out + row * width + column, total.to(narrow), mask=inside)


def forward(weight: torch.Tensor, indices: torch.Tensor, first: int) -> torch.Tensor:
    """See ``embedding_rows``."""
    num_rows, width = weight.shape
    out = weight.new_empty(indices.shape[0], width)
    if out.numel():
        columns = _columns(width)
        launch(
            _forward, (indices.shape[0], ceil_div(width, columns)), weight,
            weight, indices.contiguous(), out, first, num_rows, width, *weight.stride(), columns,
        )  # fmt: skip
    return out


def backward(grad: torch.Tensor, indices: torch.Tensor, first: int, num_rows: int, padding: int) -> torch.Tensor:
    """See ``embedding_rows_backward``."""
    num_positions, width = grad.shape
    out = grad.new_zeros(num_rows, width)
    if grad.numel() and num_rows:
        rows, order = indices.sort(stable=True)
        runs = torch.searchsorted(rows, rows, right=True) - torch.arange(num_positions, device=rows.device)
        columns = _columns(width)
        launch(
            _backward, (num_positions, ceil_div(width, columns)), grad,
            grad, rows, order, runs, out, first, padding, num_rows, width, *grad.stride(),
            wide_type(grad.dtype), FLOATS[grad.dtype], columns,
        )  # fmt: skip
    return out


def _columns(width: int) -> int:
    return min(_MAX_COLUMNS, triton.next_power_of_2(width))
