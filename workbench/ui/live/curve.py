"""A curve of any length in bounded memory: old points are decimated, the newest are kept."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from workbench.ui.decimate import MAX_POINTS, thin

TAIL_POINTS = 100


class Curve:
    """Points (x, y) in order of x: at most ``MAX_POINTS`` settled ones, and a tail of at most ``TAIL_POINTS``.

    An update changes the tail only, so only the tail is sent again. A full tail joins the settled points, and
    ``version`` rises. Of too many settled points, the smallest and the largest of every stretch of x remain, so spikes
    survive.

    >>> curve = Curve()
    >>> curve.add(range(5000), [0.0] * 2500 + [9.0] + [0.0] * 2499)
    >>> len(curve.settled[0]) <= 1000, float(curve.settled[1].max())
    (True, 9.0)
    """

    def __init__(self) -> None:
        self.version = 0
        self._width = 0.0  # width of the stretches of x in which two points remain; zero while all points remain
        self.settled: tuple[np.ndarray, np.ndarray] = (np.zeros(0), np.zeros(0))
        self._tail_x: list[float] = []
        self._tail_y: list[float] = []

    def add(self, x: Iterable[float], y: Iterable[float]) -> None:
        """Append points; those without a value (nan) are left out."""
        new_x, new_y = np.array([*x], dtype=np.float64), np.array([*y], dtype=np.float64)
        known = ~np.isnan(new_y)
        self._tail_x += new_x[known].tolist()
        self._tail_y += new_y[known].tolist()
        if len(self._tail_x) > TAIL_POINTS:
            self._settle()

    @property
    def tail(self) -> tuple[np.ndarray, np.ndarray]:
        """The newest points, beginning with the last settled one, so that the two parts meet."""
        joint_x, joint_y = (part[-1:] for part in self.settled)
        return np.concatenate([joint_x, self._tail_x]), np.concatenate([joint_y, self._tail_y])

    @property
    def points(self) -> tuple[np.ndarray, np.ndarray]:
        """All points that are kept."""
        x, y = self.settled
        return np.concatenate([x, self._tail_x]), np.concatenate([y, self._tail_y])

    def _settle(self) -> None:
        x, y = np.array(self._tail_x), np.array(self._tail_y)
        if self._width:
            x, y = thin(x, y, self._width)
        x, y = np.concatenate([self.settled[0], x]), np.concatenate([self.settled[1], y])
        while len(x) > MAX_POINTS:
            self._width = 2 * self._width or 4 * (x[-1] - x[0]) / MAX_POINTS
            x, y = thin(x, y, self._width)
        self.settled = x, y
        self._tail_x, self._tail_y = [], []
        self.version += 1
