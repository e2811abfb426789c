"""How long processes waited for a core: on a busy machine they could not react in that time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")


class CoreWaits:
    """What processes and this one have waited for a core, from now on; 0 where the system does not tell.

    Args:
        pids: processes on this host. All their threads count, and this one's main thread.

    >>> CoreWaits([]).longest_s() >= 0.0
    True
    """

    def __init__(self, pids: Iterable[int], proc: Path = _PROC) -> None:
        self._pids, self._here = [proc / str(pid) / "task" for pid in pids], proc / str(os.getpid()) / "schedstat"
        self._before_ns = {file: _waited_ns(file) for file in self._files()}

    def longest_s(self) -> float:
        """The seconds of that thread which has waited longest."""
        return max(max(0, _waited_ns(file) - self._before_ns.get(file, 0)) for file in self._files()) / 1e9

    def _files(self) -> list[Path]:
        return [self._here, *(file for tasks in self._pids for file in tasks.glob("*/schedstat"))]


def _waited_ns(file: Path) -> int:
    """The second number: nanoseconds in which the thread could have run, and other threads had its core."""
    try:
        return int(file.read_text().split()[1])
    except (OSError, IndexError):  # it has ended, or this is not Linux
        return 0
