"""The words of banned_words.md: none of them is part of a name, a docstring or a document."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"
BANNED = ROOT / "tests" / "banned_words.md"

HISTORY = ("CHANGELOG.md", "benchmarks/results/", "tests/banned_words.md")
"""Documents that name old words on purpose, or that record what was measured at a time."""


@dataclass(frozen=True)
class Ban:
    """Some forms of a word, where they are banned, and what to say instead; ``phrase`` is allowed all the same."""

    forms: tuple[str, ...]
    phrase: str
    instead: str
    in_names: bool
    in_text: bool
    rooms: tuple[str, ...]  # empty: everywhere

    def holds_in(self, path: str) -> bool:
        return not self.rooms or any(path.startswith((f"workbench/{room}/", f"tests/{room}/")) for room in self.rooms)


def read_bans(text: str) -> list[Ban]:
    """The rows of the table of banned words.

    >>> read_bans("# Words that are not used\\n|---|\\n| ghost, ghosts | placeholder | names of tensors |")
    [Ban(forms=('ghost', 'ghosts'), phrase='', instead='placeholder', in_names=True, in_text=False, rooms=('tensors',))]
    """
    table = re.split(r"\|[-|]+\|\n", text.split("# Words that are not used")[1])[1]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines() if row.startswith("| ")]
    return [_ban(*row) for row in rows]


def _ban(forms: str, instead: str, where: str) -> Ban:
    kinds, _, rooms = where.partition(" of ")
    forms, _, phrase = forms.partition(" (not ")
    assert set(kinds.split(", ")) <= {"names", "text"}, where
    return Ban(
        tuple(forms.split(", ")),
        phrase.rstrip(")"),
        instead,
        "names" in kinds,
        "text" in kinds,
        tuple(rooms.split(", ")) if rooms else (),
    )


@cache
def words_of(name: str) -> str:
    """The words of an identifier, in lower case, with a blank around each.

    >>> words_of("GhostLayers_2x")
    ' ghost layers 2 x '
    """
    return f" {' '.join(re.findall(r'[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+', name)).lower()} "


def names_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every name that a module's nodes define: classes, functions, arguments, variables, attributes."""
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.alias(asname=str(name)):
                yield name


def docstrings_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every text that stands alone as a statement: docstrings, and those of attributes."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def banned_names(path: str, names: set[str], bans: list[Ban]) -> list[str]:
    """``path: name: say instead`` for each name with a banned word; dunder names belong to Python."""
    found = []
    all_words = " ".join(map(words_of, names))
    bans_here = [
        ban for ban in bans if ban.in_names and ban.holds_in(path) and any(form in all_words for form in ban.forms)
    ]
    for name in sorted(names):
        words = "" if name.startswith("__") else words_of(name)
        found += [
            f"{path}: {name}: not '{form}' but {ban.instead}"
            for ban in bans_here
            for form in ban.forms
            if f" {form} " in (words.replace(f" {ban.phrase} ", "  ") if ban.phrase else words)
        ]
    return found


def banned_text(path: str, text: str, bans: list[Ban]) -> list[str]:
    """``path: ... words around ...: say instead`` for each banned word of a text."""
    instead = {form: ban.instead for ban in bans if ban.in_text and ban.holds_in(path) for form in ban.forms}
    if not instead:
        return []
    pattern = r"(?<![\w/-])(?:" + "|".join(re.escape(form).replace(r"\ ", r"\s+") for form in instead) + r")(?![\w-])"
    return [
        f"{path}: ...{text[max(0, one.start() - 30) : one.end() + 30]!r}...: "
        f"not '{one[0]}' but {instead[' '.join(one[0].lower().split())]}"
        for one in re.finditer(pattern, text, re.IGNORECASE)
    ]


@cache
def tracked() -> list[str]:
    """Source files and documents whose words count."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True)
    done = [name for name in listed.stdout.split("\0") if name and not name.startswith(HISTORY)]
    return [name for name in done if (ROOT / name).exists() and name != "tests/test_glossary.py"]


def may_hold(text: str, bans: list[Ban]) -> list[Ban]:
    """The bans of which a form is in the text at all: to read the names of all files would take ten times as long."""
    joined = "".join(text.lower().replace("_", " ").split())
    return [ban for ban in bans if any(form.replace(" ", "") in joined for form in ban.forms)]


def broken_in(path: str, bans: list[Ban]) -> list[str]:
    """Every banned word of one file."""
    text = (ROOT / path).read_text("utf-8")
    bans = may_hold(path + text, [ban for ban in bans if ban.holds_in(path)])
    if not bans:
        return []
    if path.endswith(".md"):
        return banned_text(path, text, bans)
    nodes = list(ast.walk(ast.parse(text)))
    names = {*names_in(nodes), *path.removesuffix(".py").split("/")}
    return [*banned_names(path, names, bans), *banned_text(path, "\n\n".join(docstrings_in(nodes)), bans)]


def test_no_banned_word_is_used() -> None:
    bans = read_bans(BANNED.read_text("utf-8"))
    found = [line for path in tracked() for line in broken_in(path, bans)]
    assert not found, "\n".join(found)


def test_every_plain_noun_is_explained_once() -> None:
    words = re.findall(r"^\* \*\*([^*]+)\*\*:", GLOSSARY.read_text("utf-8"), re.MULTILINE)
    assert len(words) > 50
    assert len(words) == len(set(words))


BANS = read_bans(
    "## Words that are not used\n|---|---|---|\n| ghost, ghosts | placeholder | names, text |\n"
    "| stand in | cache | names |\n| flight (not in flight) | work | names |\n"
    "| letters | messages | names of transport |\n| known of | known | text |"
)


@pytest.mark.parametrize(
    "name",
    ["ghost", "flight", "is_ghost", "GhostLayer", "test_ghosts_work", "_GHOST_GRAD", "stand_in", "StandIn", "letters"],
)
def test_a_banned_name_is_found(name: str) -> None:
    assert banned_names("workbench/transport/base.py", {name}, BANS)


@pytest.mark.parametrize("name", ["ghostly", "pieces_in_flight", "standing", "stand", "letter", "__letters__"])
def test_other_names_pass(name: str) -> None:
    assert not banned_names("workbench/transport/base.py", {name}, BANS)
    assert not banned_names("workbench/core/base.py", {"letters"}, BANS)


@pytest.mark.parametrize("text", ["A ghost.", "**Ghosts**", "what is known\n  of ranks"])
def test_a_banned_text_is_found(text: str) -> None:
    assert banned_text("docs/index.md", text, BANS)


@pytest.mark.parametrize("text", ["ghostly", "docs/ghost.md", "letters", "known, of"])
def test_other_texts_pass(text: str) -> None:
    assert not banned_text("docs/index.md", text, BANS)


def test_every_kind_of_name_is_read() -> None:
    code = (
        'import a as b\nclass C:\n    d: int = 0\n    "doc"\n    def f(self, g, *h):\n        self.i = [j for j in g]'
    )
    nodes = list(ast.walk(ast.parse(code)))
    assert {"b", "C", "d", "f", "g", "h", "i", "j"} <= set(names_in(nodes))
    assert list(docstrings_in(nodes)) == ["doc"]
