"""Fewer points for a curve of any length, with its spikes kept."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

MAX_POINTS = 1000


def decimate(x: np.ndarray, y: np.ndarray, max_points: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most ``max_points`` of the points (x, y), in order: the smallest and the largest y of every bin.

    Curves that are short enough come back as they are. Points without a value (nan) are left out.

    >>> x, y = decimate(np.arange(5000), np.arange(5000) % 7)
    >>> len(x), int(y.min()), int(y.max())
    (1000, 0, 6)
    """
    if max_points < 2 or max_points % 2:
        raise ValueError(
            f"decimate(max_points={max_points}): two points are kept per bin, so give an even number >= 2."
        )
    x, y = np.asarray(x), np.asarray(y)
    if np.issubdtype(y.dtype, np.floating):
        known = ~np.isnan(y)
        x, y = x[known], y[known]
    if len(x) <= max_points:
        return x, y
    kept = _extremes(y, num_bins=max_points // 2)
    return x[kept], y[kept]


def _extremes(y: np.ndarray, num_bins: int) -> np.ndarray:
    """Indices of the smallest and the largest entry of each of ``num_bins`` nearly equal bins, ascending."""
    edges = np.linspace(0, len(y), num_bins + 1).astype(int)
    kept = []
    for start, end in pairwise(edges):
        part = y[start:end]
        kept += sorted({start + int(part.argmin()), start + int(part.argmax())})
    return np.array(kept)
