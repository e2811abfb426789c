"""Counts the processes that the kernel has killed because memory ran out (OOM kills).

A process that is killed that way cannot report it, and its parent sees only SIGKILL. The kernel counts such kills of
the whole machine in /proc/vmstat, which every user may read.
"""

from __future__ import annotations

from pathlib import Path

_COUNTERS = Path("/proc/vmstat")
_OOM_SCORE = 500
"""Half of the machine's memory is added to a process's own when the kernel looks for the largest one."""


def count(counters: Path = _COUNTERS) -> int:
    """The number of processes that the kernel has killed for lack of memory since its start; 0 where unknown."""
    try:
        lines = counters.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def raise_oom_score() -> None:
    """Let the kernel kill this process before others when memory runs out: an engine is replaced, a notebook is not."""
    try:
        Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    except OSError:  # not Linux, or already higher
        return
