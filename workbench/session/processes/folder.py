"""The private folder of one session: keys, logs, rendezvous files, and the lists of its checkpoints and processes.

The list of processes names each by id and start, never by its program's name. So a session never ends a foreign process
that has got an old id. A folder is stale when its owner has ended, unless its engines are kept for another notebook and
still run. `reap_stale_sessions` ends the processes of a stale folder and removes it. Several hosts and containers may
share the place of these folders. Whether the processes of others have ended is not known here, so their folders stay.
Those from before the last boot of this host are stale.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import socket
import stat
import sys
import tempfile
import warnings
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from workbench.errors import SessionError
from workbench.session.protocol import SavedCheckpoint

BASE_VARIABLE = "WORKBENCH_SESSIONS"
_STATE = "session.json"
_CHECKPOINTS = "checkpoints"
_ENDED = -1.0
"""The start of a process that had ended before it was asked for."""
_UNKNOWN = "-"
_START_FIELD = 22
"""The place in /proc/PID/stat, counted from 1, of the start in ticks since the boot."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Names one process for good, wherever the folder is read and whatever the system's clock does meanwhile.

    Attributes:
        pid: its number.
        started: on Linux, when it started in clock ticks since the boot; elsewhere in seconds since the epoch.
        boot: the id of the boot of its host; ``-`` where the system has none.
        namespace: the numbers of processes that its container has; ``-`` where the system has none.
        host: the name of its host.
    """

    pid: int
    started: float
    boot: str
    namespace: str
    host: str

    def __str__(self) -> str:
        return f"{self.pid} {self.started} {self.boot} {self.namespace} {self.host}"

    @classmethod
    def parse(cls, text: str) -> ProcessId:
        """The reverse of `str`."""
        pid, started, *place = text.split(maxsplit=4)
        return cls(int(pid), float(started), *place)

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The process of this host that has this number now. If none has, `find` finds none."""
        try:
            return cls(pid, _start_of(pid), *_here())
        except psutil.NoSuchProcess:
            return cls(pid, _ENDED, *_here())

    def find(self) -> psutil.Process | None:
        """The process. None when it has ended, is a zombie, or when another process has its id now; also None for one
        of another host or container.
        """
        if (self.boot, self.namespace) != _here()[:2]:
            return None
        try:
            process = psutil.Process(self.pid)
            same = abs(_start_of(self.pid) - self.started) < 0.5
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def has_ended(self) -> bool:
        """Whether the process has surely ended. Of a process of another host or container this is not known."""
        boot, namespace, host = _here()
        if self.find() is not None:
            return False
        if self.boot == boot != _UNKNOWN:
            return self.namespace == namespace
        return self.host == host  # of an earlier boot, or on a system that numbers no boots

    def kill(self) -> None:
        """End the process at once. A process that has ended already is no error."""
        process = self.find()
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _start_of(pid: int) -> float:
    """psutil adds the time of the boot, which changes when the clock is set."""
    if sys.platform != "linux":
        return float(psutil.Process(pid).create_time())
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            behind_name = file.read().rpartition(")")[2].split()  # field 3 and on: the name may have spaces
    except OSError:  # none has this number, or one of another user that may not be looked at
        raise psutil.NoSuchProcess(pid) from None
    return float(behind_name[_START_FIELD - 3])


