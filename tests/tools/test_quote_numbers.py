"""The README quotes what was measured, by command."""

from __future__ import annotations

import pytest

from tools.quote_numbers import README, benchmarks_part, quote, quoted


def test_the_readme_quotes_the_newest_table_of_benchmarks() -> None:
    """``python -m tools.quote_numbers`` makes it so."""
    assert quoted(README.read_text(encoding="utf-8"), "benchmarks") == benchmarks_part()


@pytest.mark.parametrize("name", ["benchmarks", "demo table"])
def test_every_place_is_marked_once(name: str) -> None:
    assert quoted(README.read_text(encoding="utf-8"), name)


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    text = "a\n<!-- numbers -->\nold\n<!-- end of numbers -->\nb\n"
    assert quote(text, "numbers", "new\n") == text.replace("old", "new")
