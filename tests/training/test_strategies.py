"""Every model under every strategy trains like one device: losses, gradients, final weights, with dropout on."""

from dataclasses import replace

import pytest
import torch

from tests.training.training_runs import (
    KINDS,
    Setup,
    assert_runs_agree,
    assert_trains_like_one_device,
    on_one_device,
    plainly,
)

SHAPES = [
    ("data", "1x2x1", 2),
    ("data", "1x3x1 mb=2", 3),
    ("model", "1x1x2", 2),
    ("model", "1x1x3 mb=2", 3),
    ("data", "2x1x1 mb=3 1f1b", 2),
    ("data", "2x1x1 mb=3 gpipe", 2),
    ("data", "3x1x1 mb=2 1f1b", 3),
    ("model", "1x2x2 mb=2", 4),
    ("model", "2x1x2 mb=3 1f1b", 4),
    ("data", "2x2x1 mb=2 gpipe", 4),
    ("model", "2x2x2 mb=3 1f1b", 8),
    ("data", "2x1x1 mb=4 interleaved", 2),
    ("data", "3x1x1 mb=3 zero_bubble", 3),
    ("model", "2x2x1 mb=3 zero_bubble zero=1", 4),
    ("data", "1x2x1 mb=2 zero=1", 2),
    ("data", "1x3x1 mb=2 zero=2", 3),
    ("data", "1x2x1 mb=2 zero=3", 2),
    ("model", "1x2x2 mb=2 zero=3", 4),
    ("model", "2x2x2 mb=2 1f1b zero=2", 8),
    ("model", "2x2x1 mb=3 interleaved zero=3", 4),
    ("model", "1x2+1x1 mb=3 1f1b", 3),
    ("model", "2x1+1x3+2x2 mb=2 gpipe", 9),
    ("model", "1x1x3 mb=2 sequence", 3),
    ("model", "2x1x2 mb=2 gpipe sequence", 4),
    ("data", "1x2x1 context=2", 2),
    ("model", "1x4x2 context=2 mb=2 zero=2 sequence", 8),
    ("model", "1x2x2 recompute", 4),
    ("data", "2x1x1 mb=3 1f1b recompute", 2),
]
"""Rows for all layers, options, ranks: data, column and row, pipelines, hybrids, schedules, ZeRO, the other options."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "parallel", "options", "num_ranks"),
    [
        ("mlp", "model", "2x2x2 mb=3 1f1b", 8),
        ("cnn", "model", "2x1x2 mb=3 gpipe", 4),
        ("gpt2", "model", "1x1x2 mb=2", 2),
        ("llama", "data", "3x1x1 mb=2 1f1b", 3),
    ],
)
def test_a_few_steps(kind, parallel, options, num_ranks):
    assert_trains_like_one_device(Setup(kind, num_steps=2), parallel, options, num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "options", "num_ranks"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps(kind, parallel, options, num_ranks):
    assert_trains_like_one_device(Setup(kind), parallel, options, num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "options", "num_ranks"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_in_64_bits(in_64_bits, kind, parallel, options, num_ranks):
    assert_trains_like_one_device(Setup(kind, "adamw", torch.float64), parallel, options, num_ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_trains_like_plain_torch(kind):
    setup = Setup(kind, rate=0.0, num_steps=2)
    assert_runs_agree(on_one_device(setup, 3), plainly(setup, 3), setup)


@pytest.mark.parametrize("part", ["losses", "grads", "weights"])
def test_the_comparison_notices_a_wrong_number(part):
    setup = Setup("mlp", num_steps=2)
    truth = on_one_device(setup, 1)
    wrong = replace(truth, losses=list(truth.losses), grads=[dict(g) for g in truth.grads], weights=dict(truth.weights))
    if part == "losses":
        wrong.losses[1] += 2e-5 * abs(wrong.losses[1]) + 2e-5
    else:
        tensors = wrong.weights if part == "weights" else wrong.grads[1]
        tensors["3.weight"] = tensors["3.weight"] * 1.001
    with pytest.raises(AssertionError, match=r"loss of step 1|differs by"):
        assert_runs_agree(wrong, truth, setup)


def test_dropout_drops():
    setup = Setup("mlp", num_steps=1)
    assert abs(on_one_device(setup, 1).losses[0] - on_one_device(replace(setup, rate=0.0), 1).losses[0]) > 1e-3