def _here() -> tuple[str, str, str]:
    """Boot, namespace and host of this process."""
    boot = namespace = _UNKNOWN
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip() or _UNKNOWN
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return boot, namespace, socket.gethostname()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What another process of the user needs to reach the engines of a session on this host."""

    controller: ProcessId
    engines: dict[int, ProcessId]
    gpus: tuple[str, ...]
    since_s: float
    started_in: str = "."  #: the folder in which they began

    def is_alive(self) -> bool:
        """Whether the controller still runs. Engines end with it."""
        return self.controller.find() is not None

    @classmethod
    def parse(cls, state: dict) -> EngineFacts:
        """The reverse of `dataclasses.asdict`, after a passage through JSON."""
        engines = {int(rank): ProcessId(**process) for rank, process in state["engines"].items()}
        controller, started_in = ProcessId(**state["controller"]), state.get("started_in", ".")
        return cls(controller, engines, tuple(state["gpus"]), state["since_s"], started_in)


def base_folder() -> Path:
    """The folder of all sessions of this user: ``$WORKBENCH_SESSIONS``, else one among temporary files. No other user
    may read it.

    Raises:
        SessionError: the folder cannot be made; or another user owns it or may read it, or it is no folder.
    """
    chosen = os.environ.get(BASE_VARIABLE)
    try:
        path = Path(chosen).expanduser() if chosen else Path(tempfile.gettempdir()) / f"workbench-{os.getuid()}"
    except OSError as error:  # all disks for temporary files are full, or may not be written
        raise _cannot_be_made("a folder among temporary files", error) from error
    try:
        path.mkdir(mode=0o700, parents=bool(chosen))
    except FileExistsError:
        pass  # what it is decides
    except OSError as error:
        raise _cannot_be_made(f"the folder {path}", error) from error
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        is_own = stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid()
        fix = f"Run `chmod 700 {shlex.quote(str(path))}`" if is_own else "Remove it"
        raise SessionError(
            f"Session: {path} must be a folder of user {os.getuid()} with mode 0700, but it has owner "
            f"{info.st_uid} and mode {stat.S_IMODE(info.st_mode):04o}. Sessions keep their keys there. "
            f"{fix}, or set {BASE_VARIABLE} to a folder of your own, of that mode or not there yet."
        )
    return path


def _cannot_be_made(what: str, error: OSError) -> SessionError:
    return SessionError(
        f"Session: {what} cannot be made: {error.strerror}. Sessions keep their keys there. Set {BASE_VARIABLE} to a "
        "folder of your own of mode 0700, or to a path where you may make one, on a disk with room."
    )


@dataclass(frozen=True, slots=True)
class SessionFolder:
    """One session's folder; ``create`` makes a new one, mode 0700."""

    path: Path

    @classmethod
    def create(cls) -> SessionFolder:
        base = base_folder()
        try:
            folder = cls(Path(tempfile.mkdtemp(prefix="session-", dir=base)))
            try:
                folder.record([])
            except BaseException:
                folder.remove()  # nobody removes one without a record
                raise
        except OSError as error:
            raise _cannot_be_made(f"a folder in {base}", error) from error
        return folder

    def new_store(self) -> str:
        """An ``init_method`` for a new torch.distributed world on this host: a file used only once."""
        handle, name = tempfile.mkstemp(prefix="store-", dir=self.path)
        os.close(handle)
        os.unlink(name)
        return f"file://{name}"

    def record(self, processes: Collection[ProcessId], engines: EngineFacts | None = None, keep: bool = False) -> None:
        """Record the owner of the session, its processes, and whether its engines outlive the owner."""
        self._write(
            **_ownership(),
            processes=[asdict(process) for process in processes],
            engines=asdict(engines) if engines is not None else None,
            keep=keep,
        )

    def release(self) -> None:
        """Leave the session to another notebook.

        Raises:
            SessionError: the disk is full, for example.
        """
        try:
            self._write(owner=None, notebook="")
        except OSError as error:
            raise SessionError(
                f"Session.detach(): cannot write to {self.path} ({error.strerror}), where other notebooks read which "
                "engines are free. The session is as it was. Make room and detach again; or end this notebook, which "
                "frees them too."
            ) from error

    def claim(self) -> ProcessId | None:
        """Become the owner of a session that has none. Returns the owner where another process has the session."""
        with (self.path / "claim").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            owner = self.owner()
            if owner is not None and not owner.has_ended():
                return owner
            self._write(**_ownership())
            return None

    def owner(self) -> ProcessId | None:
        """The notebook process that owns this session. None where the folder has no readable record of it, as those of
        version 0.2.
        """
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return ProcessId(**self._state()["owner"])
        return None

    def notebook(self) -> str:
        """The name of the notebook or script that owns this session. Empty where it is unknown."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return str(self._state()["notebook"])
        return ""

    def is_in_use(self) -> bool:
        """Whether the notebook that owns this session still runs, as far as it is known here."""
        owner = self.owner()
        return owner is not None and not owner.has_ended()

    def processes(self) -> list[ProcessId]:
        """All recorded processes of the session."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return [ProcessId(**process) for process in self._state()["processes"]]
        return []

    def engines(self) -> EngineFacts | None:
        """The engines, once all of them run. None where a profile has started them."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            return EngineFacts.parse(self._state()["engines"])
        return None

    def kept(self) -> EngineFacts | None:
        """The engines if another notebook may take them over. None where they end with their own notebook."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            return self.engines() if self._state()["keep"] else None
        return None

    def add_checkpoint(self, saved: SavedCheckpoint) -> None:
        """Remember a checkpoint for all engines of the session, also those that are started later. On a full disk this
        is a warning: the folder of the checkpoint itself may be on another one.
        """
        try:
            with open(self.path / _CHECKPOINTS, "a") as file:
                file.write(f"\n{json.dumps(asdict(saved))}")  # a full disk may have taken half a line before
        except FileNotFoundError:
            pass  # the session's folder has been removed
        except OSError as error:
            warnings.warn(
                f"%workbench recover will not find the checkpoint {saved.path}: its name cannot be written to "
                f"{self.path}: {error.strerror}. Saving goes on; wb.checkpoint.load reads it.",
                stacklevel=2,
            )

    def checkpoints(self) -> list[SavedCheckpoint]:
        """Those of the session, oldest first."""
        file, found = self.path / _CHECKPOINTS, list[SavedCheckpoint]()
        for line in file.read_text().splitlines() if file.is_file() else ():
            with contextlib.suppress(ValueError):
                found.append(SavedCheckpoint(**json.loads(line)))
        return found

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

    def _write(self, **changes: object) -> None:
        try:
            state = self._state()
        except FileNotFoundError:
            state = {}
        text = self.path / f"{_STATE}.new"
        text.write_text(json.dumps(state | changes))
        text.replace(self.path / _STATE)


def _ownership() -> dict[str, object]:
    """This process as the owner of a session, and its notebook, whose path Jupyter gives to its kernels."""
    notebook = os.environ.get("JPY_SESSION_NAME") or sys.argv[0]
    return {"owner": asdict(ProcessId.of(os.getpid())), "notebook": notebook}


def all_folders() -> list[SessionFolder]:
    """The sessions of this user, the newest last."""
    return [SessionFolder(path) for path in sorted(base_folder().glob("session-*"), key=_changed_s)]


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # removed meanwhile
        return 0.0


def stale_folders() -> Iterator[SessionFolder]:
    """Folders whose owner has ended and whose engines no notebook can use any more."""
    for folder in all_folders():
        owner, kept = folder.owner(), folder.kept()
        was_left = owner.has_ended() if owner is not None else kept is not None
        if was_left and (kept is None or kept.controller.has_ended()):
            yield folder


def reap_stale_sessions() -> int:
    """End the processes of stale folders and remove these folders. Returns the number of folders found."""
    found = list(stale_folders())
    for folder in found:
        folder.reap()
    return len(found)
