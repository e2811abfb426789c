"""The filter of the comparison: conditions on numbers, and text."""

from __future__ import annotations

import pytest

from tests.ui.conftest import make_record
from workbench.core.metrics import RunRecord
from workbench.ui.runs.table_rows import filter_rows, run_rows


def names(rows) -> list[str]:
    return [row.name for row in rows]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", ["data", "model", "pipeline"]),
        ("memory < 5", ["model"]),
        ("samples >= 5000", ["data"]),
        ("memory < 9, samples > 4000", ["data"]),
        ("pipe", ["pipeline"]),
        ("bubble < 3", []),
    ],
)
def test_filters(runs: list[RunRecord], text: str, left: list[str]):
    assert names(filter_rows(run_rows(runs), text)) == left


@pytest.mark.parametrize(
    ("text", "left"),
    [("zero=2", ["a"]), ("ZERO = 2, mb=4", ["a"]), ("mb=1", []), ("mb=", ["a", "b"]), ("recompute=cheap", ["b"])],
)
def test_options_of_strategies_are_text(text: str, left: list[str]):
    rows = run_rows([make_record("a", strategy="*: data | mb=4 zero=2"),
                     make_record("b", strategy="*: data | mb=16 recompute=cheap")])  # fmt: skip
    assert names(filter_rows(rows, text)) == left


def test_numbers_of_filters_may_have_exponents():
    rows = run_rows([make_record(f"{loss}", losses=(loss,)) for loss in (1e-4, 2e-3)])
    assert (
        names(filter_rows(rows, "loss < 1e-3")) == names(filter_rows(rows, "loss<.001, samples >= 5E3")) == ["0.0001"]
    )


def test_a_filter_on_something_else_says_what_there_is(runs: list[RunRecord]):
    with pytest.raises(ValueError, match=r"no column 'colour'. Columns are memory"):
        filter_rows(run_rows(runs), "colour < 3")
    with pytest.raises(ValueError, match=r"compare one of"):
        filter_rows(run_rows(runs), "memory < much")
    with pytest.raises(ValueError, match=r"compare one of"):
        filter_rows(run_rows(runs), "step=1.2.3")
