"""Times of what all ranks of a world do at once: each by itself, or together.

What a rank does by itself is timed on the clock of its thread, where it computes with one on a CPU: that stands still
while another thread has the core, so that the time is the work's, however many there are. What the work takes on the
wall, over all that was timed, is one number beside it: ranks that share cores, other programs, a hypervisor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from workbench.runtime.world import World, barrier

WINDOW_S = 0.06
"""How long work is repeated: several time slices, so that those who share a core lose their caches to each other."""
_LEAST_TIMES = 7
_NUM_CHUNKS, _CHUNK = 3, 8


class Stopwatch:
    """Of one rank; all ranks of the world use theirs in step."""

    def __init__(self, world: World, window_s: float = WINDOW_S) -> None:
        self.world, self.window_s = world, window_s
        has_own_clock = world.device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if has_own_clock else time.perf_counter
        self._own_s = self._wall_s = 0.0

    @property
    def slowdown(self) -> float:
        """Seconds on the wall for each second of this rank's own clock, over all that it has timed; at least 1."""
        return max(1.0, self._wall_s / self._own_s) if self._own_s else 1.0

    def own_s(self, action: Callable[[], Any]) -> float:
        """Mean seconds, by this rank's own clock, of what it does by itself while all ranks do the same."""
        action()
        barrier()
        return self.repeated_s(action)

    def repeated_s(self, action: Callable[[], Any]) -> float:
        """The same, without a beginning that the ranks make together."""
        self._wait_for_device()
        number, wall, started = 0, time.perf_counter(), self._clock()
        while (passed := self._clock() - started) < self.window_s or number < _LEAST_TIMES:
            action()
            self._wait_for_device()
            number += 1
        self._own_s, self._wall_s = self._own_s + passed, self._wall_s + time.perf_counter() - wall
        return passed / number

    def together_s(self, exchange: Callable[[], Any], work: Callable[[], Any], work_s: float) -> float:
        """Seconds that an exchange adds on the wall to ranks that come to it from work of ``work_s``, as they do in a
        step: none of them is there at once, and none finds in its caches what it left there."""
        exchange()
        barrier()
        chunks = []
        for _ in range(_NUM_CHUNKS):
            self._wait_for_device()
            started = time.perf_counter()
            for _ in range(_CHUNK):
                work()
                exchange()
            self._wait_for_device()
            chunks.append((time.perf_counter() - started) / _CHUNK)
        return max(median(chunks) - work_s * self.slowdown, _SHORTEST_S)

    def _wait_for_device(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)


_SHORTEST_S = 1e-6

__all__ = ["WINDOW_S", "Stopwatch"]
