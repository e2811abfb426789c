"""Inductor's files on disk, which all processes of a machine share."""

from __future__ import annotations

import fcntl
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBRARY = re.compile(r"(/[^\s:'\"]+\.so)\b")


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # slow to import

    return Path(cache_dir())


@contextmanager
def one_process(program: str) -> Iterator[None]:
    """Context that one process at a time enters for a program. The next ones find on disk what the first has made."""
    folder = _folder() / "workbench"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{hashlib.sha256(program.encode()).hexdigest()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # a process that is killed lets go of it
        yield


def broken_library(error: Exception) -> Path | None:
    """The library in the cache that an error names, if it does: one that cannot be loaded."""
    found = _LIBRARY.search(str(error))
    path = Path(found[1]) if found else None
    return path if path is not None and path.is_relative_to(_folder()) and path.exists() else None
