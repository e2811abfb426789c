"""Files that commands write: checked before the work, with one error for all that can be in the way."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from workbench.errors import CommandError


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Around code that writes to ``path``, the value of ``option``: makes its folders first.

    Raises:
        CommandError: the system refuses it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        why = f"cannot write {error.filename or path}: {error.strerror}"
        raise CommandError(f"{option} {path}: {why}. Give the path of another file.") from error


def check_output(option: str, path: Path | None, inputs: Iterable[str | Path | None] = ()) -> None:
    """Check that a file can be written, without writing to it. Its folders are made. None is fine.

    Args:
        inputs: what the command was given that may be files which it reads.

    Raises:
        CommandError: it is a folder, or one of the inputs, or the system refuses it.
    """
    if path is None:
        return
    if any(given is not None and os.path.isfile(given) and _is_same(path, given) for given in inputs):
        raise CommandError(
            f"{option} {path}: this is a file that the command reads, and it would be replaced. Give the path of "
            "another file."
        )
    with writing(option, path):
        if path.is_dir():
            raise _error(errno.EISDIR)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise _error(errno.EACCES)


def write_text(option: str, path: Path, text: str) -> None:
    """Write a text file, as UTF-8.

    Raises:
        CommandError: the system refuses it.
    """
    with writing(option, path):
        path.write_text(text, encoding="utf-8")


def _is_same(path: Path, other: str | Path) -> bool:
    return path.exists() and os.path.samefile(path, other)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
