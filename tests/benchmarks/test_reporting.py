"""What benchmarks hand in: tables, targets, result files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import reporting
from benchmarks.reporting import HEADER, Comparison, Target, over_launches, side_by_side, table


def test_a_table_is_aligned() -> None:
    text = table(["", "ms"], [["a", "1.00"], ["long", "20.00"]])
    assert text.splitlines() == ["|      |    ms |", "|------|------:|", "| a    |  1.00 |", "| long | 20.00 |"]


@pytest.mark.parametrize(
    ("target", "ratio", "met", "said"),
    [
        (Target(0.6), 0.6, True, "at most 0.6"),
        (Target(0.6), 0.61, False, "at most 0.6"),
        (Target(0.9, at_least=True), 0.9, True, "at least 0.9"),
        (Target(0.9, at_least=True), 0.89, False, "at least 0.9"),
        (Target(0.6), float("nan"), False, "at most 0.6"),
    ],
)
def test_a_target_is_met_or_not(target: Target, ratio: float, met: bool, said: str) -> None:
    assert target.is_met(ratio) is met
    assert str(target) == said


@pytest.mark.parametrize(
    ("comparison", "cells"),
    [
        (
            side_by_side("a step", 0.02, "DTensor", 0.05, Target(2, at_least=True)),
            ["a step", "20.0 ms", "DTensor 50.0 ms", "2.50", "at least 2", "met"],
        ),
        (
            side_by_side("a step", 0.05, "DTensor", 0.02, Target(1.2)),
            ["a step", "50.0 ms", "DTensor 20.0 ms", "2.50", "at most 1.2", "NOT met"],
        ),
        (Comparison("start", 0.0566, Target(1, unit="s")), ["start", "56.6 ms", "", "", "at most 1 s", "met"]),
        (Comparison("growth", 3.66, Target(50, unit="MB")), ["growth", "3.66 MB", "", "", "at most 50 MB", "met"]),
        (
            Comparison("a copy", 1.5003, Target(1.5), "3 ms", "limit 2 ms"),
            ["a copy", "3 ms", "limit 2 ms", "1.5003", "at most 1.5", "NOT met"],
        ),
    ],
)
def test_a_comparison_says_both_sides_and_the_verdict(comparison: Comparison, cells: list[str]) -> None:
    assert comparison.cells() == cells
    assert len(cells) == len(HEADER)


def test_launches_are_compared_one_by_one() -> None:
    ours, theirs = [0.010, 0.020, 0.030], [0.030, 0.020, 0.060]  # ratios 3, 1 and 2; of the medians it would be 1.5
    judged = over_launches("a step", ours, "torch", theirs, Target(2, at_least=True))
    assert judged.cells() == ["a step", "20.0 ms", "torch 30.0 ms", "2.00", "at least 2", "met"]
    judged = over_launches("a step", ours, "a copy", theirs, Target(0.6))
    assert judged.cells() == ["a step", "20.0 ms", "a copy 30.0 ms", "0.500", "at most 0.6", "met"]


def test_a_result_is_kept_with_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "RESULTS", tmp_path / "results")
    assert not reporting.publish("x", "Title", "body", [Comparison("a ratio", 0.7, Target(0.6))])
    (written,) = (tmp_path / "results").glob("*-x.md")
    text = written.read_text(encoding="utf-8")
    assert "| 0.700 | at most 0.6 | NOT met |" in text
    assert "cores" in text
    assert "/" not in text.replace("%%", "")
