"""How long processes waited for a core: on a busy machine they could not react in that time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")


class CoreWaits:
    """What processes and this one have waited for a core, from now on; 0 where the system does not tell.

    Args:
        pids: processes on this host. Of each its main thread counts.

    >>> CoreWaits([]).longest_s() >= 0.0
    True
    """

    def __init__(self, pids: Iterable[int], proc: Path = _PROC) -> None:
        self._files = [proc / str(pid) / "schedstat" for pid in (*pids, os.getpid())]
        self._before_ns = {file: _waited_ns(file) for file in self._files}

    def longest_s(self) -> float:
        """The seconds of that process which has waited longest."""
        return max(max(0, _waited_ns(file) - self._before_ns[file]) for file in self._files) / 1e9


def _waited_ns(file: Path) -> int:
    """The second number: nanoseconds in which the thread could have run, and other threads had its core."""
    try:
        return int(file.read_text().split()[1])
    except (OSError, IndexError):  # it has ended, or this is not Linux
        return 0
