"""Layers that are called several times: each call's boxings are in the estimate, equal to a dry run to the byte."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest

import workbench as wb
from tests.cost.shared_layers import MODELS
from workbench.core.model_costs import ModelCosts
from workbench.core.presets import strategy_of
from workbench.core.strategy import Strategy
from workbench.cost.estimate import estimate
from workbench.cost.hardware_files import load_hardware
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.costs.dry_run import dry_run
from workbench.training.costs.layer_costs import layer_costs

RING = load_hardware("h200")
WHERE_SUMS_FIT = {
    ("Recurrent", "*: model"): "read: model:column; carry: model:column; head: model",
    ("Deep", "*: model"): "enter: model:column; again: model:column; head: model",
    ("Cell", "*: model"): "cell: model:row; head: model",
    ("SharedBlocks", "hybrid"): "*: data; block.fc1: model; block.fc2: model | 1x1x2",
}
"""A function between layers whose operands lie apart boxes one of them; estimates know the boxings of layers."""


@functools.cache
def costs_of(name: str) -> ModelCosts:
    make, inputs, targets, loss_fn = MODELS[name]
    return layer_costs(make, inputs, loss_fn=loss_fn, targets=targets)


def both(name: str, text: str, num_ranks: int, costs: ModelCosts) -> tuple[float, int]:
    """Bytes of a step: (estimated, counted)."""
    make, inputs, targets, loss_fn = MODELS[name]
    strategy = strategy_of(text, costs.layers, num_ranks)
    resolved = strategy.resolve(costs.layers, num_ranks)
    found = estimate(costs, resolved, RING, len(inputs), optimizer="momentum")
    run = dry_run(make, str(strategy), num_ranks, inputs, targets, loss_fn, cost=RING.link_cost)
    return found.boxed_bytes, run.boxed_bytes


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("num_ranks", "text", "options"),
    [(2, "*: data", ""), (2, "*: model", ""), (2, "hybrid", ""), (4, "*: model", " | 1x2x2 mb=2")],
)
def test_all_calls_are_in_the_estimate(name: str, num_ranks: int, text: str, options: str) -> None:
    text = WHERE_SUMS_FIT.get((name, text), text) + options
    estimated, counted = both(name, text, num_ranks, costs_of(name))
    assert estimated == pytest.approx(counted, rel=1e-9), text


@pytest.mark.parametrize("name", ["Twice", pytest.param("SharedBlocks", marks=pytest.mark.slow)])
def test_calls_under_autocast(name: str) -> None:
    estimated, counted = both(name, "*: model | 1x1x2 bf16", 2, costs_of(name))
    assert estimated == pytest.approx(counted, rel=1e-9)


def test_layers_by_turns_on_two_stages_send_each_result() -> None:
    """Three times to the second layer, twice back to the first, each with its gradient."""
    make, inputs, targets, loss_fn = MODELS["TwoTimesThree"]
    text, built, costs = "up: data; down: data@1; head: data@1 | 2x1x1 mb=2 gpipe", make(), costs_of("TwoTimesThree")

    def program() -> int:
        model = wb.parallelize(copy.deepcopy(built), text)
        current().traffic.reset()
        wb.forward_backward(model, loss_fn, inputs, targets)
        return current().traffic.sent_bytes

    found = estimate(costs, Strategy(text).resolve(costs.layers, 2), RING, len(inputs))
    assert found.boxed_bytes == sum(run_ranks(program, 2)) == 2 * (3 * 24 + 2 * 12) * 4 * 16


def test_calls_that_are_left_out_would_be_seen() -> None:
    for name in ("Twice", "Recurrent", "BatchNormed", "SharedBlocks"):
        estimated, counted = both(name, "*: model", 2, replace(costs_of(name), calls=()))
        assert estimated < 0.7 * counted, name


def test_calls_say_whose_result_they_take() -> None:
    calls = costs_of("Recurrent").calls
    assert [call.row.layer.name for call in calls] == ["read", *["read", "carry"] * 4, "head"]
    assert [call.source for call in calls] == [None, None, 0, None, 2, None, 4, None, 6, 8]
    assert [call.row.output_shape for call in calls] == [(12,)] * 9 + [(6,)]


def test_models_that_call_each_layer_once_have_no_calls() -> None:
    assert layer_costs(MODELS["Twice"][0]().head, MODELS["Twice"][1]).calls == ()
