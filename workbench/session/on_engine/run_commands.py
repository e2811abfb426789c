"""Commands of the notebook to the running call. The control thread records them; the call reads them between steps."""

from __future__ import annotations

from workbench.core.run_commands import RunCommand
from workbench.session.on_engine import shell as engine_shell

_commands: dict[int, list[RunCommand]] = {}


def add(run: int, kind: str, text: str = "") -> None:
    """Record a command for a run, also for one that has not begun. The engine's control thread calls this."""
    _commands.setdefault(run, []).append(RunCommand(kind, text))


def commands() -> list[RunCommand]:
    """All commands to the running call so far, in order. Cheap to poll."""
    tag = engine_shell.current_tag() if _commands else None
    return list(_commands.get(tag.run, ())) if tag is not None else []
