"""Everything that ranks print, in full, on disk: what a fold leaves out of a cell can be read here.

One file per rank and request in the session's private folder; files are made when a rank first prints, and the oldest
requests' files are removed when there are many.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

MAX_RUNS = 100
"""Requests whose output is kept."""


class RunLog:
    """The output of one request; `close` when it is over."""

    def __init__(self, folder: Path, run: int, label: str) -> None:
        self.run, self.label = run, label
        self._folder = folder
        self._files: dict[int, TextIO] = {}

    def write(self, rank: int, text: str) -> None:
        """Append what a rank has printed. A disk that is full costs the log, not the cell."""
        with contextlib.suppress(OSError):
            if rank not in self._files:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                self._files[rank] = self.path(rank).open("a", encoding="utf-8", newline="")
            self._files[rank].write(text)

    def path(self, rank: int) -> Path:
        return self._folder / f"cell-{self.run:05d}-rank-{rank}.log"

    @property
    def paths(self) -> dict[int, Path]:
        """The file of every rank that has printed something."""
        return {rank: self.path(rank) for rank in sorted(self._files)}

    def flush(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError, ValueError):
                file.flush()

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def remove(self) -> None:
        self.close()
        for path in self.paths.values():
            path.unlink(missing_ok=True)


@dataclass
class OutputLogs:
    """The logs of a session, newest last."""

    folder: Path
    runs: deque[RunLog] = field(default_factory=deque)

    def begin(self, run: int, label: str) -> RunLog:
        log = RunLog(self.folder, run, label)
        self.runs.append(log)
        while len(self.runs) > MAX_RUNS:
            self.runs.popleft().remove()
        return log

    def last(self) -> RunLog | None:
        """The newest that holds something."""
        return next((log for log in reversed(self.runs) if log.paths), None)


def tail(path: Path, num_lines: int) -> tuple[list[str], int]:
    """The last lines of a file, and how many it has in all; reads it once and keeps only those."""
    last: deque[str] = deque(maxlen=num_lines)
    count = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for count, line in enumerate(file, start=1):  # noqa: B007 - counted
            last.append(line.rstrip("\n"))
    return list(last), count
