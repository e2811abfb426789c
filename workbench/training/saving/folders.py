"""The directories of checkpoints: their names while they are written and replaced, and what a save may remove.

Each save writes into a directory with a token of its own. Of two saves to one path the later one removes the directory
of the earlier one, as it does with what killed saves have left. The earlier one then fails, for its directory is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from workbench.errors import CheckpointError

INCOMPLETE = ".incomplete"
"""End of a directory's name while it is written."""
REPLACED = ".replaced"
"""End of the old directory's name while a new one takes its name."""
DELETED = ".deleted"
"""End of a directory's name while it is removed."""
UNFINISHED = rf"(\.[0-9a-f]{{8}})?({re.escape(INCOMPLETE)}|{re.escape(DELETED)})"
"""Ends of names of directories that are not complete, as a regular expression."""
MANIFEST = "workbench.json"
BRANCH = "branch"
"""The file of ``Checkpoints`` with the number of times that the run had gone back to an earlier step; 0 has none."""
_OWN = re.compile(
    rf"({re.escape(MANIFEST)}|{BRANCH}|(__\d+)?\.metadata|__\d+\.(written|failed))(\.tmp)?|__\d+_\d+\.distcp"
)
"""Names of the files in a checkpoint of ours or of torch's, also a half-written one."""


def absolute(path: str | os.PathLike[str]) -> Path:
    """The absolute path; of a link, that of the directory it leads to."""
    return Path(os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path))


def unfinished(path: Path) -> list[Path]:
    """The directories of saves to ``path`` that are not complete: under way or broken off."""
    name = re.compile(re.escape(path.name) + UNFINISHED)
    return sorted(each for each in path.parent.glob("*") if name.fullmatch(each.name) and each.is_dir())


def make_folder(path: Path) -> Path:
    """Make the directory in which a save to ``path`` writes, and remove those of earlier saves.

    Raises:
        CheckpointError: what is at ``path`` is no checkpoint.
    """
    _refuse_others(path)
    folder = path.with_name(f"{path.name}.{secrets.token_hex(4)}{INCOMPLETE}")
    with explaining(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in unfinished(path):
            if not _others(left):
                remove(left)
        folder.mkdir()
    return folder


def check_seen(folder: Path, rank: int) -> None:
    """Check that this rank sees a directory that rank 0 has made. NFS remembers for half a minute that a name was not
    there, and asks its server when a directory above is opened.

    Raises:
        CheckpointError: it does not.
    """
    for above in folder.parents[::-1] if not folder.is_dir() else ():
        with contextlib.suppress(OSError):
            os.scandir(above).close()
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {rank} does not see {folder}, which rank 0 has made. All ranks write into one "
            "directory: give a path on a file system that they share."
        )


@contextlib.contextmanager
def explaining(path: Path) -> Iterator[None]:
    """A context that adds to errors of the system, such as a full disk, what they mean for a save to ``path``."""
    try:
        yield
    except OSError as error:
        error.add_note(
            f"save({str(path)!r}): this rank cannot write there, and the checkpoint before is unchanged. Make space on "
            "the disk, or give a path in a directory that you may write to, and save again."
        )
        raise


def take_name(folder: Path, path: Path) -> None:
    """Give ``folder`` its final name. The checkpoint that had the name stays until then.

    Raises:
        CheckpointError: what is at ``path`` now is no checkpoint.
        FileNotFoundError: a later save has removed ``folder``.
    """
    _refuse_others(path)
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    replaced = path.with_name(path.name + REPLACED)
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(path, replaced)
    os.rename(folder, path)
    sync_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a directory. It first loses its name, so it never looks complete, and no save can complete it."""
    gone = folder.with_suffix(DELETED)
    with contextlib.suppress(OSError):
        if folder != gone:
            shutil.rmtree(gone, ignore_errors=True)
            os.rename(folder, gone)
        shutil.rmtree(gone)


def sync_folder(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file that exists either completely or not at all."""
    partly = path.with_name(path.name + ".tmp")
    with open(partly, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partly, path)


def _refuse_others(path: Path) -> None:
    """A save replaces what is at ``path``, and removes what an earlier one was replacing: both must be checkpoints."""
    for place in (path, path.with_name(path.name + REPLACED)):
        others = _others(place)
        if others:
            named = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
            has = f"has {len(others)} entries that no checkpoint has: {named}" if place.is_dir() else "is a file"
            raise CheckpointError(
                f"save({str(path)!r}): {place} {has}. A save replaces the whole "
                "directory, so it takes the place of a checkpoint or of an empty directory only. Give a path of its "
                f"own, such as {str(path.with_name(path.name + '-checkpoint'))!r}."
            )


def _others(path: Path) -> list[str]:
    """Names of what is at ``path``, or in the directory there, and in no checkpoint."""
    if not path.is_dir():
        return [path.name] if os.path.lexists(path) else []
    return sorted(each.name for each in path.iterdir() if not _OWN.fullmatch(each.name) or each.is_dir())
