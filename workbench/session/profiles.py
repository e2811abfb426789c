"""``%workbench profile``: profiles of what the engines train next, written and shown by the notebook."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from workbench.core.profile import Profile, RankPart
from workbench.session.cluster import Session
from workbench.session.remote_call import finished
from workbench.units import counted
from workbench.writers.profile_files import fill

_MORE_STEPS = "%workbench profile --any-size"


@dataclass
class _Asked:
    """A profile that was asked for."""

    steps: int
    warmup: int
    any_size: bool
    path: Path
    broke_off: bool = False  # whether a cell did, and left some of its steps


_asked: WeakKeyDictionary[Session, _Asked] = WeakKeyDictionary()
_last: WeakKeyDictionary[Session, Profile] = WeakKeyDictionary()


def begin(session: Session, steps: int, warmup: int, any_size: bool, path: str | None) -> str:
    """Profile the next steps of the engines; returns what to tell the user."""
    _begin(session, _Asked(steps, warmup, any_size, Path(path) if path else _new_file()))
    before = f" after {counted(warmup, 'other')}" if warmup else ""
    what = f"the next {counted(steps, 'step')}{before}"
    return f"workbench: {what} are profiled. Run a cell that trains; the table follows its output."


@contextmanager
def around_cell(session: Session) -> Iterator[None]:
    """A context in which a cell runs. After one that broke off, the profile that was asked for begins anew before the
    next one, also on engines that are new since.
    """
    if session in _asked and _asked[session].broke_off:
        _begin(session, _asked.pop(session))
    try:
        yield
    except BaseException:
        if session in _asked:
            _asked[session].broke_off = True
        raise


def _begin(session: Session, asked: _Asked) -> None:
    from workbench.training.profiling import armed  # loads torch

    finished(session.submit(armed.begin, asked.steps, asked.warmup, asked.any_size, label="profile"))
    asked.broke_off = False
    _asked[session] = asked


def finish(session: Session) -> Profile | str | None:
    """After a cell: the profile that was asked for, or what to tell the user if the cell took too few steps; None if
    none was asked for.
    """
    asked = _asked.get(session)
    if asked is None:
        return None
    from workbench.training.profiling import armed

    taken = finished(session.submit(armed.take, label="profile"))
    parts = [part for _, part in taken if part is not None]
    if len(parts) < session.num_engines:
        _begin(session, asked)
        steps = min(count for count, _ in taken)
        return (
            f"workbench: nothing is profiled yet. {counted(steps, 'step')} ended, and the first {asked.warmup} are for "
            "warming up. The next cell is profiled instead; --warmup sets another number."
        )
    del _asked[session]
    return made_of(session, parts, asked.path)


def made_of(session: Session, parts: Sequence[RankPart], path: Path | None = None) -> Profile:
    """The profile of all ranks' parts, in their order; its file is written."""
    profile = _last[session] = Profile()
    fill(profile, parts, path or _new_file(), session.device, _MORE_STEPS)
    return profile


def _new_file() -> Path:
    return Path(time.strftime("profile-%Y%m%d-%H%M%S.json.gz"))


def last(session: Session) -> Profile | None:
    """The profile that was made last; None before there is one."""
    return _last.get(session)
