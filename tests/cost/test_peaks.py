"""What is alive at the fullest moment of a step, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cost.test_estimate import MACHINE
from workbench.core.model_costs import Extent, LayerCost, ModelCosts, OpCost
from workbench.core.rows import Layer
from workbench.core.strategy import Strategy
from workbench.cost.estimate import estimate
from workbench.cost.software import WORKBENCH

ON_CORES = replace(MACHINE, exchanges_on_cores=True)
WEIGHT = 4 * 100


def kinds(kept: tuple[float, float], text: str = "data", num_ranks: int = 1, passing: float = 0.0, **software: bool):
    """Of the fullest stage of two layers of 100 weights each that keep so many bytes of a sample."""
    rows = []
    for index, size in enumerate(kept):
        own = OpCost("linear", 200.0, 80.0, inner=10, saved_bytes=size, passing_bytes=passing)
        rows.append(LayerCost(Layer(f"fc{index}", "Linear", {"weight": (10, 10)}, 100), (own,), (), Extent((10,))))
    model = ModelCosts(tuple(rows), (10,))
    resolved = Strategy(text).resolve(model.layers, num_ranks)
    found = estimate(
        model, resolved, ON_CORES, 8, optimizer="momentum", software=replace(WORKBENCH, **software)
    )  # fmt: skip
    return dict(found.memory[found.fullest_stage])


def test_activations_go_while_gradients_come() -> None:
    many = kinds((1000.0, 1000.0))
    assert (many["activations"], many["gradients"]) == (8 * 2000.0, WEIGHT)
    few = kinds((1.0, 1.0))
    assert (few["activations"], few["gradients"]) == (8 * 1.0, 2 * WEIGHT)


def test_the_second_micro_batch_finds_gradients_and_makes_one_more_before_it_is_added() -> None:
    found = kinds((1000.0, 1000.0), "data | mb=2")
    assert (found["activations"], found["gradients"]) == (4 * 2000.0, 3 * WEIGHT)


def test_what_backward_takes_and_makes_counts_beside_what_is_kept() -> None:
    assert kinds((1000.0, 1000.0), passing=50.0)["activations"] == 8 * 2050.0


def test_recomputed_activations_are_those_of_one_block() -> None:
    """Two equal layers are two blocks: the input of the first, and the second block's own."""
    found = kinds((1000.0, 2000.0), "data | recompute")
    assert found["activations"] == pytest.approx(8 * (40.0 + 2000.0))


def test_programs_with_memory_for_gradients_have_them_all_the_time() -> None:
    found = kinds((1000.0, 1000.0), keeps_gradients=True)
    assert (found["activations"], found["gradients"]) == (8 * 2000.0, 2 * WEIGHT)


@pytest.mark.parametrize(("zero", "buffers"), [(0, 2 * WEIGHT), (1, WEIGHT)])
def test_sums_lie_beside_gradients(zero: int, buffers: float) -> None:
    """Whole ones, or this rank's shards of them."""
    assert kinds((1.0, 1.0), f"data | zero={zero}", 2)["buffers"] == pytest.approx(buffers)


def test_zero_3_has_a_block_whole_with_its_gradients() -> None:
    found = kinds((0.0, 0.0), "data | zero=3", 2)
    assert found["buffers"] == WEIGHT and found["gradients"] == pytest.approx(WEIGHT + WEIGHT / 2 + WEIGHT / 2)
