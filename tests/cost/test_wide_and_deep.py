"""Tables of Wide & Deep: their bytes grow with the words over the devices that share them."""

from __future__ import annotations

import pytest

from workbench.core.model_costs import Extent, LayerCost, ModelCosts, OpCost
from workbench.core.rows import Layer
from workbench.core.strategy import Strategy
from workbench.cost.estimate import Estimate, estimate
from workbench.cost.hardware_files import load_hardware

DIM, NUM_FIELDS = 16, 26


def wide_and_deep(num_words: int) -> ModelCosts:
    """A table of one weight per word, one of ``DIM``, and two layers behind the latter."""
    rows = []
    for name, dim in (("wide", 1), ("deep", DIM)):
        layer = Layer(name, "Embedding", {"weight": (num_words, dim)}, num_words * dim)
        work = OpCost("embedding", 0, 8 * NUM_FIELDS * dim, 0, 8 * NUM_FIELDS)
        rows.append(LayerCost(layer, (work,), (), Extent((NUM_FIELDS, dim)), 4))
    for name, inputs, outputs in (("hidden", NUM_FIELDS * DIM, 1024), ("out", 1024, 1)):
        layer = Layer(name, "Linear", {"weight": (outputs, inputs)}, outputs * inputs)
        work = OpCost("linear", 2 * inputs * outputs, 4 * (inputs + outputs), inputs, 4 * inputs)
        rows.append(LayerCost(layer, (work,), (), Extent((outputs,)), 4))
    return ModelCosts(tuple(rows), (NUM_FIELDS,))


def predict(num_words: int, choice: str, num_ranks: int) -> Estimate:
    model = wide_and_deep(num_words)
    text = f"*: data; wide: {choice}; deep: {choice} | 1x1x{num_ranks}"
    return estimate(model, Strategy(text).resolve(model.layers, num_ranks), load_hardware("v100-dgx1"), 512)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("words", [(3_200_000, 6_400_000), (12_800_000, 25_600_000)])
def test_tables_split_by_rows_take_their_share(num_ranks: int, words: tuple[int, int]) -> None:
    """Weights and two moments of Adam in 32 bits: delta words x (dim + 1) x 4 x 3 / devices."""
    few, many = (predict(number, "model:row", num_ranks).memory[0] for number in words)
    grown = sum(many[kind] - few[kind] for kind in ("parameters", "optimizer"))
    assert grown == pytest.approx((words[1] - words[0]) * (DIM + 1) * 4 * 3 / num_ranks, rel=0.005)


def test_tables_on_every_rank_do_not_fit_where_split_ones_do() -> None:
    memory = load_hardware("v100-dgx1").memory_bytes
    assert predict(102_400_000, "data", 8).peak_bytes > memory > 3 * predict(102_400_000, "model:row", 8).peak_bytes
