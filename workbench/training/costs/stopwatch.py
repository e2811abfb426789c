"""Times of work that all ranks of a world do at once: each alone, or together.

Work of a rank alone is timed by the clock of its thread, if it computes with one thread on a CPU. This clock stands
still while another thread has the core, so other programs and other machines of a hypervisor do not count. ``crowding``
accounts for threads of the world that share a core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from workbench.core.cores import num_cores
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World, barrier

WINDOW_S = 0.06
"""Seconds of repeated work: several time slices, so that ranks on one core displace each other's caches."""
_LEAST_TIMES = 7
_NUM_CHUNKS, _CHUNK = 5, 4
_SHORTEST_S = 1e-6


class Stopwatch:
    """The stopwatch of one rank; all ranks of the world make the same calls.

    Attributes:
        crowding: threads of ranks on this host per core; 1 if there are enough cores, and on GPUs.
    """

    def __init__(self, world: World, host: str, window_s: float = WINDOW_S) -> None:
        self.world, self.window_s = world, window_s
        is_cpu, num_threads = world.device.type == "cpu", torch.get_num_threads()
        self.crowding = max(1.0, num_threads * _ranks_on(host, world) / num_cores()) if is_cpu else 1.0
        has_own_clock = is_cpu and num_threads == 1
        self._clock = time.thread_time if has_own_clock else time.perf_counter
        self._wall_s_per_own = self.crowding if has_own_clock else 1.0

    def own_s(self, action: Callable[[], Any], least_times: int = _LEAST_TIMES) -> float:
        """Mean seconds of wall time of work that a rank does alone while all ranks do the same."""
        action()
        barrier()
        return self.repeated_s(action, least_times)

    def repeated_s(self, action: Callable[[], Any], least_times: int = _LEAST_TIMES) -> float:
        """Mean seconds of wall time of work, without a common start of the ranks."""
        self._wait_for_device()
        number, started = 0, self._clock()
        while (passed := self._clock() - started) < self.window_s or number < least_times:
            action()
            self._wait_for_device()
            number += 1
        return passed / number * self._wall_s_per_own

    def together_s(self, exchange: Callable[[], Any], work: Callable[[], Any]) -> float:
        """Seconds of wall time that an exchange adds to ranks that come to it from work, as in a step.

        The ranks arrive at different times, their caches hold other data, and where ranks share cores, some begin after
        others have ended. Rows of work alone and rows of work with exchanges alternate, so both meet the same machine.
        The result is the median of their differences.
        """
        exchange()
        rows = []
        for _ in range(_NUM_CHUNKS):
            alone_s = self._row_s(work)
            rows.append(self._row_s(work, exchange) - alone_s)
        return max(median(rows), _SHORTEST_S)

    def _row_s(self, *actions: Callable[[], Any]) -> float:
        """Seconds of wall time of the actions in order, repeated, after a barrier."""
        barrier()
        self._wait_for_device()
        started = time.perf_counter()
        for _ in range(_CHUNK):
            for action in actions:
                action()
        self._wait_for_device()
        return (time.perf_counter() - started) / _CHUNK

    def _wait_for_device(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)


def _ranks_on(host: str, world: World) -> int:
    """The number of ranks on the host of this name. All ranks call it."""
    return all_gather_object(host, world, "calibration: hosts").count(host)
