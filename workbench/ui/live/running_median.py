"""The running median of a noisy quantity, over the last second."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

WINDOW_S = 1.0
_LEAST, _MOST = 5, 200


class RunningMedian:
    """The median of the last second's values, of at least 5 and at most 200.

    >>> median = RunningMedian()
    >>> [median.add(value, time_s=0.1) for value in (10.0, 10.0, 90.0, 10.0)]
    [10.0, 10.0, 10.0, 10.0]
    """

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=_MOST)
        self._length_s = 0.0

    def add(self, value: float, time_s: float) -> float:
        """Add a value that lasted ``time_s`` seconds; returns the new median."""
        if len(self._values) == _MOST:
            self._length_s -= self._values[0][1]
        self._values.append((value, time_s))
        self._length_s += time_s
        while len(self._values) > _LEAST and self._length_s - self._values[0][1] >= WINDOW_S:
            self._length_s -= self._values.popleft()[1]
        return median(value for value, _ in self._values)

    def clear(self) -> None:
        """Drop all values."""
        self._values.clear()
        self._length_s = 0.0


def running_medians(values: Sequence[float] | np.ndarray, times_s: Sequence[float] | np.ndarray) -> np.ndarray:
    """The running median at every value; nan where the value is nan."""
    running = RunningMedian()
    known = [(float(value), float(time)) for value, time in zip(values, times_s, strict=True)]
    return np.array([running.add(value, time) if value == value else np.nan for value, time in known])
