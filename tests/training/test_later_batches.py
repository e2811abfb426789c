"""Ranks whose batches are alike at first and not later: every strategy ends with an error, none mixes their rows."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.errors import CollectiveAborted
from workbench.testing import run_ranks

SAMPLES = torch.randn(18, 8, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(18) % 3
MODEL = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
DEEP = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3))
LATER = ["*: data", "*: data | zero=2", "*: data | 1x2x1 mb=2", "*: data | zero=3", "*: model", "0: data; 2: data@1",
         "pipeline | mb=2", "pipeline | mb=4 zero_bubble_v", "*: data | zero=3 mb=2"]  # fmt: skip


def train(model, strategy, inputs_of, targets_of, take_step):
    """Three steps; only the last one's batch may differ between the ranks."""
    model = wb.parallelize(model, strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in (0, 4, 8):
        optimizer.zero_grad()
        take_step(model, SAMPLES[inputs_of(start)], CLASSES[targets_of(start)])
        optimizer.step()


def whole_steps(model, inputs, targets):
    wb.forward_backward(model, F.cross_entropy, inputs, targets)


def own_loop(model, inputs, targets):
    F.cross_entropy(model(inputs), targets).backward()


def alike(start):
    return slice(start, start + 8)


def shifted(start):
    return slice(start + (start == 8) * wb.rank(), start + 8 + (start == 8) * wb.rank())


def longer(start):
    return slice(start, start + 8 + (start == 8) * wb.rank())


def later_error(*steps):
    """What ranks raise whose first batches are alike."""

    def run():
        with pytest.raises(CollectiveAborted) as caught:
            train(copy.deepcopy(DEEP if "_v" in steps[0] else MODEL), *steps)
        raise caught.value

    with pytest.raises(CollectiveAborted) as caught:
        run_ranks(run, 2)
    return str(caught.value)


@pytest.mark.parametrize("strategy", LATER)
@pytest.mark.parametrize("targets_of", [shifted, alike])
def test_gradients_of_a_later_unlike_batch_are_not_added(strategy, targets_of):
    """The last batch is another one on each rank, as where one rank has drawn a random number more."""
    error = later_error(strategy, shifted, targets_of, whole_steps)
    assert re.search(r"ranks diverged.*, of batch (\dx)?\(\d, 8\)#\w+.* while .*, of batch", error)


@pytest.mark.parametrize("strategy", LATER)
def test_later_unlike_targets_of_forward_backward_are_found(strategy):
    error = later_error(strategy, alike, shifted, whole_steps)
    assert re.search(r"ranks diverged.*, of batch .*\(\d,\)#\w+.* while .*, of batch", error)


@pytest.mark.parametrize("strategy", [strategy for strategy in LATER if "mb=" not in strategy])
def test_later_unlike_inputs_of_an_own_loop_are_found(strategy):
    assert ", of batch (8, 8)#" in later_error(strategy, shifted, shifted, own_loop)


@pytest.mark.parametrize("strategy", ["*: data", "*: data | 1x2x1 mb=2"])
def test_a_later_batch_with_more_samples_on_a_rank_is_found(strategy):
    assert "ranks diverged" in later_error(strategy, longer, longer, whole_steps)


@pytest.mark.parametrize("strategy", ["*: data | zero=3", "*: model", "pipeline"])
def test_a_later_unlike_batch_of_an_evaluation_is_found(strategy):
    def program():
        model = wb.parallelize(copy.deepcopy(MODEL), strategy)
        with torch.no_grad():
            for start in (0, 4, 8):
                model(SAMPLES[shifted(start)])

    with pytest.raises(CollectiveAborted, match=r"ranks diverged.*, of batch \(8, 8\)#\w+.* while"):
        run_ranks(program, 2)


def test_a_call_on_one_rank_that_exchanges_nothing_stays_allowed():
    def program():
        model = wb.parallelize(copy.deepcopy(MODEL[0]), "*: model")
        before = model(SAMPLES[:4]).full_tensor()
        if wb.rank() == 0:
            model(SAMPLES[4:8])
        return torch.equal(model(SAMPLES[:4]).full_tensor(), before)

    assert run_ranks(program, 2) == [True, True]
