"""Fewer points for a long curve, which keep its spikes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

MAX_POINTS = 1000


def decimate(x: np.ndarray, y: np.ndarray, max_points: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most ``max_points`` of the points (x, y), in order of x: the smallest and the largest y of every stretch of x.

    Stretches are equally wide, so a curve that is decimated repeatedly stays equally dense. Short curves are returned
    unchanged. Points without a value (nan) are left out.

    >>> x, y = decimate(np.arange(5000), np.arange(5000) % 7)
    >>> len(x) <= 1000, int(y.min()), int(y.max())
    (True, 0, 6)
    """
    x, y = np.asarray(x), np.asarray(y)
    if np.issubdtype(y.dtype, np.floating):
        known = ~np.isnan(y)
        x, y = x[known], y[known]
    if len(x) <= max_points:
        return x, y
    return thin(x, y, (x[-1] - x[0]) / (max_points // 2 - 2))  # the first and the last stretch may be cut


def thin(x: np.ndarray, y: np.ndarray, width: float) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest y of every stretch of x that is ``width`` wide and begins at a multiple of it.

    >>> [part.tolist() for part in thin(np.arange(6.0), np.array([1.0, 3, 2, 5, 4, 6]), 3)]
    [[0.0, 1.0, 4.0, 5.0], [1.0, 3.0, 4.0, 6.0]]
    """
    starts = np.flatnonzero(np.diff(np.floor(x / width))) + 1
    kept: list[int] = []
    for start, end in pairwise([0, *starts.tolist(), len(x)]):
        part = y[start:end]
        kept += sorted({start + int(part.argmin()), start + int(part.argmax())})
    return x[kept], y[kept]
