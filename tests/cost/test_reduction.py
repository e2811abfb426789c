"""What a rank waits for of gradients' sums and parameters' gathers, on numbers that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.core.strategy import Strategy
from workbench.cost.estimate import estimate
from workbench.cost.hardware import Link
from workbench.cost.hardware_files import load_hardware
from workbench.cost.reduction import reduction_s
from workbench.cost.software import Software, megatron
from workbench.cost.stage_settings import StageSettings, settings_of
from workbench.cost.stages import StagePrice, prices_of, stage_prices
from workbench.cost.transformer import Transformer, transformer_costs, transformer_strategy

WEIGHTS, RANKS = 400e6, 1024
RECEIVED = WEIGHTS * (RANKS - 1) / RANKS
GATHERS_S, SUMS_S = 2 * RECEIVED / 1e9, 4 * RECEIVED / 1e9  # parameters of 2 bytes and gradients of 4, at 1 GB/s


def setting_and_stage(software: Software, pipeline: int, compute_s: float) -> tuple[StageSettings, StagePrice]:
    """Data ranks over a link of 1 GB/s without latency, and a stage with so many seconds of forward and backward."""
    hardware = load_hardware("h100-sxm-ib")
    hardware = replace(hardware, memory_bandwidth_bytes_per_s=1e15, links=(Link(1 << 20, 0.0, 1e9),))
    model = Transformer(hidden=64, heads=4, layers=pipeline, vocab=128, seq=16)
    strategy = transformer_strategy(
        model, tensor=1, pipeline=pipeline, data=RANKS, zero=1, precision="bf16", num_micro_batches=8
    )
    costs = transformer_costs(model)
    settings = settings_of(costs, strategy, hardware, 8 * RANKS, software=software)
    stage = stage_prices(costs, strategy.layers, prices_of(costs.rows, strategy.layers, settings), settings)[0]
    return settings[0], replace(
        stage,
        weights=WEIGHTS,
        shared=0.0,
        apart=0.0,
        forward_s=compute_s,
        input_s=compute_s / 2,
        weight_s=compute_s / 2,
    )


@pytest.mark.parametrize("compute_s", [0.0, 0.1, 1.0, 100.0])
def test_parameters_are_gathered_beside_forward(compute_s: float) -> None:
    setting, stage = setting_and_stage(megatron(2024), 1, compute_s)
    assert reduction_s([stage], setting) == pytest.approx(
        GATHERS_S + SUMS_S
    )  # one bucket, of 1e6 weights per data rank
    setting = replace(setting, software=replace(setting.software, bucket_weights=1_000_000))
    bucket = RANKS / 40 * 1e6 / WEIGHTS
    expected = sum(max(bucket * s, s - compute_s * (1 - bucket)) for s in (GATHERS_S, SUMS_S))
    assert reduction_s([stage], setting) == pytest.approx(expected)
    before, both = replace(setting.software, hides_gathers=False), GATHERS_S + SUMS_S
    expected = max(bucket * both, both - compute_s * (1 - bucket))
    assert reduction_s([stage], replace(setting, software=before)) == pytest.approx(expected)


def test_a_chunk_is_exchanged_while_others_are_computed() -> None:
    setting, stage = setting_and_stage(megatron(2024), 4, 0.1)
    chunks = [replace(stage, weights=WEIGHTS / 4, forward_s=0.025, input_s=0.0, weight_s=0.05)] * 4
    # gathers have one bucket, of so many data ranks
    beside_s = 4 * 0.2 * 3 / 4  # four micro-batches of the three other chunks
    assert reduction_s(chunks, setting) == pytest.approx(GATHERS_S + max(SUMS_S / 4, SUMS_S - beside_s))


@pytest.mark.parametrize("on_cores", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_rows_of_data_cost_as_much_over_the_model_axis(zero: int, on_cores: bool) -> None:
    """They divide the batch among all ranks of a stage, whichever axis these are on.

    Under ``zero=3`` the gathers of tables that backward leaves out are known for the data axis only.
    """
    model = transformer_costs(Transformer(hidden=256, heads=4, layers=4, vocab=512, seq=32))
    hardware = replace(load_hardware("h100-sxm-ib"), exchanges_on_cores=on_cores)
    prices = []
    for degrees in ("2x4x1", "2x1x4"):
        half = model.layers[len(model.layers) // 2].name
        strategy = Strategy(f"*: data; {half}: data@1 | {degrees} mb=2 zero={zero}").resolve(model.layers, 8)
        found = estimate(model, strategy, hardware, 64)
        prices.append((found.gradient_s, found.optimizer_s, found.step_s, found.peak_bytes))
    assert prices[0] == pytest.approx(prices[1], rel=1e-9)
