"""The documentation names everything that is public, and what it names is there. (`make check` builds the site.)"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import workbench as wb
from tests.docs.pages import PAGES, ROOT, name_of
from tools.draw_concepts import FOLDER, PICTURES, files

REFERENCE = sorted((ROOT / "docs" / "api").glob("*.md"))
TROUBLES = ROOT / "docs" / "troubleshooting.md"


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(page.read_text("utf-8") for page in REFERENCE)
    named = re.findall(r"^::: wb\.([\w.]+)$", text, re.MULTILINE)
    spaces = ("checkpoint", "debug", "draw", "planner")
    members = {f"{space}.{name}" for space in spaces for name in getattr(wb, space).__all__}
    names = {*wb.__all__, "errors", "flow", "testing"} - {*spaces} | members
    assert sorted(named) == sorted(names), "one entry `::: wb.NAME` in docs/api for every name"


def test_pictures_of_concepts_are_those_that_are_drawn() -> None:
    expected = dict(files())
    assert sorted(expected) == sorted(FOLDER.glob("*.svg"))
    assert {path: path.read_text("utf-8") for path in expected} == expected, "run python -m tools.draw_concepts"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_tables_have_as_many_cells_in_every_row(path: Path) -> None:
    """A ``|`` in code ends the cell, unless a backslash is before it."""
    rows = re.findall(r"(?:^\|.*\n)+", path.read_text("utf-8"), re.MULTILINE)
    for table in rows:
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        wrong = [row for row, number in zip(table.splitlines(), cells, strict=True) if number != cells[0]]
        assert not wrong, f"{path.name}: write \\\\| inside of cells"


def test_every_picture_is_shown() -> None:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    assert not [name for name in PICTURES if f"images/concepts/{name}.svg" not in text]


@cache
def messages() -> list[str]:
    """Every text in the code, with ``{}`` for what is filled in."""
    return [
        _written(node)
        for path in sorted((ROOT / "workbench").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.JoinedStr | ast.Constant)
    ]


def _written(node: ast.JoinedStr | ast.Constant) -> str:
    parts: Iterator[ast.AST] = iter(node.values if isinstance(node, ast.JoinedStr) else [node])
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)


def quoted(text: str) -> list[str]:
    """What the first column of a page's tables quotes."""
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    return [found for row in rows if not row.startswith("`%%") for found in re.findall(r"`([^`]+)`", row)[:1]]


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    said = messages()
    found = quoted(TROUBLES.read_text("utf-8"))
    assert len(found) > 30
    assert not [words for words in found if not any(words in message for message in said)]


def test_a_message_that_nobody_says_is_found() -> None:
    assert quoted("| `no such words at all` | x |") == ["no such words at all"]
    assert not any("no such words at all" in message for message in messages())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_the_sources_lead_somewhere(page: Path) -> None:
    """As one reads them in the repository."""
    for name in re.findall(r"\]\((?!\w+:)([^)#\s]+)", page.read_text("utf-8")):
        assert (page.parent / name).exists(), name


FILE = r"`((?:workbench|tests|docs|tools|benchmarks)/[\w./-]+)`"


IN_A_ROOM = r"`([a-z_]+/[\w/]+\.py)`"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    assert not [name for name in re.findall(FILE, text) if not (ROOT / name).exists()]
    named = re.findall(IN_A_ROOM, text)
    assert not [name for name in named if not any((place / name).exists() for place in (ROOT, ROOT / "workbench"))]


@pytest.mark.parametrize(("page", "least"), [("CONTRIBUTING.md", 16), ("docs/tour-of-the-code.md", 40)])
def test_pages_about_the_code_name_files(page: str, least: int) -> None:
    assert len(re.findall(FILE, (ROOT / page).read_text("utf-8"))) >= least


ROOMS = sorted((ROOT / "workbench").rglob("README.md"))


def missing_places(readme: Path, text: str) -> list[str]:
    """Files and folders that a room's page names and that are neither in the room nor where the repository starts."""
    named = re.findall(r"`([\w./-]+(?:\.(?:py|md|js|css)|/))`", text)
    return [name for name in named if not (readme.parent / name).exists() and not (ROOT / name).exists()]


@pytest.mark.parametrize("readme", ROOMS, ids=name_of)
def test_the_page_of_a_room_is_short_and_names_what_is_there(readme: Path) -> None:
    text = readme.read_text("utf-8")
    assert len(text.splitlines()) <= 60
    assert not missing_places(readme, text)


def test_a_room_that_names_what_is_gone_is_found() -> None:
    assert missing_places(ROOMS[0], "`__init__.py`, `tests/docs/`, `gone.py`, `nowhere/`") == ["gone.py", "nowhere/"]


DECISIONS = sorted((ROOT / "docs" / "design" / "decisions").glob("0*.md"))


@pytest.mark.parametrize("record", DECISIONS, ids=name_of)
def test_a_decision_is_a_page_of_four_parts(record: Path) -> None:
    text = record.read_text("utf-8")
    assert re.findall("^## (.+)", text, re.MULTILINE) == ["Context", "Decision", "Also tried", "Consequences"]
    assert re.search(r"^\*\d{4}-\d\d-\d\d\*$", text, re.MULTILINE)
    assert len(text.splitlines()) <= 60


def test_the_index_has_every_decision() -> None:
    index = (DECISIONS[0].parent / "index.md").read_text("utf-8")
    titles = [record.read_text("utf-8").splitlines()[0].partition(". ")[2] for record in DECISIONS]
    rows = [(record.stem[:3], record.name, title) for record, title in zip(DECISIONS, titles, strict=True)]
    assert re.findall(r"^\| \[(\d+)\]\((.+?)\) \| (.+?) \|", index, re.MULTILINE) == rows
