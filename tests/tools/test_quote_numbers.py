"""The README and the page of benchmarks quote what was measured, by command."""

from __future__ import annotations

from tools.quote_numbers import PAGE, README, outdated, quote, quoted, quoted_demo, short_part


def test_the_newest_table_of_benchmarks_is_quoted() -> None:
    """``python -m tools.quote_numbers`` makes it so."""
    assert outdated() == []
    assert quoted(README.read_text(encoding="utf-8"), "benchmarks") == short_part()


def test_the_demo_is_quoted() -> None:
    assert "samples/s" in quoted(PAGE.read_text(encoding="utf-8"), "demo table")


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    text = "a\n<!-- numbers -->\nold\n<!-- end of numbers -->\nb\n"
    assert quote(text, "numbers", "new\n") == text.replace("old", "new")


def test_both_tables_of_the_demo_are_quoted_with_their_threads() -> None:
    table = (
        "{}, 5 weights:\nstrategy  samples/s\ndata  {}\none device  5\npeak: memory\n  data  *: data\n{}\nAll equal.\n"
    )
    threads = "2 engines with 1 thread each; one device is one of them with 1 thread, while no other works"
    quoted_part = quoted_demo(
        "".join(table.format(*row, threads) for row in (("One", 8), ("Two", 3))), "Measured today."
    )
    assert quoted_part.startswith(
        "One, 5 weights:\n\n    strategy  samples/s\n    data  8\n    one device  5\n\nTwo, 5"
    )
    assert "    data  3\n    one device  5\n\nMeasured today.\n2 engines with 1 thread each" in quoted_part
