"""Programs of documents as they are typed in: run from their files, whole or up to a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"


def source_of(name: str, **changed: str) -> str:
    """The text of a program; ``changed`` gives other values to names that it sets at the left margin."""
    lines = (PROGRAMS / f"{name}.py").read_text(encoding="utf-8").splitlines(keepends=True)
    for target, value in changed.items():
        start = f"{target.replace('__', ', ')} = "
        (place,) = (number for number, line in enumerate(lines) if line.startswith(start))
        lines[place] = f"{start}{value}\n"
    return "".join(lines)


def run(source: str, namespace: dict[str, Any] | None = None) -> dict[str, Any]:
    """Run a program as this rank, and give the names it has set."""
    namespace = {"__name__": "__main__"} if namespace is None else namespace
    exec(compile(source, "<program>", "exec"), namespace)
    return namespace
