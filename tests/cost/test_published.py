"""Predictions of published runs that no machine file was fitted on stay as near as they are."""

from __future__ import annotations

import pytest

from benchmarks.published_runs import Judged, effects, in_order, judge, median_and_worst


@pytest.fixture(scope="module")
def judged() -> dict[str, list[Judged]]:
    return judge(["calibration", "megatron", "follow-up", "h100", "zero3"])


@pytest.mark.parametrize(
    ("name", "median", "worst"),
    [("calibration", 0.02, 0.03), ("megatron", 0.04, 0.08), ("follow-up", 0.05, 0.10), ("h100", 0.08, 0.15)],
)
def test_errors_are_within_their_bounds(
    judged: dict[str, list[Judged]], name: str, median: float, worst: float
) -> None:
    found = median_and_worst(judged[name])
    assert found[0] <= median, name
    assert found[1] <= worst, name


def test_strategies_of_one_model_are_in_order(judged: dict[str, list[Judged]]) -> None:
    right, pairs = in_order([run for runs in judged.values() for run in runs])
    assert pairs >= 50
    assert right >= 0.9 * pairs


def test_what_selective_recomputation_saves_is_within_4_points(judged: dict[str, list[Judged]]) -> None:
    found = effects(judged["follow-up"], "full", "selective")
    assert len(found) == 4
    for model, (measured, predicted) in found.items():
        assert predicted == pytest.approx(measured, abs=0.04), model


def test_memory_of_a_measured_run_is_within_10_percent(judged: dict[str, list[Judged]]) -> None:
    measured = [run for runs in judged.values() for run in runs if run.row["measured_gib"]]
    assert measured
    for run in measured:
        assert run.estimate.peak_bytes / 2**30 == pytest.approx(float(run.row["measured_gib"]), rel=0.1), run.name
