"""The harness of the benchmarks: turns and medians."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import by_name, hand_in, interleave, launch_often, medians


def test_candidates_take_turns_in_a_changing_order() -> None:
    calls: list[str] = []
    times = interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, calls=2)
    assert "".join(calls) == "aabb" + "bbaa" + "bbaa" + "aabb"
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}


def test_nobody_always_comes_behind_the_same_candidate() -> None:
    calls: list[str] = []
    interleave({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=5, calls=1)  # type: ignore[misc]
    orders = ["".join(calls[start : start + 3]) for start in range(0, 18, 3)]
    assert orders == ["abc", "cba", "bca", "acb", "cab", "bac"]


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


def test_every_launch_hands_in_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter((0.25, 0.5))

    def played(module: str, num_processes: int, arguments: list[str], hand_in_to: Path) -> int:
        monkeypatch.setenv(harness._HANDED_IN, str(hand_in_to))
        hand_in({"torch": next(numbers), "ours": 1.0})
        return 0

    monkeypatch.setattr(harness, "launch", played)
    assert by_name(launch_often("m", 2, [], 2)) == {"torch": [0.25, 0.5], "ours": [1.0, 1.0]}


def test_a_launch_that_failed_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "launch", lambda *args: 3)
    with pytest.raises(RuntimeError, match="launch 0 ended with exit code 3"):
        launch_often("m", 2, [], 2)
