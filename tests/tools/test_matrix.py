"""The table of versions."""

from __future__ import annotations

from tests.private_torch_names import CHECKED_ON
from tools.matrix import PAGE, Row, rows_of, with_row

EMPTY = "before\n<!-- matrix -->\nhead\nline\n<!-- end of matrix -->\nafter\n"


def row(python: str, torch: str, passed: str = "1", date: str = "2026-01-01") -> Row:
    return Row(python, torch, "cpu", passed, "0", "0", date)


def test_a_row_replaces_that_of_its_versions_and_they_are_sorted() -> None:
    page = EMPTY
    for one in (row("3.12.1", "2.13.0"), row("3.9.2", "2.13.0"), row("3.12.1", "2.11.0"), row("3.12.1", "2.13.0", "2")):
        page = with_row(page, one)
    assert rows_of(page) == [row("3.9.2", "2.13.0"), row("3.12.1", "2.11.0"), row("3.12.1", "2.13.0", "2")]
    assert page.startswith("before\n") and page.endswith("after\n")


def test_every_version_whose_private_names_are_listed_has_run() -> None:
    ran = {".".join(row.torch.split(".")[:2]) for row in rows_of(PAGE.read_text(encoding="utf-8"))}
    assert ran >= set(CHECKED_ON)
