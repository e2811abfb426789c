"""Philox in Triton kernels: the words of a counter, and what becomes of them. See ``philox``."""

from __future__ import annotations

import math

import numpy as np
import triton
import triton.language as tl


@triton.jit
def words(key: tl.tensor, counter: tl.tensor, stream: tl.constexpr) -> tl.tensor:
    """The four words of each counter; one instruction makes both halves of a product, unlike ``tl.philox``."""
    a, b = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c, d = a * 0 + stream, a * 0
    low, high = key.to(tl.uint32), (key.to(tl.uint64) >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        first, second = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a, b, c, d = (
            (second >> 32).to(tl.uint32) ^ b ^ low,
            second.to(tl.uint32),
            (first >> 32).to(tl.uint32) ^ d ^ high,
            first.to(tl.uint32),
        )
        low, high = (low + 0x9E3779B9).to(tl.uint32), (high + 0xBB67AE85).to(tl.uint32)
    return a, b, c, d


@triton.jit
def in_order(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, rows: tl.constexpr, columns: tl.constexpr
) -> tl.tensor:
    """One tensor of shape (rows, columns) with an element of each of the four in turn."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (rows, columns))


@triton.jit
def is_below(word: tl.tensor, bound: tl.tensor) -> tl.tensor:
    """Whether a word's uniform number of 24 bits is below a probability, given by ``bound_of``."""
    return (word >> 8).to(tl.int32) < bound


def bound_of(probability: float) -> int:
    """A probability as a number of steps of 2**-24, rounded up; the references compare with it in float32."""
    return math.ceil(float(np.float32(probability)) * 2**24)
