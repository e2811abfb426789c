"""The result of ``wb.compare`` for people, as a cell shows it, and for programs, as JSON."""

from __future__ import annotations

import json
import math

import pytest

from workbench.core.metrics import RunRecord
from workbench.core.verdict import Verdict
from workbench.session.comparison.compare import CompareResult, _Progress

LONG = "; ".join(f"layers.{number}: data@{number % 2}" for number in range(20))


def test_a_result_is_shown_with_units_and_verdicts_and_without_texts_of_strategies():
    def run(name: str, **values: object) -> RunRecord:
        return RunRecord(name, LONG, 2, 16, samples_per_s=1234.5, peak_memory_bytes=(9_100_000,), **values)

    runs = [
        run("data", speedup=1.25, equal=True, verdict=Verdict(True, note="then nan"), boxed_bytes_per_step=1_730_000),
        run("model", equal=False, verdict=Verdict(False)),
        run("both", verdict=Verdict(None, note="both nan")),
        RunRecord("pipeline", LONG, 2, 16, error=f"CellError: no <room> {'in memory ' * 10}left\nmore"),
    ]
    page = CompareResult(run("one device"), runs)._repr_html_()
    for words in (
        "1,234", "1.25\u00d7", "9.10 MB", "1.73 MB", "equal to one device, then nan", "NOT equal to one device",
        "reference", "failed: CellError: no &lt;room&gt;", "in memory left",
        "<td>no verdict: both nan</td>", "wb.draw.runs(result)",
    ):  # fmt: skip
        assert words in page, words
    assert "layers.0" not in page


def a_result_that_is_not_finite() -> CompareResult:
    values = {"loss/a~b": ((0, math.inf), (1, 0.5))}
    verdict = Verdict(False, largest=math.inf, note="then nan")
    run = RunRecord(
        "data", LONG, 2, 16, losses=(2.0, math.nan, -math.inf), loss_difference=math.inf, verdict=verdict, values=values
    )
    return CompareResult(RunRecord("one device", LONG, 1, 16, losses=(2.0, 1.5)), [run], {"lr": math.nan, "steps": 2})


def test_json_has_null_for_numbers_that_are_not_finite() -> None:
    """A bare NaN is no JSON: readers of other languages refused the whole file."""
    result = a_result_that_is_not_finite()
    text = result.to_json()
    read = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert read["runs"][0]["losses"] == [2.0, None, None] and read["settings"] == {"lr": None, "steps": 2}
    again = CompareResult.from_json(text)
    assert repr(again.runs) == repr(result.runs) and repr(again.settings) == repr(result.settings)


def test_json_of_older_versions_is_read() -> None:
    result = a_result_that_is_not_finite()
    parts = {"baseline": None, "runs": [run.to_dict() for run in result.runs], "settings": result.settings}
    assert repr(CompareResult.from_json(json.dumps(parts)).runs) == repr(result.runs)


def test_less_than_one_sample_per_second_is_not_shown_as_none(capsys: pytest.CaptureFixture[str]):
    run = RunRecord("data", LONG, 2, 16, samples_per_s=0.4)
    assert "<td>0.4</td>" in CompareResult(None, [run])._repr_html_()
    _Progress(1)(run, 2.0)
    assert "data: 0.4 samples/s" in "".join(capsys.readouterr())
