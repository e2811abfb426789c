"""Flat buckets in which the engines sum gradients while backward runs, and bring stepped parameters back (ZeRO)."""

from __future__ import annotations

from collections.abc import Sequence

LARGEST_BYTES, SMALLEST_BYTES, PER_BACKWARD, UNDER_WAY = 25 * 2**20, 2**19, 8, 4
"""As ``runtime.gradients`` has them; so many are under way at once."""


def bucket_bytes(total: float) -> float:
    """A bucket of gradients is full at so many bytes, where all gradients together have ``total``.

    >>> bucket_bytes(2**20), bucket_bytes(2**25)
    (524288, 4194304.0)
    """
    return min(LARGEST_BYTES, max(SMALLEST_BYTES, total / PER_BACKWARD))


def num_buckets(sizes: Sequence[float], full: float) -> int:
    """How many buckets tensors of these bytes fill, in this order; none is cut.

    >>> num_buckets([1, 9, 9, 5], 4), num_buckets([1, 1, 1], 4)
    (3, 1)
    """
    count = filled = 0.0
    for size in sizes:
        filled += size
        if filled >= full:
            count, filled = count + 1, 0.0
    return int(count) + (filled > 0)


__all__ = ["LARGEST_BYTES", "UNDER_WAY", "bucket_bytes", "num_buckets"]
