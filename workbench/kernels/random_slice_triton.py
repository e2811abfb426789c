"""The Triton kernels of ``random_slice``: an element per lane, its position from the strides of the logical tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from workbench.kernels.launch import ceil_div

_NUM_DIMS = 4
_INTEGERS = 3
_ELEMENTS = 1024


@triton.jit
def _position(
    lane: Any,
    first: Any,
    size1: Any,
    size2: Any,
    size3: Any,
    stride0: Any,
    stride1: Any,
    stride2: Any,
    stride3: Any,
) -> Any:
    """Of local row-major index ``lane`` in the logical tensor."""
    rest = lane // size3
    at = first + (lane % size3) * stride3 + (rest % size2) * stride2
    rest = rest // size2
    return at + (rest % size1) * stride1 + (rest // size1) * stride0


@triton.jit
def _words(key: Any, position: Any, stream: tl.constexpr) -> Any:
    """The position's word of its counter, and the word beside it (its partner in a pair)."""
    counter = position // 4
    # Counters of 64 bits would silently make this Philox4x64: low and high halves go separately.
    low, high = (counter & 0xFFFFFFFF).to(tl.uint32), (counter >> 32).to(tl.uint32)
    zero = low * 0
    a, b, c, d = tl.philox(key, low, high, zero + stream, zero)
    word = (position % 4).to(tl.int32)
    own = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    other = tl.where(word < 2, tl.where(word == 0, b, a), tl.where(word == 2, d, c))
    return own, other


@triton.jit
def _unit(word: Any, bits: tl.constexpr) -> Any:
    """float32 in [0, 1) from the top ``bits`` of a word."""
    return (word >> (32 - bits)).to(tl.int32).to(tl.float32) * (1.0 / (1 << bits))


@triton.jit
def _fill(
    out: Any,
    count: Any,
    key: Any,
    first: Any,
    size1: Any,
    size2: Any,
    size3: Any,
    stride0: Any,
    stride1: Any,
    stride2: Any,
    stride3: Any,
    parameters: Any,
    bounds: Any,
    kind: tl.constexpr,
    bits: tl.constexpr,
    element: tl.constexpr,
    elements: tl.constexpr,
) -> None:
    """``parameters`` holds low and high as floats of the result's precision, ``bounds`` as integers."""
    lane = tl.program_id(0).to(tl.int64) * elements + tl.arange(0, elements)
    position = _position(lane, first, size1, size2, size3, stride0, stride1, stride2, stride3)
    own, other = _words(key, position, 0)
    low, high = tl.load(parameters), tl.load(parameters + 1)
    if kind == 0:
        if bits == 53:
            more, _ = _words(key, position, 1)
            joined = (own.to(tl.uint64) << 32) | more.to(tl.uint64)
            value = (joined >> 11).to(tl.int64).to(tl.float64) * (1.0 / (1 << 53))
        else:
            value = _unit(own, bits)
        value = value * (high - low) + low
    elif kind == 1:
        is_first = position % 2 == 0
        wide: tl.constexpr = low.dtype
        radius_word = tl.where(is_first, own, other).to(tl.int64).to(wide)
        angle_word = tl.where(is_first, other, own).to(tl.int64).to(wide)
        radius = tl.sqrt(-2.0 * tl.log((radius_word + 1.0) * (1.0 / (1 << 32))))
        angle = angle_word * (6.283185307179586 / (1 << 32))
        value = low + high * radius * tl.where(is_first, tl.cos(angle), tl.sin(angle))
    elif kind == 2:
        value = tl.where(_unit(own, 24) < low, 1.0, 0.0)
    else:
        joined = (own.to(tl.uint64) << 32) | other.to(tl.uint64)
        least, span = tl.load(bounds), tl.load(bounds + 1).to(tl.uint64)
        value = (joined % span).to(tl.int64) + least
    tl.store(out + lane, value.to(element), mask=lane < count)


@triton.jit
def _dropout(
    x: Any,
    out: Any,
    count: Any,
    key: Any,
    first: Any,
    size1: Any,
    size2: Any,
    size3: Any,
    stride0: Any,
    stride1: Any,
    stride2: Any,
    stride3: Any,
    parameters: Any,
    element: tl.constexpr,
    elements: tl.constexpr,
) -> None:
    lane = tl.program_id(0).to(tl.int64) * elements + tl.arange(0, elements)
    inside = lane < count
    position = _position(lane, first, size1, size2, size3, stride0, stride1, stride2, stride3)
    own, _ = _words(key, position, 0)
    keep, scale = tl.load(parameters), tl.load(parameters + 1)
    value = tl.load(x + lane, mask=inside, other=0.0).to(parameters.dtype.element_ty) * scale
    tl.store(out + lane, tl.where(_unit(own, 24) < keep, value, 0.0).to(element), mask=inside)


_FLOATS = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_ELEMENTS_OF = {
    **_FLOATS,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}
_BITS = {torch.float64: 53, torch.float16: 11, torch.bfloat16: 8}


def fill(out: torch.Tensor, kind: int, key: int, first: int, strides: Sequence[int], low: float, high: float) -> bool:
    """See ``fill_random``, whose kinds are counted here; False where the kernel has no way."""
    place = _merge(out.shape, strides)
    is_too_wide = kind == _INTEGERS and not 0 < int(high) - int(low) < 2**63
    if place is None or out.dtype not in _ELEMENTS_OF or is_too_wide or not out.is_contiguous():
        return False
    if not out.numel():
        return True
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    integers = [int(low), int(high) - int(low)] if kind == _INTEGERS else [0, 1]
    _fill[(ceil_div(out.numel(), _ELEMENTS),)](
        out, out.numel(), key, first, *place, torch.tensor([low, high], dtype=wide, device=out.device),
        torch.tensor(integers, device=out.device), kind, _BITS.get(out.dtype, 24),
        _ELEMENTS_OF[out.dtype], _ELEMENTS,
    )  # fmt: skip
    return True


def dropout(x: torch.Tensor, key: int, first: int, strides: Sequence[int], probability: float) -> torch.Tensor | None:
    """See ``dropout_slice``; None where the kernel has no way."""
    place = _merge(x.shape, strides)
    if place is None or x.dtype not in _FLOATS or probability >= 1.0:
        return None
    out = torch.empty_like(x)
    if x.numel():
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        parameters = torch.tensor([1 - probability, 1 / (1 - probability)], dtype=wide, device=x.device)
        _dropout[(ceil_div(x.numel(), _ELEMENTS),)](
            x, out, x.numel(), key, first, *place, parameters, _FLOATS[x.dtype], _ELEMENTS
        )
    return out


def _merge(shape: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """Three sizes and four strides of the same slice, dims merged that lie behind one another; None for more."""
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
