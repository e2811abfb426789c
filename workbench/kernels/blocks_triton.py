"""The Triton kernel of ``blocks``: all blocks in one launch, from a table of addresses, sizes and strides.

A block is seen as rows and columns: the last dim after merging is the columns, the others are rows, so that the
divisions that find an element's place are done once per row. Pure copies move bits of the same width, whatever the
dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from workbench.kernels.launch import accumulator, ceil_div, identity

_NUM_DIMS = 4
_MAX_COLUMNS = 1024
_ELEMENTS = 2048
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REDUCTION_CODES = {"none": 0, "sum": 0, "max": 1, "min": 2}
_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}


@triton.jit
def _combine(a: Any, b: Any, reduction: tl.constexpr) -> Any:
    if reduction == 1:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    if reduction == 2:
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    return a + b


@triton.jit
def _move(
    blocks: Any,
    sources: Any,
    num_row_blocks: Any,
    element: tl.constexpr,
    total: tl.constexpr,
    reduction: tl.constexpr,
    fill: tl.constexpr,
    is_copy: tl.constexpr,
    rows_per_program: tl.constexpr,
    columns_per_program: tl.constexpr,
) -> None:
    """One program moves ``rows_per_program`` x ``columns_per_program`` elements of one block.

    A row of ``blocks``: target address, number of sources, four sizes, four strides of the target, index of the first
    source. A row of ``sources``: address, four strides.
    """
    block = blocks + tl.program_id(0) * 11
    target = tl.load(block).to(tl.pointer_type(element))
    count = tl.load(block + 1)
    size0, size1 = tl.load(block + 2), tl.load(block + 3)
    size2, size3 = tl.load(block + 4), tl.load(block + 5)
    first = tl.load(block + 10)
    row = tl.program_id(1).to(tl.int64) * rows_per_program + tl.arange(0, rows_per_program)
    column = tl.program_id(2).to(tl.int64) * columns_per_program + tl.arange(0, columns_per_program)
    inside = (row < size0 * size1 * size2)[:, None] & (column < size3)[None, :]
    i2 = row % tl.maximum(size2, 1)
    i1 = (row // tl.maximum(size2, 1)) % tl.maximum(size1, 1)
    i0 = row // tl.maximum(size2 * size1, 1)
    place = (i0 * tl.load(block + 6) + i1 * tl.load(block + 7) + i2 * tl.load(block + 8))[:, None]
    place += (column * tl.load(block + 9))[None, :]
    value = tl.full((rows_per_program, columns_per_program), fill, total)
    for k in range(first, first + count):
        source = sources + k * 5
        start = tl.load(source).to(tl.pointer_type(element))
        at = (i0 * tl.load(source + 1) + i1 * tl.load(source + 2) + i2 * tl.load(source + 3))[:, None]
        at += (column * tl.load(source + 4))[None, :]
        term = tl.load(start + at, mask=inside).to(total)
        value = term if is_copy else _combine(value, term, reduction)
    tl.store(target + place, value.to(element), mask=inside)


def launch(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], counts: Sequence[int], reduction: str
) -> bool:
    """Fill the targets; False where the kernel has no way (more than four dims that do not merge, complex sums)."""
    is_copy = all(count == 1 for count in counts)
    dtype = targets[0].dtype
    if is_copy and dtype.itemsize in _INTEGERS:
        dtype = _INTEGERS[dtype.itemsize]
        targets, sources = [t.view(dtype) for t in targets], [s.view(dtype) for s in sources]
    if dtype not in _TYPES:
        return False
    table = _tables(targets, sources, counts)
    if table is None:
        return False
    blocks, addresses, num_rows, num_columns = table
    if not num_rows or not num_columns:
        return True
    columns = min(_MAX_COLUMNS, triton.next_power_of_2(num_columns))
    rows = max(1, _ELEMENTS // columns)
    device = targets[0].device
    grid = (len(blocks), ceil_div(num_rows, rows), ceil_div(num_columns, columns))
    total = dtype if is_copy else accumulator(dtype)
    _move[grid](
        torch.tensor(blocks, dtype=torch.int64).to(device, non_blocking=True),
        torch.tensor(addresses or [[0] * 5], dtype=torch.int64).to(device, non_blocking=True),
        ceil_div(num_rows, rows),
        _TYPES[dtype],
        _TYPES[total],
        _REDUCTION_CODES[reduction],
        _fill(dtype, reduction),
        is_copy,
        rows,
        columns,
    )
    return True


def _fill(dtype: torch.dtype, reduction: str) -> float:
    return float(identity(dtype, reduction)) if dtype.is_floating_point else int(identity(dtype, reduction))


def _tables(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], counts: Sequence[int]
) -> tuple[list[list[int]], list[list[int]], int, int] | None:
    blocks: list[list[int]] = []
    addresses: list[list[int]] = []
    num_rows = num_columns = start = 0
    for target, count in zip(targets, counts, strict=True):
        terms = sources[start : start + count]
        start += count
        if not target.numel():
            continue
        merged = _merge(target.shape, [target.stride(), *(term.stride() for term in terms)])
        if merged is None:
            return None
        sizes, strides = merged
        blocks.append([target.data_ptr(), count, *sizes, *strides[0], len(addresses)])
        addresses += [[term.data_ptr(), *stride] for term, stride in zip(terms, strides[1:], strict=True)]
        num_rows, num_columns = max(num_rows, sizes[0] * sizes[1] * sizes[2]), max(num_columns, sizes[3])
    return blocks, addresses, num_rows, num_columns


def _merge(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]] | None:
    """The same elements with dims merged that lie behind one another in all tensors, filled up to four dims."""
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(m[-1] == s[dim] * size for m, s in zip(merged, strides, strict=True)):
            sizes[-1] *= size
            for m, s in zip(merged, strides, strict=True):
                m[-1] = s[dim]
        else:
            sizes.append(size)
            for m, s in zip(merged, strides, strict=True):
                m.append(s[dim])
    missing = _NUM_DIMS - len(sizes)
    if missing < 0:
        return None
    return [1] * missing + sizes, [[0] * missing + m for m in merged]


__all__ = ["launch"]
