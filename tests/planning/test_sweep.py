"""Sweeps: every combination once, errors in their rows, and numbers that are those of the estimate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from workbench.core.model_costs import Extent, LayerCost, ModelCosts, OpCost
from workbench.core.rows import Layer
from workbench.core.strategy import Strategy
from workbench.cost.estimate import estimate
from workbench.cost.gpt3 import GPT3, gpt3_strategy
from workbench.cost.hardware_files import load_hardware
from workbench.cost.transformer import Transformer, transformer_costs
from workbench.errors import HardwareError, StrategyError
from workbench.planning.sweep import simulate

MACHINE = load_hardware("a100-80g-selene")


def layers(width=64):
    rows = [
        LayerCost(Layer(f"fc{i}", "Linear", {"weight": (width, width)}, width * width),
                  (OpCost("linear", 2.0 * width * width, 8.0 * width, width, 4.0 * width),), (), Extent((width,)))
        for i in range(2)
    ]  # fmt: skip
    return ModelCosts(tuple(rows), (width,))


def test_one_point_is_the_estimate():
    sweep = simulate(layers(), "data", MACHINE, gpus=4, batch_size=32)
    expected = estimate(layers(), Strategy("data").resolve(layers().layers, 4), MACHINE, 32)
    assert sweep.estimate == expected and "samples/s" in repr(sweep)
    row = sweep.table.iloc[0]
    assert row.step_s == expected.step_s and row.degrees == "1x4x1" and bool(row.fits)
    assert row.flops_per_s_per_gpu == pytest.approx(3 * 32 * 2 * 2 * 64 * 64 / expected.step_s / 4)


def test_lists_are_swept_the_last_one_fastest():
    sweep = simulate(layers, "data", [MACHINE, "h200"], gpus=[1, 2], batch_size=32, width=[32, 64, 128])
    assert sweep.swept == ("hardware", "gpus", "width") and len(sweep.points) == 12
    assert [point.values["width"] for point in sweep.points[:4]] == [32, 64, 128, 32]
    assert list(sweep.table.hardware.unique()) == [MACHINE.name, load_hardware("h200").name]
    assert sweep.table.peak_bytes[2] > sweep.table.peak_bytes[0]


def test_arrays_are_lists_and_numbers_of_numpy_are_numbers():
    sweep = simulate(layers(), "data", MACHINE, gpus=np.array([1, 2]), batch_size=np.int64(32))
    assert sweep.swept == ("gpus",) and list(sweep.table.gpus) == [1, 2]
    assert sweep.points[1].estimate == simulate(layers(), "data", MACHINE, gpus=2, batch_size=32).estimate


def test_a_strategy_may_follow_from_the_values():
    sweep = simulate(layers, lambda gpus: f"*: model | 1x1x{gpus}", MACHINE, gpus=[1, 2, 4], batch_size=8, width=64)
    assert list(sweep.table.degrees) == ["1x1x1", "1x1x2", "1x1x4"]


def test_an_impossible_point_has_its_error_in_its_row():
    sweep = simulate(layers(), "*: data | 1x2x1", MACHINE, gpus=[2, 3], batch_size=8)
    good, bad = sweep.table.error
    assert good == "" and "3 ranks" in bad
    assert sweep.points[1].estimate is None and sweep.table.step_s.isna()[1]


def test_the_only_point_that_cannot_be_is_an_error():
    with pytest.raises(StrategyError, match="3 ranks"):
        simulate(layers(), "*: data | 1x2x1", MACHINE, gpus=3, batch_size=8)
    with pytest.raises(StrategyError, match="multiple"):
        simulate(GPT3, gpt3_strategy, MACHINE, gpus=3000, batch_size=1536)
    with pytest.raises(StrategyError, match="3072 ranks on 1024"):
        simulate(GPT3, gpt3_strategy(), MACHINE, gpus=1024, batch_size=1536)


def test_a_module_is_counted_first():
    with pytest.raises(StrategyError, match=r"wb\.planner\.layer_costs"):
        simulate(object(), "data", MACHINE, gpus=1, batch_size=1)


def test_an_unknown_machine_is_an_error():
    with pytest.raises(HardwareError, match="a100-80g-selen"):
        simulate(layers(), "data", "a100-80g-selen", gpus=1, batch_size=1)


def test_gpt3_is_ready_made():
    assert transformer_costs(GPT3).num_parameters == pytest.approx(175e9, rel=0.005)
    sweep = simulate(GPT3, gpt3_strategy, MACHINE, gpus=3072, batch_size=1536)
    row = sweep.points[0].row()
    assert row["degrees"] == "64x6x8" and row["fits"] and 5 < row["step_s"] < 30
    assert 50e12 < row["flops_per_s_per_gpu"] < 312e12


def test_sizes_of_a_transformer_are_swept():
    def gpt(seq, layers):
        return replace(GPT3, seq=seq, layers=layers)

    def strategy(gpus, batch_size, seq, layers):
        return gpt3_strategy(gpus, batch_size, model=gpt(seq, layers), pipeline=8)

    table = simulate(gpt, strategy, MACHINE, gpus=64, batch_size=16, seq=[512, 2048], layers=[8, 16]).table
    assert table.step_s[0] < table.step_s[1] < table.step_s[3] and table.step_s[2] < table.step_s[3]
    assert table.peak_bytes[3] > table.peak_bytes[2] > 0


def test_more_gpus_are_faster_but_not_in_proportion():
    sweep = simulate(GPT3, gpt3_strategy, MACHINE, gpus=[1024, 2048, 3072], batch_size=1536)
    rates = list(sweep.table.samples_per_s)
    assert rates == sorted(rates) and rates[2] < 3 * rates[0]


def test_models_have_names_and_the_planner_chooses():
    sweep = simulate("gpt2", "best", "h200", gpus=2, batch_size=8)
    named = simulate("gpt2", lambda gpus: f"*: data | 1x{gpus}x1", "h200", gpus=2, batch_size=8)
    assert sweep.estimate.step_s <= named.estimate.step_s


def test_small_transformers_too():
    small = Transformer(hidden=256, heads=4, layers=4, vocab=1000, seq=64)
    assert simulate(small, "data", "h200", gpus=2, batch_size=8).estimate.step_s > 0


def test_no_values_are_an_error():
    with pytest.raises(StrategyError, match=r"simulate\(gpus=\[\]\): no value"):
        simulate(layers(), "data", MACHINE, gpus=[], batch_size=8)
