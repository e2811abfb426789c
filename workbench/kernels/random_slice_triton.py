"""The Triton kernels of ``random_slice``: each lane computes one element at its position in the logical tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from workbench.kernels.launch import ceil_div, float64_bits, launch
from workbench.kernels.triton_types import FLOATS, TYPES, wide_type

_NUM_DIMS = 4
_UNIFORM, _INTEGERS = 0, 3
_ELEMENTS = 1024
_SCALARS = ["key", "first", "size1", "size2", "size3", "stride0", "stride1", "stride2", "stride3", "a", "b"]
"""Arguments that change between calls: Triton must not compile again because one of them is 1 or even."""


@triton.jit
def _position(
    lane: tl.tensor,
    first: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    size3: tl.tensor,
    stride0: tl.tensor,
    stride1: tl.tensor,
    stride2: tl.tensor,
    stride3: tl.tensor,
) -> tl.tensor:
    """The position in the logical tensor of local row-major index ``lane``."""
    rest = lane // size3
    at = first + (lane % size3) * stride3 + (rest % size2) * stride2
    rest = rest // size2
    return at + (rest % size1) * stride1 + (rest // size1) * stride0


@triton.jit
def _words(key: tl.tensor, position: tl.tensor, stream: tl.constexpr) -> tl.tensor:
    """The word of a position in its counter, and the other word of its pair."""
    counter = position // 4
    # Counters of 64 bits would silently select Philox4x64, so pass the low and high 32 bits separately.
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = low * 0
    a, b, c, d = tl.philox(key, low, high, zero + stream, zero)
    word = (position % 4).to(tl.int32)
    own = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    other = tl.where(word < 2, tl.where(word == 0, b, a), tl.where(word == 2, d, c))
    return own, other


@triton.jit
def _double(bits: tl.tensor) -> tl.tensor:
    """The double with these 64 bits; a float argument would have 32 bits."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def _unit(word: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """float32 in [0, 1) from the top ``bits`` of a word."""
    return (word >> (32 - bits)).to(tl.int32).to(tl.float32) * (1.0 / (1 << bits))


@triton.jit(do_not_specialize=_SCALARS)
def _fill(
    out: tl.tensor,
    count: tl.tensor,
    key: tl.tensor,
    first: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    size3: tl.tensor,
    stride0: tl.tensor,
    stride1: tl.tensor,
    stride2: tl.tensor,
    stride3: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    kind: tl.constexpr,
    bits: tl.constexpr,
    wide: tl.constexpr,
    element: tl.constexpr,
    elements: tl.constexpr,
) -> None:
    """``a`` and ``b``: lower bound and span of uniform numbers (doubles, as bits) or integers, mean and standard
    deviation, or a probability; ``wide``: the type of the computation.
    """
    lane = tl.program_id(0).to(tl.int64) * elements + tl.arange(0, elements)
    position = _position(lane, first, size1, size2, size3, stride0, stride1, stride2, stride3)
    own, other = _words(key, position, 0)
    if kind == 3:
        joined = (own.to(tl.uint64) << 32) | other.to(tl.uint64)
        value = (joined % b.to(tl.uint64)).to(tl.int64) + a
    elif kind == 2:
        value = tl.where(_unit(own, 24) < _double(a).to(tl.float32), 1.0, 0.0)
    elif kind == 1:
        is_first = position % 2 == 0
        radius_word = tl.where(is_first, own, other).to(tl.int64).to(wide)
        angle_word = tl.where(is_first, other, own).to(tl.int64).to(wide)
        radius = tl.sqrt(-2.0 * tl.log((radius_word + 1.0) * (1.0 / (1 << 32))))
        angle = angle_word * (6.283185307179586 / (1 << 32))
        turned = tl.where(is_first, tl.cos(angle), tl.sin(angle))
        value = _double(a).to(wide) + _double(b).to(wide) * radius * turned
    elif bits == 53:
        more, _ = _words(key, position, 1)
        joined = (own.to(tl.uint64) << 32) | more.to(tl.uint64)
        value = (joined >> 11).to(tl.int64).to(tl.float64) * (1.0 / (1 << 53)) * _double(b) + _double(a)
    else:
        value = _unit(own, bits) * _double(b).to(wide) + _double(a).to(wide)
    tl.store(out + lane, value.to(element), mask=lane < count)


@triton.jit(do_not_specialize=_SCALARS)
def _dropout(
    x: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    key: tl.tensor,
    first: tl.tensor,
    size1: tl.tensor,
    size2: tl.tensor,
    size3: tl.tensor,
    stride0: tl.tensor,
    stride1: tl.tensor,
    stride2: tl.tensor,
    stride3: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    wide: tl.constexpr,
    element: tl.constexpr,
    elements: tl.constexpr,
) -> None:
    """``a``: the probability to keep an element; ``b``: the scale of kept elements (doubles, as bits)."""
    lane = tl.program_id(0).to(tl.int64) * elements + tl.arange(0, elements)
    inside = lane < count
    position = _position(lane, first, size1, size2, size3, stride0, stride1, stride2, stride3)
    own, _ = _words(key, position, 0)
    value = tl.load(x + lane, mask=inside, other=0.0).to(wide) * _double(b).to(wide)
    is_kept = _unit(own, 24) < _double(a).to(tl.float32)
    tl.store(out + lane, tl.where(is_kept, value, 0.0).to(element), mask=inside)


_BITS = {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}


def fill(out: torch.Tensor, kind: int, key: int, first: int, strides: Sequence[int], low: float, high: float) -> bool:
    """See ``fill_random``; ``kind`` is an index of ``KINDS``. False for unsupported cases."""
    place = _merge(out.shape, strides)
    if kind == _INTEGERS and not _fits(out.dtype, int(low), int(high)):
        return False
    if out.dtype == torch.bool:
        out = out.view(torch.uint8)
    if place is None or out.dtype not in TYPES or not out.is_contiguous():
        return False
    wide = wide_type(out.dtype)
    if kind == _INTEGERS:
        a, b = int(low), int(high) - int(low)
    else:
        a, b = float64_bits(low), float64_bits(high - low if kind == _UNIFORM else high)
    launch(
        _fill, (ceil_div(out.numel(), _ELEMENTS),), out,
        out, out.numel(), key, first, *place, a, b, kind, _BITS.get(out.dtype, 24), wide, TYPES[out.dtype],
        _ELEMENTS,
    )  # fmt: skip
    return True


def _fits(dtype: torch.dtype, low: int, high: int) -> bool:
    """Whether the kernel supports integers of this range; a bool needs a range within [0, 2)."""
    return 0 < high - low < 2**63 and (dtype != torch.bool or (low >= 0 and high <= 2))


def dropout(x: torch.Tensor, key: int, first: int, strides: Sequence[int], probability: float) -> torch.Tensor | None:
    """See ``dropout_slice``; None for unsupported cases."""
    place = _merge(x.shape, strides)
    if place is None or x.dtype not in FLOATS or probability >= 1.0:
        return None
    out = torch.empty_like(x)
    wide = wide_type(x.dtype)
    launch(
        _dropout, (ceil_div(x.numel(), _ELEMENTS),), x,
        x, out, x.numel(), key, first, *place, float64_bits(1 - probability), float64_bits(1 / (1 - probability)), wide,
        FLOATS[x.dtype], _ELEMENTS,
    )  # fmt: skip
    return out


def _merge(shape: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """Three sizes and four strides of the slice, after merging contiguous dims; None if more dims remain."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > _NUM_DIMS:
        return None
    merged = [(1, 0)] * (_NUM_DIMS - len(merged)) + merged
    return [*(max(1, size) for size, _ in merged[1:]), *(stride for _, stride in merged)]


__all__ = ["dropout", "fill"]
