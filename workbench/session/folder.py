"""The private folder of one session: keys, logs, rendezvous files, and the list of its processes.

Processes are known by id and start time, never by name, so that a number used again by somebody else
is left alone. A folder whose owner is gone is a leftover: its processes are ended and it is removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from workbench.errors import SessionError

_STATE = "session.json"


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process that stays the same one: its id and when it started (seconds since the epoch)."""

    pid: int
    started_s: float

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        return cls(pid, psutil.Process(pid).create_time())

    def find(self) -> psutil.Process | None:
        """The process, or None when it has ended (a zombie has) or its number is another's."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started_s) < 0.5
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def kill(self) -> None:
        """End the process at once; nothing happens when it has ended already."""
        process = self.find()
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def base_folder() -> Path:
    """The folder of all sessions of this user, readable by nobody else.

    Raises:
        SessionError: the folder exists and belongs to somebody else, or others may enter it.
    """
    path = Path(tempfile.gettempdir()) / f"workbench-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise SessionError(
            f"Session: {path} must be a folder of user {os.getuid()} with mode 0700, but it has owner "
            f"{info.st_uid} and mode {stat.S_IMODE(info.st_mode):04o}. Sessions keep their keys there. "
            f"Remove it, or set TMPDIR to a folder of your own."
        )
    return path


@dataclass(frozen=True, slots=True)
class SessionFolder:
    """One session's folder; ``create`` makes a new one, mode 0700."""

    path: Path

    @classmethod
    def create(cls) -> SessionFolder:
        folder = cls(Path(tempfile.mkdtemp(prefix="session-", dir=base_folder())))
        folder.record([])
        return folder

    @classmethod
    def open(cls, path: str | Path) -> SessionFolder:
        return cls(Path(path))

    def new_store(self) -> str:
        """An ``init_method`` for a new torch.distributed world on this host: a file used only once."""
        handle, name = tempfile.mkstemp(prefix="store-", dir=self.path)
        os.close(handle)
        os.unlink(name)
        return f"file://{name}"

    def record(self, processes: Collection[ProcessId]) -> None:
        """Write down whose session this is and which processes belong to it."""
        state = {"owner": asdict(ProcessId.of(os.getpid())), "processes": [asdict(process) for process in processes]}
        text = self.path / f"{_STATE}.new"
        text.write_text(json.dumps(state))
        text.replace(self.path / _STATE)

    def owner(self) -> ProcessId | None:
        """The notebook process that made this folder; None where nothing readable says so."""
        try:
            return ProcessId(**self._state()["owner"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def processes(self) -> list[ProcessId]:
        try:
            return [ProcessId(**process) for process in self._state()["processes"]]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def reap(self, spare: Collection[int] = ()) -> None:
        """End the session's processes, except those in ``spare``, and remove the folder."""
        for process in self.processes():
            if process.pid not in spare:
                process.kill()
        self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _state(self) -> dict:
        return json.loads((self.path / _STATE).read_text())


def leftovers() -> Iterator[SessionFolder]:
    """Folders whose owner has ended."""
    for path in base_folder().glob("session-*"):
        folder = SessionFolder.open(path)
        owner = folder.owner()
        if owner is not None and owner.find() is None:
            yield folder


def reap_leftovers() -> int:
    """End and remove what sessions of dead notebooks left; the number of sessions found."""
    found = list(leftovers())
    for folder in found:
        folder.reap()
    return len(found)
