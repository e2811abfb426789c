"""Predictions of published runs that no machine file was fitted on stay as near as they are."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.published_runs import Judged, effects, in_order, judge, median_and_worst, memory_errors
from workbench.cost.hardware_files import load_hardware
from workbench.cost.software import megatron
from workbench.cost.stage_settings import settings_of
from workbench.cost.stages import prices_of, stage_prices
from workbench.cost.table import predict_row
from workbench.cost.transformer import Transformer, transformer_costs, transformer_strategy


@pytest.fixture(scope="module")
def judged() -> dict[str, list[Judged]]:
    return judge(
        [
            "calibration",
            "megatron",
            "follow-up",
            "h100",
            "zero3",
            "vocabulary",
            "megatron-tests",
            "megatron-core",
            "titan-context",
            "titan-a100",
            "llama3",
        ]
    )


@pytest.mark.parametrize(
    ("name", "middle", "worst"),
    [
        ("calibration", 0.02, 0.03),
        ("megatron", 0.04, 0.08),
        ("follow-up", 0.05, 0.10),
        ("h100", 0.08, 0.15),
        ("megatron-core", 0.08, 0.12),
        ("titan-context", 0.10, 0.25),
        ("titan-a100", 0.08, 0.10),
        ("llama3", 0.10, 0.35),
    ],
)
def test_errors_are_within_their_bounds(
    judged: dict[str, list[Judged]], name: str, middle: float, worst: float
) -> None:
    found = median_and_worst(judged[name])
    assert found[0] <= middle, name
    assert found[1] <= worst, name


def test_few_micro_batches_hide_exchanges_too(judged: dict[str, list[Judged]]) -> None:
    """The size of micro-batches of these runs is not published: all sizes give about the published step."""
    for run in judged["megatron-core"]:
        if run.row["pp"] == "1":
            row = {**run.row, "micro_batch": "2"}
            assert predict_row(row, 1, {}).step_s == pytest.approx(run.measured_s, rel=0.08), run.name


def test_strategies_of_one_model_are_in_order(judged: dict[str, list[Judged]]) -> None:
    right, pairs = in_order([run for runs in judged.values() for run in runs])
    assert pairs >= 50
    assert right >= 0.9 * pairs


def test_what_selective_recomputation_saves_is_within_4_points(judged: dict[str, list[Judged]]) -> None:
    found = effects(judged["follow-up"], "full", "selective")
    assert len(found) == 4
    for model, (measured, predicted) in found.items():
        assert predicted == pytest.approx(measured, abs=0.04), model


def test_allocated_memory_is_within_its_bounds(judged: dict[str, list[Judged]]) -> None:
    errors = [abs(error) for error in memory_errors(judged).values()]
    assert len(errors) == 13
    assert median(errors) <= 0.06
    assert max(errors) <= 0.10


@pytest.mark.parametrize(
    ("sequence", "recompute", "forward_ms", "backward_ms"),
    [
        (False, "none", 7.7, 11.9),
        (True, "none", 7.2, 11.8),
        (False, "full", 7.7, 19.5),
        (False, "selective", 7.7, 13.2),
        (True, "selective", 7.2, 13.1),
    ],
)
def test_one_layer_takes_what_it_took(sequence: bool, recompute: str, forward_ms: float, backward_ms: float) -> None:
    """Korthikanti et al., arXiv 2205.05198, table 4: a layer of the 22B model on 8 GPUs."""
    times = []
    for layers in (2, 1):
        model = Transformer(hidden=6144, heads=64, layers=layers, vocab=51200, seq=2048)
        costs = transformer_costs(model)
        strategy = transformer_strategy(
            model, tensor=8, precision="fp16", sequence=sequence, recompute=recompute != "none"
        )
        software = megatron(2022, "selective" if recompute == "selective" else "full")
        settings = settings_of(costs, strategy, load_hardware("a100-80g-selene"), 4, software=software)
        prices = prices_of(costs.rows, strategy.layers, settings)
        stage = stage_prices(costs, strategy.layers, prices, settings)[0]
        times.append((stage.forward_s, stage.input_s + stage.weight_s))
    forward, backward = (1e3 * (two - one) for two, one in zip(*times, strict=True))
    assert forward == pytest.approx(forward_ms, rel=0.05)
    assert backward == pytest.approx(backward_ms, rel=0.05)
