"""What ``offload=optimizer`` takes off a rank and what it takes in seconds, against sums done here by hand."""

from dataclasses import replace

import pytest

from tests.planning.problems import linear
from workbench.core.model_costs import ModelCosts
from workbench.core.offload_kinds import BUCKET_BYTES
from workbench.core.strategy import Strategy
from workbench.cost.estimate import estimate
from workbench.cost.hardware_files import load_hardware
from workbench.errors import StrategyError
from workbench.planning.problem import Constraints
from workbench.planning.search import search

WIDTH, NUM_LAYERS = 2048, 20
COSTS = ModelCosts(tuple(linear(f"fc{n}", WIDTH, WIDTH) for n in range(NUM_LAYERS)), (WIDTH,))
WEIGHTS = NUM_LAYERS * (WIDTH * WIDTH + WIDTH)
GPU = replace(load_hardware("h200"), offload_bytes_per_s=5e10)
CPU = replace(GPU, exchanges_on_cores=True, offload_bytes_per_s=1e9)


def predicted(options, machine=GPU, num_ranks=2):
    return estimate(COSTS, Strategy(f"*: data | {options}").resolve(COSTS.layers, num_ranks), machine, 64)


@pytest.mark.parametrize(("zero", "parts"), [("", 1), (" zero=1", 2), (" zero=3", 2)])
def test_the_state_is_counted_apart(zero, parts):
    without, found = predicted(f"1x2x1{zero}"), predicted(f"1x2x1{zero} offload=optimizer")
    assert (without.offloaded_bytes, found.offloaded_bytes) == (0, pytest.approx(8 * WEIGHTS / parts))
    assert without.memory[0]["optimizer"] == pytest.approx(8 * WEIGHTS / parts)
    assert found.memory[0]["optimizer"] == pytest.approx(2 * 2 * BUCKET_BYTES)
    assert found.peak_bytes < without.peak_bytes


def test_a_cpu_has_the_pages_of_the_bucket_that_steps():
    without, found = predicted("1x2x1", CPU), predicted("1x2x1 offload=optimizer", CPU)
    assert found.memory[0]["optimizer"] == 0
    assert found.peak_bytes <= without.peak_bytes - 8 * WEIGHTS + 2 * BUCKET_BYTES


def test_a_gpu_copies_beside_the_update_and_a_cpu_besides_it():
    copied = 2 * 8 * WEIGHTS
    without, found = predicted("1x2x1"), predicted("1x2x1 offload=optimizer")
    assert found.optimizer_s == pytest.approx(copied / 5e10)
    assert found.optimizer_s > without.optimizer_s
    on_cpu = predicted("1x2x1 offload=optimizer", CPU).optimizer_s - predicted("1x2x1", CPU).optimizer_s
    assert on_cpu == pytest.approx(copied / 1e9)


@pytest.mark.parametrize(("machine", "rate"), [(GPU, 25e9), (CPU, 1e9)])
def test_a_machine_without_a_rate_has_an_assumed_one(machine, rate):
    assert predicted("1x2x1 offload=optimizer", replace(machine, offload_bytes_per_s=0.0)) == predicted(
        "1x2x1 offload=optimizer", replace(machine, offload_bytes_per_s=rate)
    )


def searched(memory_bytes, offload):
    constraints = Constraints(pipeline=1, data=1, model=1, offload=offload)
    return search(COSTS, GPU, 1, 64, memory_bytes=memory_bytes, constraints=constraints)


def test_the_planner_offloads_where_nothing_else_fits():
    enough = predicted("1x1x1", num_ranks=1).peak_bytes
    little = 0.75 * enough
    assert searched(enough, ("", "optimizer")).strategy.options.offload == ""
    found = searched(little, ("", "optimizer"))
    assert found.strategy.options.offload == "optimizer"
    assert "offloaded" in str(found)
    assert not search(COSTS, GPU, 1, 64).strategy.options.offload
    with pytest.raises(StrategyError, match=r"It fits with .*offload='optimizer'"):
        searched(little, None)
    with pytest.raises(StrategyError, match=r"offload.*'foo'"):
        searched(little, "foo")


def test_why_not():
    found = searched(1e12, ("", "optimizer"))
    other = found.why_not("*: data | offload=optimizer")
    assert other.reason == "slower"
    assert "offload:  -> optimizer" in str(other.difference)
