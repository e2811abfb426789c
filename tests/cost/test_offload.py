"""What ``offload=`` takes off a rank and what it takes in seconds, against sums done here by hand."""

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


LONG = ModelCosts(tuple(linear(f"fc{n}", WIDTH, WIDTH, samples=512) for n in range(NUM_LAYERS)), (512, WIDTH))
"""Of which activations are most."""
ROW_BYTES = 4 * 64 * 512 * WIDTH
"""What each of its layers keeps of 64 samples."""


def predicted(options, machine=GPU, num_ranks=2, costs=COSTS):
    return estimate(costs, Strategy(f"*: data | {options}").resolve(costs.layers, num_ranks), machine, 64)


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


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_activations_of_all_micro_batches_are_elsewhere(schedule):
    """Of four micro-batches of 16 samples on the first of two stages; two layers are on the device."""
    rows = "; ".join(f"fc{n}: data@{n // 10}" for n in range(NUM_LAYERS))

    def stage(option):
        resolved = Strategy(f"{rows} | 2x1x1 mb=4 {schedule}{option}").resolve(LONG.layers, 2)
        return estimate(LONG, resolved, GPU, 64)

    without, found = stage(""), stage(" offload=activations")
    each, alive = 10 * ROW_BYTES / 4, {"gpipe": 4, "1f1b": 2}[schedule]
    assert found.offloaded_bytes == pytest.approx(alive * each)
    assert without.memory[0]["activations"] - found.memory[0]["activations"] >= (alive - 1) * each
    assert found.step_s >= without.step_s


def test_copies_of_activations_take_what_work_does_not_hide():
    slow = replace(GPU, offload_bytes_per_s=1e6)
    without, found = predicted("1x2x1", costs=LONG), predicted("1x2x1 offload=activations", slow, costs=LONG)
    kept = NUM_LAYERS * ROW_BYTES / 2
    assert found.compute_s == pytest.approx(2 * kept / 1e6, rel=1e-3)
    on_cpu = [predicted(f"1x2x1{option}", CPU, costs=LONG).compute_s for option in (" offload=activations", "")]
    assert on_cpu[0] - on_cpu[1] == pytest.approx(2 * kept / 1e9)
    assert without.offloaded_bytes == 0
    assert found.offloaded_bytes == pytest.approx(kept)


def test_results_that_blocks_keep_stay():
    blocks = ModelCosts(LONG.rows, (WIDTH,), blocks=((0, 2, 10),))

    def memory(options):
        resolved = Strategy(f"*: data | 1x2x1 {options}").resolve(blocks.layers, 2)
        found = estimate(blocks, resolved, GPU, 64)
        return found.memory[0]["activations"], found.offloaded_bytes

    inputs, elsewhere = memory("recompute offload=activations")
    assert elsewhere == pytest.approx(10 * ROW_BYTES / 2)
    assert inputs < memory("recompute")[0]
    assert memory("recompute=cheap offload=activations")[1] == pytest.approx(elsewhere)


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


def test_the_planner_offloads_activations_too():
    constraints = Constraints(
        pipeline=1, data=1, model=1, micro_batches=1, recompute=False, offload=("", "activations")
    )
    enough = predicted("1x1x1", num_ranks=1, costs=LONG)
    assert search(LONG, GPU, 1, 64, constraints=constraints).strategy.options.offload == ""
    least = predicted("1x1x1 offload=activations", num_ranks=1, costs=LONG).peak_bytes
    assert least < enough.peak_bytes
    found = search(LONG, GPU, 1, 64, memory_bytes=least, constraints=constraints)
    assert found.strategy.options.offload == "activations"


def test_why_not():
    found = searched(1e12, ("", "optimizer"))
    other = found.why_not("*: data | offload=optimizer")
    assert other.reason == "slower"
    assert "offload:  -> optimizer" in str(other.difference)
