"""Random numbers for a slice of a logical tensor, by position (see ``philox``), and dropout in one pass.

The position of its first element and the strides of the logical tensor describe a slice, so any shard of any layout
gets the numbers of the logical tensor. Uniform, Bernoulli and integer numbers have the same bits on every device;
normal numbers agree to about 5e-7, because logarithms and cosines of devices differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from workbench.kernels import philox
from workbench.kernels.launch import can_launch
from workbench.kernels.operators import writes_first

KINDS = ("uniform", "normal", "bernoulli", "integers")
_BLOCK = 1 << 16
"""Positions of which numbers are drawn at a time: temporaries then stay in the processor's cache."""
_MANTISSA_BITS = {torch.float16: 11, torch.bfloat16: 8}


@writes_first
def fill_random(
    out: torch.Tensor, kind: str, key: int, first: int, strides: Sequence[int], low: float, high: float
) -> None:
    """Fill a contiguous shard.

    Args:
        out: the shard.
        kind: "uniform" in [low, high), "normal" with mean ``low`` and standard deviation ``high``, "bernoulli" with
            probability ``low``, or "integers" in [low, high), with bounds below 2**53 in absolute value.
        key: at most 63 bits, the same on all ranks.
        first: position in the logical tensor of the shard's first element.
        strides: row-major strides of the logical tensor, one per dim of the shard.

    Row 1 of a (2, 3) tensor is the second half of it:

    >>> whole, row = torch.empty(2, 3), torch.empty(1, 3)
    >>> fill_random(whole, "uniform", 7, 0, [3, 1], 0.0, 1.0), fill_random(row, "uniform", 7, 3, [3, 1], 0.0, 1.0)
    (None, None)
    >>> torch.equal(whole[1:], row)
    True
    """
    if can_launch(out):
        from workbench.kernels.random_slice_triton import fill

        if fill(out, KINDS.index(kind), key, first, strides, low, high):
            return
    fill_random_reference(out, kind, key, first, strides, low, high)


@torch.library.custom_op("workbench::dropout_slice", mutates_args=())
def dropout_slice(x: torch.Tensor, key: int, first: int, strides: Sequence[int], probability: float) -> torch.Tensor:
    """Dropout of a shard with the logical tensor's mask: kept with ``1 - probability`` and divided by it.

    Its gradient is the same function of the gradient. ``first`` and ``strides`` as in ``fill_random``.
    """
    x = x.contiguous()
    if can_launch(x):
        from workbench.kernels.random_slice_triton import dropout

        result = dropout(x, key, first, strides, probability)
        if result is not None:
            return result
    return dropout_slice_reference(x, key, first, strides, probability)


@dropout_slice.register_fake
def _(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: object, inputs: tuple[object, ...], output: torch.Tensor) -> None:
    ctx.arguments = inputs[1:]  # type: ignore[attr-defined]


def _differentiate(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return dropout_slice(grad, *ctx.arguments), None, None, None, None  # type: ignore[attr-defined]


dropout_slice.register_autograd(_differentiate, setup_context=_save)


def position_blocks(sizes: Sequence[int], first: int, strides: Sequence[int]) -> Iterator[np.ndarray]:
    """Positions in the logical tensor of a shard's elements, flat, block by block."""
    count, run = math.prod(sizes), 1
    dims = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    for size, stride in reversed(dims):
        run = run * size if stride == run else 0
    if run == count:
        for low in range(first, first + count, _BLOCK):
            yield np.arange(low, min(low + _BLOCK, first + count), dtype=np.int64)
        return
    at = np.full(tuple(size for size, _ in dims), first, dtype=np.int64)
    for dim, (size, stride) in enumerate(dims):
        at += (np.arange(size, dtype=np.int64) * stride).reshape([-1 if d == dim else 1 for d in range(len(dims))])
    yield from np.split(at.reshape(-1), range(_BLOCK, count, _BLOCK))


def fill_random_reference(
    out: torch.Tensor, kind: str, key: int, first: int, strides: Sequence[int], low: float, high: float
) -> None:
    """``fill_random`` in numpy."""

    def draw(at: np.ndarray) -> np.ndarray:
        if kind == "uniform":
            wide = out.dtype == torch.float64
            unit = philox.uniform64(key, at) if wide else philox.uniform(key, at, _MANTISSA_BITS.get(out.dtype, 24))
            return unit * unit.dtype.type(high - low) + unit.dtype.type(low)
        if kind == "normal":
            return low + high * philox.normal(key, at)
        if kind == "bernoulli":
            return philox.uniform(key, at) < np.float32(low)
        return philox.integers(key, at, int(low), int(high))

    blocks = [draw(at) for at in position_blocks(out.shape, first, strides)]
    if blocks:
        out.copy_(torch.from_numpy(np.concatenate(blocks)).view(out.shape))


def dropout_slice_reference(
    x: torch.Tensor, key: int, first: int, strides: Sequence[int], probability: float
) -> torch.Tensor:
    """``dropout_slice`` in numpy and torch."""
    if probability >= 1.0:
        return torch.zeros_like(x)
    keep = torch.empty(x.shape, dtype=torch.bool)
    fill_random_reference(keep, "bernoulli", key, first, strides, 1 - probability, 0.0)
    return torch.where(keep.to(x.device), x * (1.0 / (1.0 - probability)), torch.zeros((), dtype=x.dtype))
