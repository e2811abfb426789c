"""The summary of all comparisons: nothing that was missed is left out, and the worst row stands beside the best."""

from __future__ import annotations

from benchmarks.one_table import Result, cells_of, one_table
from benchmarks.reporting import Comparison, Target, side_by_side
from benchmarks.summary import IN_SHORT, alone, beside_software, in_short, misses, read_rows

FASTER = Target(1, at_least=True)
STEPS = [
    side_by_side("small", 0.02, "DTensor", 0.05, FASTER),
    side_by_side("large", 0.05, "DTensor", 0.04, FASTER),
    side_by_side("loading", 0.04, "dcp", 0.03, Target(1.5)),
    side_by_side("alone", 0.01, "limit", 0.02, Target(1.5)),
]
FIGURES = [
    Comparison("first", 22.0, Target(15, unit="%")),
    Comparison("second", 44.0, Target(15, unit="%")),
    Comparison("third", 2.0, Target(15, unit="%")),
    Comparison("start", 0.9, Target(0.5, unit="s")),
    Comparison("start again", 1.2, Target(0.5, unit="s")),
    Comparison("a copy", 1.7, Target(1.5), "3 ms", "limit 1.8 ms"),
]


def summarized(what, *results: tuple[str, list[Comparison]]) -> list[tuple[str, ...]]:
    """The rows of a summary, without its heading."""
    found = [Result("x", "day", title, "", tuple(tuple(row.cells()) for row in rows)) for title, rows in results]
    return [cells_of(line) for line in what(read_rows(one_table(found))).splitlines()[2:]]


def test_the_worst_row_stands_beside_the_best() -> None:
    (row,) = summarized(beside_software, ("Steps", STEPS))
    assert row == (
        "Steps",
        "0.75×: loading, 40.0 ms, dcp 30.0 ms",
        "2.5×: small, 20.0 ms, DTensor 50.0 ms",
        "2 of 3",
    )


def test_in_short_it_is_ratios() -> None:
    """Of the comparisons that the first page names, whatever the number of processes."""
    slow, others = STEPS[1:2], STEPS[2:]
    found = summarized(in_short, ("ZeRO against x", slow), ("Steps", STEPS), ("Data parallel", STEPS[:1]))
    assert found == [("Data parallel and ZeRO", "0.8×", "2.5×", "1 of 2")]
    assert len(IN_SHORT) == 6 and summarized(in_short, ("Steps", others)) == []


def test_targets_without_other_software_are_counted() -> None:
    found = Result("x", "day", "Steps", "", tuple(tuple(row.cells()) for row in [*STEPS, *FIGURES]))
    assert alone(read_rows(one_table([found]))) == (
        "10 more targets are of other comparisons, a formula, a limit or a prediction; 4 are met."
    )


def test_one_row_is_said_once_and_what_stands_alone_is_left_out() -> None:
    (row,) = summarized(beside_software, ("One", STEPS[:1]), ("Alone", STEPS[3:]), ("Figures", FIGURES))
    assert row == ("One", "2.5×: small, 20.0 ms, DTensor 50.0 ms", "", "1 of 1")


def test_every_miss_is_counted_and_the_furthest_is_named() -> None:
    assert summarized(misses, ("Steps", STEPS), ("Figures", FIGURES)) == [
        ("Steps", "large", "1", "0.800", "at least 1"),
        ("Figures", "second", "2", "22.0 % to 44.0 %", "at most 15 %"),
        ("", "start again", "2", "900 ms to 1.20 s", "at most 0.5 s"),
        ("", "a copy", "1", "1.70", "at most 1.5"),
    ]
