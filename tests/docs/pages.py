"""What the tests know of a page: its blocks of code, what they print, and how the page says that it is run.

A page with blocks of Python says once how they run, all of them in order as one program; in a comment where readers
need not know it:

    *The code runs on 4 ranks: ...*     on four processes, every one of them
    <!-- run: alone -->                 in one process, without a world
    <!-- run: notebook -->              as cells of a notebook

A block of ``text`` right behind one of ``python`` is what it prints, with ``...`` for what differs from run to run.
A block that is not run says so to the reader, in the line above it: "*Not run by the tests: it needs a GPU.*"
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])

_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"\*Not run by the tests: [^*]+\*\s*\Z")
_HOW = re.compile(r"^(?:<!-- run: (.+) -->|\*The code runs on (\d ranks): \[how to follow it\].*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block of Python: its line in the page, the code, and what it should print (None: the page does not say)."""

    line: int
    code: str
    prints: str | None
    runs: bool


def name_of(page: Path) -> str:
    """The page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def how(text: str) -> str | None:
    """What the page says: ``"4 ranks"``, ``"alone"``, ``"notebook"``; None for nothing."""
    found = _HOW.search(text)
    return found[1] or found[2] if found else None


def blocks(text: str) -> list[Block]:
    """The blocks of Python of a page, in order."""
    return list(_blocks(text))


def _blocks(text: str) -> Iterator[Block]:
    found = list(_BLOCK.finditer(text))
    for index, one in enumerate(found):
        if one[1] != "python":
            continue
        following = found[index + 1] if index + 1 < len(found) else None
        is_output = following is not None and following[1] == "text" and not text[one.end() : following.start()].strip()
        yield Block(
            line=text.count("\n", 0, one.start()) + 2,
            code=one[2],
            prints=following[2] if following is not None and is_output else None,
            runs=_NOT_RUN.search(text[: one.start()]) is None,
        )
