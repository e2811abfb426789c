"""Lists the sessions of this user on this host, finds one by its name, and takes over one that has no notebook.

Only a user who may read a session's folder (mode 0700) can use its engines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.errors import SessionError
from workbench.session.processes.folder import EngineFacts, SessionFolder, all_folders
from workbench.units import counted, format_seconds

_PREFIX = "session-"
Found = tuple[SessionFolder, EngineFacts]


@dataclass(frozen=True, slots=True)
class RunningSession:
    """A session's running engines, and the notebook that they serve."""

    name: str
    num_engines: int
    device: str
    age_s: float
    owner_pid: int | None  #: the process that uses the engines
    notebook: str = ""  #: the notebook or script of that process; empty if unknown

    def __str__(self) -> str:
        what = f"{self.name}: {counted(self.num_engines, 'engine')} on {self.device}"
        return f"{what}, started {format_seconds(round(self.age_s))} ago, used by {self.user}"

    @property
    def user(self) -> str:
        """The user of the engines: ``process 4711 (digits.ipynb)``, or ``nobody``."""
        if self.owner_pid is None:
            return "nobody"
        return f"process {self.owner_pid}" + (f" ({self.notebook})" if self.notebook else "")


def kept_sessions() -> list[RunningSession]:
    """The running sessions that were started with ``keep=True``."""
    return [describe(*each) for each in _kept()]


def unused_sessions() -> list[RunningSession]:
    """The kept sessions that no notebook uses."""
    return [session for session in kept_sessions() if session.owner_pid is None]


def take_over(name: str | None = None) -> Found:
    """Become the owner of a kept session that no notebook uses.

    Raises:
        SessionError: there is none, none of that name, several to choose from, or another notebook uses it.
    """
    asked = f"Session.attach({'' if name is None else repr(name)})"
    found = [each for each in _kept() if name is None or name_of(each[0]) == name]
    if name is None:
        found = [each for each in found if not each[0].is_in_use()] or found
    if not found:
        known = ", ".join(session.name for session in kept_sessions()) or "none"
        raise SessionError(
            f"{asked}: no engines of an earlier notebook are there{'' if name is None else ' by that name'} (kept: "
            f"{known}). Only engines started with keep=True (%workbench start --keep) outlive their notebook."
        )
    if len(found) > 1:
        names = ", ".join(name_of(folder) for folder, _ in found)
        raise SessionError(f"{asked}: {len(found)} kept sessions are there, 1 can be used. Name it: {names}.")
    folder, facts = found[0]
    if folder.claim() is not None:
        raise SessionError(
            f"{asked}: these engines are used by {describe(folder, facts).user}, and serve one notebook at a time. "
            f"Leave them there first (%workbench detach), or end that notebook's kernel. Until then %workbench attach "
            f"only observes them."
        )
    return folder, facts


def find(name: str | None, asked: str, option: str) -> Found:
    """A session to observe. Another notebook may use it.

    Args:
        name: the session's name; None where only one session runs.
        asked: the user's call, for the message.
        option: the option of that call that names a session, for the message.

    Raises:
        SessionError: there is none, none of that name, or several to choose from.
    """
    alive = _alive()
    found = [each for each in alive if name is None or name_of(each[0]) == name]
    if len(found) == 1:
        return found[0]
    if not alive:
        raise SessionError(
            f"{asked}: no engines of yours run on this host{_called(name)}. Start some in a notebook: "
            f"%workbench start --engines 2. (Engines of a profile answer only in their own notebook.)"
        )
    what = f"{counted(len(alive), 'session')} run{'s' if len(alive) == 1 else ''} on this host{_called(name)}"
    raise SessionError(
        f"{asked}: {what}. Name it with {option}:\n{format_sessions([describe(*each) for each in alive])}"
    )


def format_sessions(sessions: Sequence[RunningSession]) -> str:
    """The sessions, one a line."""
    return "\n".join(f"    {session}" for session in sessions)


def clean() -> int:
    """End the kept engines that no notebook uses. Returns the number of sessions ended."""
    num_ended = 0
    for folder, _ in _kept():
        if folder.claim() is None:
            folder.reap()
            num_ended += 1
    return num_ended


def name_of(folder: SessionFolder) -> str:
    """The name by which users choose a session."""
    return folder.path.name.removeprefix(_PREFIX)


def describe(folder: SessionFolder, facts: EngineFacts) -> RunningSession:
    """A session as its user sees it."""
    owner = folder.owner() if folder.is_in_use() else None
    owner_pid, notebook = (owner.pid, folder.notebook()) if owner is not None else (None, "")
    device = "cuda" if facts.gpus else "cpu"
    return RunningSession(name_of(folder), len(facts.engines), device, time.time() - facts.since_s, owner_pid, notebook)


def _called(name: str | None) -> str:
    return "" if name is None else f", none of them is called {name!r}"


def _alive() -> list[Found]:
    found = [(folder, folder.engines()) for folder in all_folders()]
    return [(folder, facts) for folder, facts in found if facts is not None and facts.is_alive()]


def _kept() -> list[Found]:
    return [each for each in _alive() if each[0].kept() is not None]
