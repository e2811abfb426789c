"""The Triton kernel of ``blocks``: all blocks in one launch, from a table of addresses, sizes and strides.

A block has rows and columns: the last dim after merging is the columns, the others are rows, so that the divisions for
an element's offset are done once per row. Pure copies move bits of the same width, whatever the dtype. Where the
columns of all blocks are contiguous and every row starts at a multiple of 16 bytes, alignment hints let the compiler
move 16 bytes at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from workbench.kernels.launch import accumulator, ceil_div, identity_element
from workbench.kernels.launch import launch as launch_kernel
from workbench.kernels.triton_types import TYPES

_NUM_DIMS = 4
_ELEMENTS = 2048
"""Elements per program."""
_MAX_BLOCKS = 65_535
"""Largest number of programs along y."""
_VECTOR_BYTES = 16
_MAX_CACHED = 1024
"""Moves whose tables are kept."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_REDUCTION_CODES = {"none": 0, "sum": 0, "max": 1, "min": 2}


@triton.jit
def _combine(a: tl.tensor, b: tl.tensor, reduction: tl.constexpr) -> tl.tensor:
    if reduction == 1:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    if reduction == 2:
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    return a + b


@triton.jit
def _move(
    blocks: tl.tensor,
    sources: tl.tensor,
    element: tl.constexpr,
    total: tl.constexpr,
    reduction: tl.constexpr,
    fill: tl.constexpr,
    is_copy: tl.constexpr,
    rows_per_program: tl.constexpr,
    columns_per_program: tl.constexpr,
    vector: tl.constexpr,
    index: tl.constexpr,
) -> None:
    """One program moves ``rows_per_program`` x ``columns_per_program`` elements of one block.

    A row of ``blocks``: target address, number of sources, four sizes, four strides of the target, index of the first
    source, column programs. A row of ``sources``: address, four strides. ``vector``: a number of elements that divides
    all strides but the last, all columns and all addresses; 0 where the columns are not contiguous. ``index``: a type
    for the number of any element.
    """
    block = blocks + tl.program_id(1).to(tl.int64) * 12
    target = tl.load(block).to(tl.pointer_type(element))
    count = tl.load(block + 1)
    size0, size1 = tl.load(block + 2).to(index), tl.load(block + 3).to(index)
    size2, size3 = tl.load(block + 4).to(index), tl.load(block + 5).to(index)
    first, num_column_programs = tl.load(block + 10), tl.load(block + 11).to(index)
    program = tl.program_id(0).to(index)
    row = (program // num_column_programs) * rows_per_program + tl.arange(0, rows_per_program)
    column = (program % num_column_programs) * columns_per_program + tl.arange(0, columns_per_program)
    if vector > 1:
        size3 = tl.multiple_of(size3, vector)
        target = tl.multiple_of(target, 16)
    inside = (row < size0 * size1 * size2)[:, None] & (column < size3)[None, :]
    i2 = (row % size2).to(tl.int64)
    i1 = ((row // size2) % size1).to(tl.int64)
    i0 = (row // (size2 * size1)).to(tl.int64)
    place = i0 * tl.load(block + 6) + i1 * tl.load(block + 7) + i2 * tl.load(block + 8)
    if vector > 1:
        place = tl.multiple_of(place, vector)
    if vector > 0:
        to = place[:, None] + column[None, :]
    else:
        to = place[:, None] + (column * tl.load(block + 9))[None, :]
    value = tl.full((rows_per_program, columns_per_program), fill, total)
    for k in range(first, first + count):
        source = sources + k * 5
        start = tl.load(source).to(tl.pointer_type(element))
        at = i0 * tl.load(source + 1) + i1 * tl.load(source + 2) + i2 * tl.load(source + 3)
        if vector > 1:
            start = tl.multiple_of(start, 16)
            at = tl.multiple_of(at, vector)
        if vector > 0:
            origin = at[:, None] + column[None, :]
        else:
            origin = at[:, None] + (column * tl.load(source + 4))[None, :]
        term = tl.load(start + origin, mask=inside).to(total)
        value = term if is_copy else _combine(value, term, reduction)
    tl.store(target + to, value.to(element), mask=inside)


_Tensor = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Address, sizes and strides."""


def launch(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], counts: Sequence[int], reduction: str
) -> bool:
    """Fill the targets; False for unsupported cases (more than four dims that do not merge, complex sums)."""
    device = targets[0].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    tensors = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in (*targets, *sources)]
    launches = _launches(tuple(tensors), tuple(counts), reduction, targets[0].dtype, device, stream)
    if launches is None:
        return False
    for grid, arguments in launches:
        launch_kernel(_move, grid, targets[0], *arguments)
    return True


@functools.lru_cache(_MAX_CACHED)
def _launches(
    tensors: tuple[_Tensor, ...],
    counts: tuple[int, ...],
    reduction: str,
    dtype: torch.dtype,
    device: torch.device,
    stream: int,
) -> list[tuple[tuple[int, int], tuple[Any, ...]]] | None:
    """Grids and arguments of the kernel. The allocator gives the tensors of a step the addresses of the last step's, so
    most steps find their tables on the device.

    ``stream`` is in the key because a table may be read once the stream that it was copied on has reached it.
    """
    is_copy = all(count == 1 for count in counts)
    if dtype == torch.bool and reduction == "sum":
        reduction = "max"
    fill = identity_element(dtype, reduction)
    if is_copy or dtype == torch.bool:
        dtype = _INTEGERS.get(dtype.itemsize, dtype)
    rows = _rows(tensors[: len(counts)], tensors[len(counts) :], counts) if dtype in TYPES else None
    if rows is None:
        return None
    blocks, addresses = rows
    columns = _columns([(math.prod(block[2:5]), block[5]) for block in blocks])
    rows_per_program = _ELEMENTS // columns
    for block in blocks:
        block.append(ceil_div(block[5], columns))
    total = dtype if is_copy else accumulator(dtype)
    constants = (
        TYPES[dtype], TYPES[total], _REDUCTION_CODES[reduction],
        float(fill) if dtype.is_floating_point else int(fill), is_copy, rows_per_program, columns,
        _vector(blocks, addresses, dtype.itemsize),
    )  # fmt: skip
    launches = []
    for start in range(0, len(blocks), _MAX_BLOCKS):
        part = blocks[start : start + _MAX_BLOCKS]
        programs = max(ceil_div(math.prod(block[2:5]), rows_per_program) * block[11] for block in part)
        index = tl.int32 if programs * _ELEMENTS < 2**31 else tl.int64
        launches.append(((programs, len(part)), (*_on_device(part, addresses, device), *constants, index)))
    return launches


def _vector(blocks: list[list[int]], addresses: list[list[int]], itemsize: int) -> int:
    """See ``_move``."""
    if any(stride != 1 for stride in (*(block[9] for block in blocks), *(source[4] for source in addresses))):
        return 0
    wide = _VECTOR_BYTES // itemsize
    counted = [number for block in blocks for number in block[5:9]] + [n for source in addresses for n in source[1:4]]
    starts = [row[0] for row in (*blocks, *addresses)]
    is_aligned = all(n % wide == 0 for n in counted) and all(start % _VECTOR_BYTES == 0 for start in starts)
    return wide if is_aligned else 1


def _on_device(
    blocks: list[list[int]], addresses: list[list[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tables on the device, after one copy."""
    numbers = [number for row in (*blocks, *addresses) for number in row]
    tables = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    return tables[: len(blocks) * len(blocks[0])], tables[len(blocks) * len(blocks[0]) :]


def _columns(shapes: list[tuple[int, int]]) -> int:
    """The number of columns per program with the fewest idle lanes; of equally good ones, the largest."""
    choices = [_ELEMENTS >> shift for shift in range(_ELEMENTS.bit_length())]
    return min(choices, key=lambda c: sum(ceil_div(n, c) * ceil_div(m, _ELEMENTS // c) for m, n in shapes))


def _rows(
    targets: Sequence[_Tensor], sources: Sequence[_Tensor], counts: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]] | None:
    """The rows of ``blocks`` without the last number, and of ``sources``; None for unsupported sizes."""
    blocks: list[list[int]] = []
    addresses: list[list[int]] = []
    start = 0
    for (address, shape, strides), count in zip(targets, counts, strict=True):
        terms = sources[start : start + count]
        start += count
        if 0 in shape:
            continue
        merged = _merge(shape, [strides, *(term[2] for term in terms)])
        if merged is None:
            return None
        sizes, (own, *others) = merged
        blocks.append([address, count, *sizes, *own, len(addresses)])
        addresses += [[term[0], *other] for term, other in zip(terms, others, strict=True)]
    return blocks, addresses


def _merge(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]] | None:
    """Sizes and strides with dims merged that are contiguous to each other in all tensors, padded to four dims.

    Dims are in the memory order of the first tensor, the target. None where more than four dims remain.
    """
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for dim in sorted(range(len(shape)), key=lambda dim: -strides[0][dim]):
        size = shape[dim]
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
    if not sizes:  # one element: any stride is right, and 1 allows vector access
        return [1] * _NUM_DIMS, [[0] * (_NUM_DIMS - 1) + [1] for _ in merged]
    return [1] * missing + sizes, [[0] * missing + m for m in merged]
