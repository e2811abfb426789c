"""Whole runs under every schedule: the losses, gradients and weights of one device, in the same micro-batches."""

from dataclasses import replace

import pytest
import torch

from tests.training.training_runs import KINDS, Setup, assert_runs_agree, on_one_device, on_ranks, plainly
from workbench.core.options import V_SCHEDULES, VIRTUAL_SCHEDULES
from workbench.core.presets import stage_cuts
from workbench.core.rows import Row
from workbench.core.strategy import Options, Strategy
from workbench.pipeline.schedules import GENERATORS
from workbench.training.parallel import describe

SCHEDULES = {name: 4 if name in VIRTUAL_SCHEDULES else 2 for name in GENERATORS}
"""Stages on two slices of the pipeline axis."""


def strategy_of(setup, schedule, degrees="2x1x1", num_micro_batches=3, parallel="data"):
    layers = describe(setup.model())
    num_slices = int(degrees.partition("x")[0])
    cuts = stage_cuts(layers, SCHEDULES[schedule] * num_slices // 2)
    rows = [Row(layer.name, parallel, None, cut) for layer, cut in zip(layers, cuts, strict=True)]
    return f"{Strategy.from_rows(rows, Options())} | {degrees} mb={num_micro_batches} {schedule}"


def assert_trains_as_one_device(setup, strategy, num_ranks, num_micro_batches=3):
    truth = on_one_device(setup, num_micro_batches)
    for found in on_ranks(setup, strategy, num_ranks):
        assert_runs_agree(found, truth, setup)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        ("cnn", "1f1b"), ("cnn", "interleaved"), ("gpt2", "interleaved"), ("gpt2", "zero_bubble"),
        ("cnn", "zero_bubble_v"), ("gpt2", "zero_bubble_v"), ("cnn", "dualpipe_v"), ("gpt2", "dualpipe_v"),
    ],
)  # fmt: skip
def test_a_few_steps_are_those_of_one_device(kind, schedule):
    setup = Setup(kind, num_steps=2)
    assert_trains_as_one_device(setup, strategy_of(setup, schedule), 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", V_SCHEDULES)
def test_a_v_over_four_ranks_is_one_device(schedule):
    setup = Setup("gpt2", num_steps=1)
    assert_trains_as_one_device(setup, strategy_of(setup, schedule, "4x1x1", 7), 4, 7)


def test_a_run_without_dropout_is_that_of_plain_torch():
    setup = Setup("cnn", rate=0.0, num_steps=2)
    truth = plainly(setup, 3)
    for found in on_ranks(setup, strategy_of(setup, "interleaved"), 2):
        assert_runs_agree(found, truth, setup)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_are_those_of_one_device(kind, schedule):
    for setup in (Setup(kind), Setup(kind, optimizer="adamw", dtype=torch.float64)):
        assert_trains_as_one_device(setup, strategy_of(setup, schedule), 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedule", V_SCHEDULES)
def test_twenty_steps_of_a_v_over_four_ranks_are_those_of_one_device(schedule):
    for setup in (Setup("gpt2"), Setup("gpt2", optimizer="adamw", dtype=torch.float64)):
        assert_trains_as_one_device(setup, strategy_of(setup, schedule, "4x1x1", 7), 4, 7)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["mlp", "gpt2", "llama"])
def test_hybrids_of_three_kinds_on_eight_ranks(kind, schedule):
    setup = replace(Setup(kind), num_steps=5)
    strategy = strategy_of(setup, schedule, "2x2x2", 2, "model")
    assert_trains_as_one_device(setup, strategy, 8, 2)
