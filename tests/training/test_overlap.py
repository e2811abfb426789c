"""``overlap=``: row-split layers in pieces, whose exchanges overlap with the next products, train like one device."""

import copy

import pytest
import torch

import workbench as wb
from benchmarks.gpt import GPT, next_word_loss
from tests.training.training_runs import Setup, assert_trains_like_one_device
from workbench.core.strategy import Strategy
from workbench.tensors.boxing.exchange import Exchange
from workbench.testing import run_ranks
from workbench.training.parallel import describe

CASES = [
    ("gpt2", "model", "1x1x2 overlap=2", 2),
    ("llama", "model", "1x1x2 overlap=4 recompute", 2),
    ("llama", "model", "1x1x2 overlap=3 recompute=cheap", 2),
    ("gpt2", "model", "1x2x2 overlap=3 sequence mb=2", 4),
    ("gpt2", "model", "1x2x2 overlap=2 zero=3", 4),
    ("llama", "model", "2x1x2 overlap=2 mb=3 1f1b zero=1", 4),
    ("gpt2", "model", "2x1x2 overlap=2 mb=3 zero_bubble", 4),
    ("llama", "model", "1x2x2 overlap=2 context=2", 4),
    ("mlp", "model", "1x1x3 overlap=4", 3),
]


@pytest.mark.parametrize(("kind", "parallel", "options", "num_ranks"), CASES)
def test_a_few_steps_are_those_of_one_device(kind, parallel, options, num_ranks):
    """With dropout and an odd number of samples, which no number of pieces divides."""
    assert_trains_like_one_device(Setup(kind, num_steps=2), parallel, options, num_ranks)


def test_twenty_steps_are_those_of_one_device():
    assert_trains_like_one_device(Setup("gpt2"), "model", "1x1x2 overlap=3", 2)
