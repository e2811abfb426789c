"""Bytes that an estimate says are sent, against a dry run: the real program on metadata counts what ranks send."""

from __future__ import annotations

import random

import pytest

from tests.runtime.test_dry_run import MODELS, counted, random_strategy
from workbench.core.strategy import Strategy
from workbench.cost.estimate import estimate
from workbench.cost.hardware_files import load_hardware
from workbench.runtime.layer_costs import layer_costs


def estimated(name, text, num_ranks, batch_size=8):
    make, inputs, targets, loss_fn = MODELS[name]
    costs = layer_costs(make, inputs()[:batch_size], loss_fn, targets()[:batch_size])
    resolved = Strategy(text).resolve(costs.layers, num_ranks)
    return estimate(costs, resolved, load_hardware("h200"), batch_size, optimizer="momentum").boxed_bytes


def assert_same_bytes(name, text, num_ranks, rel=1e-9):
    expected = counted(name, text, num_ranks).boxed_bytes
    assert estimated(name, text, num_ranks) == pytest.approx(expected, rel=rel), text


@pytest.mark.parametrize(("seed", "num_ranks"), [(0, 2), (0, 4), (1, 2), (1, 4), (2, 2), (2, 4), (4, 4), (5, 4)])
def test_chains_of_layers_send_what_is_estimated(seed, num_ranks):
    """Any mixture of choices per layer, degrees, stages, micro-batches and ZeRO."""
    assert_same_bytes("perceptron", random_strategy(random.Random(1000 + seed), "perceptron", num_ranks), num_ranks)


@pytest.mark.xfail(strict=True, reason="slices of columns that become slices of rows between stages: 7% too few bytes")
def test_columns_that_become_rows_between_stages():
    assert_same_bytes("perceptron", "0: data@0; 2: model@0; 4: data@1; 6: model@1 | 2x1x2 mb=4 1f1b", 4)


@pytest.mark.parametrize(
    ("num_ranks", "text"),
    [
        (2, "*: data"),
        (4, "*: data | 1x4x1 zero=1"),
        (2, "*: data | 1x2x1 zero=3"),
        (2, "*: data | 1x2x1 mb=2"),
        (4, "*: data; blocks.1: data@1; norm: data@1; head: data@1 | 2x2x1 mb=2"),
    ],
)
def test_a_gpt_on_the_data_axis_is_within_a_hundredth(num_ranks, text):
    """Its table of positions is alike for all samples: its gradient is boxed where the estimate sums it."""
    assert_same_bytes("gpt", text, num_ranks, rel=0.01)


def test_a_wrong_estimate_is_seen():
    with pytest.raises(AssertionError):
        assert estimated("perceptron", "*: model", 2) == pytest.approx(counted("perceptron", "*: data", 2).boxed_bytes)
