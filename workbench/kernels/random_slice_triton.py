"""The Triton kernels of ``random_slice``: each lane computes the numbers of one counter, which are four in a row.

A row is the innermost dim of the shard after merging, whose positions are consecutive in the logical tensor. A lane
takes the part of a row that one counter of Philox covers; where a row begins or ends between two counters, some of its
four numbers are not stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from workbench.kernels.launch import ceil_div, float64_bits, launch
from workbench.kernels.philox_triton import bound_of, in_order, is_below, words
from workbench.kernels.triton_types import FLOATS, TYPES, wide_type

_NUM_OUTER = 3
_UNIFORM, _BERNOULLI, _INTEGERS, _DROPOUT = 0, 2, 3, 4
_COUNTERS = 512
"""Counters per program."""
_MOST_LANES = 1.25
"""Lanes per counter, up to which each row has programs of its own: the last of a row has lanes that do nothing."""
_PLACE = ["first", "size", "row_counters", "num_counters", "size0", "size1", "stride0", "stride1", "stride2"]
_SCALARS = ["key", *_PLACE, "a", "b"]
"""Arguments that change between calls: Triton must not compile again because one of them is 1 or even."""


@triton.jit
def _place(
    first: tl.tensor,
    size: tl.tensor,
    row_counters: tl.tensor,
    num_counters: tl.tensor,
    size0: tl.tensor,
    size1: tl.tensor,
    stride0: tl.tensor,
    stride1: tl.tensor,
    stride2: tl.tensor,
    num_outer: tl.constexpr,
    is_aligned: tl.constexpr,
    in_rows: tl.constexpr,
    index: tl.constexpr,
    counters: tl.constexpr,
) -> tl.tensor:
    """The counters of this program, and of the four numbers of each: their elements in the shard, and which to store.

    ``first`` to ``index`` describe the shard, see ``_Place``.
    """
    if in_rows:  # a program has counters of one row, and divides once
        program, per_row = tl.program_id(0).to(index), tl.cdiv(row_counters.to(index), counters)
        row = program // per_row
        in_row = (program - row * per_row) * counters + tl.arange(0, counters).to(index)
        limit = tl.where(in_row < row_counters.to(index), size, 0).to(index)
    else:
        lane = tl.program_id(0).to(index) * counters + tl.arange(0, counters).to(index)
        row, in_row = lane * 0, lane
        if num_outer > 0:
            row = lane // row_counters.to(index)
            in_row = lane - row * row_counters.to(index)
        limit = tl.where(lane < num_counters.to(index), size, 0).to(index)
    position = first + (row * 0).to(tl.int64)
    if num_outer == 1:
        position += row.to(tl.int64) * stride0
    if num_outer > 1:
        rest = row // size0.to(index)
        position += (row - rest * size0.to(index)).to(tl.int64) * stride0
        if num_outer == 2:
            position += rest.to(tl.int64) * stride1
        else:
            last = rest // size1.to(index)
            position += (rest - last * size1.to(index)).to(tl.int64) * stride1 + last.to(tl.int64) * stride2
    four = tl.arange(0, 4)[None, :].to(index)
    start, column = row * size.to(index), in_row * 4
    if is_aligned:
        start = tl.multiple_of(start, 4)
        inside = (column < limit)[:, None] & (four < 4)
    else:
        column -= (position & 3).to(index)  # in front of the row it wraps, to beyond the row's end
        inside = column[:, None] + four < limit[:, None]
    return (position >> 2) + in_row.to(tl.int64), (start + column)[:, None] + four, inside


@triton.jit
def _double(bits: tl.tensor) -> tl.tensor:
    """The double with these 64 bits; a float argument would have 32 bits."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _unit(word: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """float32 in [0, 1) from the top ``bits`` of a word."""
    return (word >> (32 - bits)).to(tl.int32).to(tl.float32) * (1.0 / (1 << bits))


@triton.jit
def _joined(high: tl.tensor, low: tl.tensor) -> tl.tensor:
    """64 bits from two words."""
    return (high.to(tl.uint64) << 32) | low.to(tl.uint64)


@triton.jit
def _normal_pair(radius: tl.tensor, angle: tl.tensor, wide: tl.constexpr) -> tl.tensor:
    """Two normal numbers from two words."""
    length = tl.sqrt(-2.0 * tl.log((radius.to(tl.int64).to(wide) + 1.0) * (1.0 / (1 << 32))))
    turn = angle.to(tl.int64).to(wide) * (6.283185307179586 / (1 << 32))
    return length * tl.cos(turn), length * tl.sin(turn)


@triton.jit(do_not_specialize=_SCALARS)
def _fill(
    out: tl.tensor,
    given: tl.tensor,
    key: tl.tensor,
    first: tl.tensor,
    size: tl.tensor,
    row_counters: tl.tensor,
    num_counters: tl.tensor,
    size0: tl.tensor,
    size1: tl.tensor,
    stride0: tl.tensor,
    stride1: tl.tensor,
    stride2: tl.tensor,
    num_outer: tl.constexpr,
    is_aligned: tl.constexpr,
    in_rows: tl.constexpr,
    index: tl.constexpr,
    a: tl.tensor,
    b: tl.tensor,
    kind: tl.constexpr,
    bits: tl.constexpr,
    wide: tl.constexpr,
    element: tl.constexpr,
    counters: tl.constexpr,
) -> None:
    """``a`` and ``b``: lower bound and span of uniform numbers (doubles, as bits) or integers, mean and standard
    deviation, or a probability (see ``is_below``) and, for dropout of ``given``, the scale of the elements that are
    kept; ``wide``: the type of the computation.
    """
    counter, at, inside = _place(
        first, size, row_counters, num_counters, size0, size1, stride0, stride1, stride2, num_outer, is_aligned,
        in_rows, index, counters,
    )  # fmt: skip
    w, x, y, z = words(key, counter, 0)
    if kind == 4:
        kept = tl.load(given + at, mask=inside, other=0.0).to(wide) * _double(b).to(wide)
        value = tl.where(is_below(in_order(w, x, y, z, counters, 4), a), kept, 0.0)
    elif kind == 3:
        joined = in_order(_joined(w, x), _joined(x, w), _joined(y, z), _joined(z, y), counters, 4)
        value = (joined % b.to(tl.uint64)).to(tl.int64) + a
    elif kind == 2:
        value = tl.where(is_below(in_order(w, x, y, z, counters, 4), a), 1.0, 0.0)
    elif kind == 1:
        p, q = _normal_pair(w, x, wide)
        r, s = _normal_pair(y, z, wide)
        value = _double(a).to(wide) + _double(b).to(wide) * in_order(p, q, r, s, counters, 4)
    elif bits == 53:
        w2, x2, y2, z2 = words(key, counter, 1)
        joined = in_order(_joined(w, w2), _joined(x, x2), _joined(y, y2), _joined(z, z2), counters, 4)
        value = (joined >> 11).to(tl.int64).to(tl.float64) * (1.0 / (1 << 53)) * _double(b) + _double(a)
    else:
        value = _unit(in_order(w, x, y, z, counters, 4), bits) * _double(b).to(wide) + _double(a).to(wide)
    tl.store(out + at, value.to(element), mask=inside)


_BITS = {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}


def fill(out: torch.Tensor, kind: int, key: int, first: int, strides: Sequence[int], low: float, high: float) -> bool:
    """See ``fill_random``; ``kind`` is an index of ``KINDS``. False for unsupported cases."""
    place = _describe(out.shape, first, strides)
    if kind == _INTEGERS and not _fits(out.dtype, int(low), int(high)):
        return False
    if out.dtype == torch.bool:
        out = out.view(torch.uint8)
    if place is None or out.dtype not in TYPES or not out.is_contiguous():
        return False
    if kind == _INTEGERS:
        a, b = int(low), int(high) - int(low)
    elif kind == _BERNOULLI:
        a, b = bound_of(low), 0
    else:
        a, b = float64_bits(low), float64_bits(high - low if kind == _UNIFORM else high)
    launch(
        _fill, place.grid, out,
        out, out, key, *place.arguments, a, b, kind, _BITS.get(out.dtype, 24), wide_type(out.dtype), TYPES[out.dtype],
        _COUNTERS,
    )  # fmt: skip
    return True


def _fits(dtype: torch.dtype, low: int, high: int) -> bool:
    """Whether the kernel supports integers of this range; a bool needs a range within [0, 2)."""
    return 0 < high - low < 2**63 and (dtype != torch.bool or (low >= 0 and high <= 2))


def dropout(x: torch.Tensor, key: int, first: int, strides: Sequence[int], probability: float) -> torch.Tensor | None:
    """See ``dropout_slice``; None for unsupported cases."""
    place = _describe(x.shape, first, strides)
    if place is None or x.dtype not in FLOATS or probability >= 1.0:
        return None
    out = torch.empty_like(x)
    launch(
        _fill, place.grid, x,
        out, x, key, *place.arguments, bound_of(1 - probability), float64_bits(1 / (1 - probability)), _DROPOUT, 0,
        wide_type(x.dtype), FLOATS[x.dtype], _COUNTERS,
    )  # fmt: skip
    return out


class _Place(NamedTuple):
    """Where a shard lies in the logical tensor, as arguments of the kernels.

    Attributes:
        grid: the programs.
        arguments: position of the first element; elements of a row; counters of a row, and of all rows; sizes of two
            outer dims and strides of three, the last dim first; number of outer dims; whether every row begins and
            ends between two counters; whether every program has counters of one row only; type of lanes.
    """

    grid: tuple[int]
    arguments: tuple[Any, ...]


def _describe(shape: Sequence[int], first: int, strides: Sequence[int]) -> _Place | None:
    """None where more than three outer dims remain after merging contiguous ones."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    *outer, (size, _) = merged if merged and merged[-1][1] == 1 else [*merged, (1, 1)]
    num_outer = len(outer)
    if num_outer > _NUM_OUTER:
        return None
    outer = [*reversed(outer), *[(1, 0)] * (_NUM_OUTER - num_outer)]
    sizes, steps = zip(*outer, strict=True)
    skipped = 3 if any(step % 4 for step in steps) else first % 4  # at most, of the first counter of a row
    row_counters, num_rows = ceil_div(size + skipped, 4), math.prod(sizes)
    num_counters = row_counters * num_rows
    index = tl.uint32 if 4 * (num_counters + _COUNTERS) < 2**32 else tl.uint64
    is_aligned = skipped == 0 and size % 4 == 0
    per_row = ceil_div(row_counters, _COUNTERS)
    in_rows = num_outer > 0 and per_row * _COUNTERS <= _MOST_LANES * row_counters
    num_programs = num_rows * per_row if in_rows else ceil_div(num_counters, _COUNTERS)
    arguments = (first, size, row_counters, num_counters, *sizes[:2], *steps, num_outer, is_aligned, in_rows, index)
    return _Place((num_programs,), arguments)
