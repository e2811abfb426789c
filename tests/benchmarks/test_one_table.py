"""Result files are read back and put together into one table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as everything
from benchmarks import one_table, reporting
from benchmarks.one_table import newest, read_result, score
from benchmarks.reporting import Comparison, Target, side_by_side, table
from tests.timeouts import PROGRAM_TIMEOUT_S

ROOT = Path(__file__).parents[2]
ROWS = [
    side_by_side("a step", 0.02, "DTensor", 0.05, Target(2, at_least=True)),
    Comparison("growth", 3.66, Target(50, unit="MB")),
    Comparison("a copy", 1.2, Target(1.5), "3 ms", "limit 2.5 ms"),
    Comparison("error", 22.0, Target(15, unit="%")),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Result files of two benchmarks, one of them measured twice, and one of another machine."""
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    monkeypatch.setattr(
        reporting, "machine", lambda: "A(R) CPU @ 2 GHz, 2 cores, 8 GB memory, Linux; Python 3, torch 2"
    )
    wide = table(["a", "b", "c", "d", "e", "f"], [["1"] * 6])  # as wide as the table that is looked for
    for date, rows in (("2026-11-20", ROWS[:1]), ("2026-11-21", ROWS)):
        monkeypatch.setattr(reporting, "today", lambda date=date: date)
        reporting.publish("steps-2", "Steps", wide, rows)
    monkeypatch.setattr(reporting, "machine", lambda: "Other, 64 cores, 8 GB memory, Linux; Python 3, torch 2")
    reporting.publish("steps-4", "Steps elsewhere", "", ROWS)
    return tmp_path


def test_a_result_is_read_as_it_was_written(folder: Path) -> None:
    result = read_result(folder / "2026-11-21-steps-2.md")
    assert result is not None
    assert (result.name, result.date, result.title) == ("steps-2", "2026-11-21", "Steps")
    assert list(result.rows) == [tuple(row.cells()) for row in ROWS]
    assert one_table.file_name(result) == "2026-11-21-a-2-cores.md"


def test_the_newest_result_of_this_machine_counts(folder: Path) -> None:
    results = newest(folder, "A(R) CPU @ 2 GHz, 2 cores, 8 GB memory, Linux")
    assert [(result.date, len(result.rows)) for result in results] == [("2026-11-21", 4)]
    assert score(results).startswith("3 of 4 targets met. 2026-11-21, A(R) CPU @ 2 GHz, 2 cores")


def test_the_table_of_all_is_not_taken_for_a_result(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "RESULTS", folder)
    monkeypatch.setattr(everything, "machine", lambda: "Other, 64 cores, 8 GB memory, Linux; Python 3, torch 2")
    text = everything.write_table()
    assert text == everything.write_table() == (folder / "2026-11-21-other-64-cores.md").read_text(encoding="utf-8")
    assert "for want of a GPU: `python -m benchmarks.gpu`" in text


def test_all_benchmarks_are_run() -> None:
    """Every module that is run by itself, but the part of another one."""
    modules = {p.stem for p in (ROOT / "benchmarks").glob("*.py") if '__name__ == "__main__"' in p.read_text("utf-8")}
    assert modules - {"__main__", "first_plot", "nbdistributed_cells"} == set(everything.BENCHMARKS)


def test_a_benchmark_that_breaks_off_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([1, 0])
    monkeypatch.setattr(subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, next(codes)))
    assert everything.run(["boxing", "memory"]) == ["boxing"]


def test_help_is_given() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"],
        capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=True, cwd=ROOT,
        env={**os.environ, "COLUMNS": "120"},
    )  # fmt: skip
    assert "--table" in done.stdout


def test_a_result_of_another_machine_on_the_same_day_stays(folder: Path) -> None:
    before = (folder / "2026-11-21-steps-2.md").read_text(encoding="utf-8")
    for _ in range(2):
        reporting.publish("steps-2", "Steps", "", ROWS)
    assert (folder / "2026-11-21-steps-2.md").read_text(encoding="utf-8") == before
    other = read_result(folder / "2026-11-21-steps-2-other.md")
    assert other is not None and (other.name, other.hardware.partition(",")[0]) == ("steps-2", "Other")
