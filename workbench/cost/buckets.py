"""Flat buckets in which engines reduce gradients during backward, and gather updated parameters (ZeRO)."""

from __future__ import annotations

from collections.abc import Sequence

LARGEST_BYTES, SMALLEST_BYTES, PER_BACKWARD, UNDER_WAY = 25 * 2**20, 2**19, 8, 4
"""The constants of ``training.gradients``. ``UNDER_WAY`` buckets are exchanged at the same time."""


def bucket_bytes(total: float) -> float:
    """Bytes of a full bucket, if all gradients have ``total`` bytes.

    >>> bucket_bytes(2**20), bucket_bytes(2**25)
    (524288, 4194304.0)
    """
    return min(LARGEST_BYTES, max(SMALLEST_BYTES, total / PER_BACKWARD))


def num_buckets(sizes: Sequence[float], full: float) -> int:
    """Number of buckets that tensors of these bytes fill, in this order. Tensors are not cut.

    >>> num_buckets([1, 9, 9, 5], 4), num_buckets([1, 1, 1], 4)
    (3, 1)
    """
    count = filled = 0.0
    for size in sizes:
        filled += size
        if filled >= full:
            count, filled = count + 1, 0.0
    return int(count) + (filled > 0)
