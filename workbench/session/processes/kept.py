"""Sessions that outlive their notebook: which there are, and taking one over."""

from __future__ import annotations

import time
from dataclasses import dataclass

from workbench.errors import SessionError
from workbench.session.processes.folder import Kept, SessionFolder, all_folders
from workbench.units import format_seconds

_PREFIX = "session-"


@dataclass(frozen=True, slots=True)
class KeptSession:
    """Engines of an earlier notebook that are still there."""

    name: str
    num_engines: int
    device: str
    age_s: float
    owner_pid: int | None  #: the notebook that uses them now

    def __str__(self) -> str:
        whose = f"used by process {self.owner_pid}" if self.owner_pid is not None else "used by nobody"
        return (
            f"{self.name}: {self.num_engines} engine{'s' if self.num_engines > 1 else ''} on {self.device}, "
            f"started {format_seconds(round(self.age_s))} ago, {whose}"
        )


def kept_sessions() -> list[KeptSession]:
    """All sessions of this user that were started with ``keep=True`` and whose engines run, the newest last."""
    return [_describe(folder, kept) for folder, kept in _alive()]


def free_sessions() -> list[KeptSession]:
    """Those of them that no notebook uses."""
    return [session for session in kept_sessions() if session.owner_pid is None]


def take_over(name: str | None = None) -> tuple[SessionFolder, Kept]:
    """Become the owner of a kept session that nobody uses.

    Raises:
        SessionError: there is none, none of that name, several to choose from, or another notebook uses it.
    """
    asked = f"Session.attach({'' if name is None else repr(name)})"
    found = [(folder, kept) for folder, kept in _alive() if name is None or name_of(folder) == name]
    if name is None:
        found = [each for each in found if _describe(*each).owner_pid is None] or found
    if not found:
        known = ", ".join(session.name for session in kept_sessions()) or "none"
        raise SessionError(
            f"{asked}: no engines of an earlier notebook are there{'' if name is None else ' by that name'} (kept: "
            f"{known}). Only those outlive their notebook that were started with keep=True (%workbench start --keep)."
        )
    if len(found) > 1:
        names = ", ".join(name_of(folder) for folder, _ in found)
        raise SessionError(f"{asked}: {len(found)} kept sessions are there, 1 can be used. Name it: {names}.")
    folder, kept = found[0]
    owner = folder.claim()
    if owner is not None:
        raise SessionError(
            f"{asked}: these engines are used by process {owner.pid}, and serve one notebook at a time. "
            f"Leave them there first (%workbench detach), or end that notebook's kernel."
        )
    return folder, kept


def clean() -> int:
    """End the kept engines that no notebook uses; the number of sessions ended."""
    num_ended = 0
    for folder, _ in _alive():
        if folder.claim() is None:
            folder.reap()
            num_ended += 1
    return num_ended


def name_of(folder: SessionFolder) -> str:
    """The name by which people choose a session."""
    return folder.path.name.removeprefix(_PREFIX)


def _alive() -> list[tuple[SessionFolder, Kept]]:
    found = [(folder, folder.kept()) for folder in all_folders()]
    return [(folder, kept) for folder, kept in found if kept is not None and kept.is_alive()]


def _describe(folder: SessionFolder, kept: Kept) -> KeptSession:
    owner = folder.owner()
    owner_pid = owner.pid if owner is not None and owner.find() is not None else None
    device = "cuda" if kept.gpus else "cpu"
    return KeptSession(name_of(folder), len(kept.engines), device, time.time() - kept.since_s, owner_pid)
