"""The harness of the benchmarks: turns, medians, tables, targets."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Target, interleave, medians, table


def test_candidates_take_turns_in_a_changing_order() -> None:
    calls: list[str] = []
    times = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2, calls=2)
    assert "".join(calls) == "aabb" + "bbaa" + "aabb"
    assert {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}


def test_times_are_per_call() -> None:
    time_s = medians(interleave({"sleep": lambda: time.sleep(0.01)}, rounds=3, calls=4))
    assert 0.01 <= time_s["sleep"] < 0.03


def test_every_turn_is_surrounded() -> None:
    events: list[str] = []

    @contextmanager
    def around():
        events.append("in")
        yield
        events.append("out")

    interleave({"a": lambda: events.append("a")}, rounds=1, calls=1, around=around)
    assert events == ["in", "a", "out"] * 2


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


def test_a_result_is_kept_with_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    assert not harness.publish("x", "Title", "body", 0.7, Target(0.6))
    (written,) = (tmp_path / "results").glob("*-x.md")
    text = written.read_text(encoding="utf-8")
    assert "Ratio 0.70; target at most 0.6: NOT met." in text
    assert "cores" in text
    assert "/" not in text.replace("%%", "")
