"""How many cores there are for this process, and the share of a rank."""

from __future__ import annotations

import math
import os
from pathlib import Path

_QUOTAS = Path("/sys/fs/cgroup")
_QUOTA_FILES = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))
"""Where a container's time and its period stand: in one file, or on older systems in two."""
_THREADS = "OMP_NUM_THREADS"
_SHARED = "WORKBENCH_NUM_THREADS"
"""The same number, where the workbench has set it."""


def num_cores() -> int:
    """Cores that this process may use; fewer than the machine has where it is bound to some of them, or where its
    container gets the time of fewer.
    """
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in _QUOTA_FILES:
        try:
            time, period = map(int, " ".join((_QUOTAS / name).read_text() for name in files).split())
        except (OSError, ValueError):  # no container, or one with a time of "max"
            continue
        if time > 0:  # -1 is no limit
            return min(bound, math.ceil(time / period))
    return bound


def shared_threads(num_ranks: int) -> dict[str, str]:
    """The variables that give one of ``num_ranks`` its share of the cores as threads; none if the user has set
    OMP_NUM_THREADS.
    """
    if os.environ.get(_THREADS) != os.environ.get(_SHARED):
        return {}
    return dict.fromkeys((_THREADS, _SHARED), str(max(1, num_cores() // num_ranks)))
