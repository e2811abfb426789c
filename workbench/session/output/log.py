"""Writes everything that ranks print to disk, also the lines that a cell's output folds.

Each rank and request has its file in the session's private folder. Another process of the user may read it at any time.
A rank's first output makes the file. When there are many requests, the files of the oldest ones are removed.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

MAX_RUNS = 100
"""The number of requests whose output is kept."""
_NAME = re.compile(r"cell-(\d+)-rank-(\d+)\.log")


@dataclass
class RunLog:
    """The output of one request. `close` it when the request has ended."""

    folder: Path
    run: int
    _files: dict[int, TextIO] = field(default_factory=dict)

    def write(self, rank: int, text: str) -> None:
        """Append what a rank has printed. On a full disk the log ends, and the cell goes on."""
        with contextlib.suppress(OSError):
            if rank not in self._files:
                self.folder.mkdir(mode=0o700, exist_ok=True)
                path = self.folder / f"cell-{self.run:05d}-rank-{rank}.log"
                self._files[rank] = path.open("a", encoding="utf-8", newline="")
            self._files[rank].write(text)
            self._files[rank].flush()

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()


@dataclass
class OutputLogs:
    """The logs of a session, also those that an earlier notebook has written."""

    folder: Path

    def begin(self, run: int) -> RunLog:
        """The log of a request. Old files that cannot be removed stay."""
        found = self._files()
        for old in sorted(found)[: -MAX_RUNS + 1]:
            for path in found[old].values():
                with contextlib.suppress(OSError):
                    path.unlink()
        return RunLog(self.folder, run)

    def last(self) -> dict[int, Path]:
        """Rank -> file, for the newest request that has printed something."""
        found = self._files()
        return found[max(found)] if found else {}

    def _files(self) -> dict[int, dict[int, Path]]:
        """All files, by request and rank."""
        found: dict[int, dict[int, Path]] = {}
        for path in sorted(self.folder.glob("cell-*")):
            name = _NAME.fullmatch(path.name)
            if name is not None:
                found.setdefault(int(name[1]), {})[int(name[2])] = path
        return found


def tail(path: Path, num_lines: int) -> tuple[list[str], int]:
    """The last lines of a file, and the number of all its lines. Keeps no other lines in memory."""
    last: deque[str] = deque(maxlen=num_lines)
    count = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for count, line in enumerate(file, start=1):  # noqa: B007 - counted
            last.append(line.rstrip("\n"))
    return list(last), count
