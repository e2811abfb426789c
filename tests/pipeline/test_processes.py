"""Every schedule on real processes, over each transport; a stage that raises ends the others."""

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from tests.processes import Ranks, run_processes
from tests.training.models import make
from tests.training.programs import training_equals_one_device
from workbench.training.pipelining.running_step import ValueReadWarning

pytestmark = pytest.mark.procs

TWO = "0: data; 2: data; 4: data@1; 6: data@1 | 2x1x1 mb=3 {}"
FOUR = "0: data; 2: data@1; 4: data@2; 6: data@3 | 2x1x1 mb={} {}"


def train_under_every_schedule():
    differences = [training_equals_one_device("mlp", TWO.format(name), 2, 2) for name in ("1f1b", "zero_bubble")]
    for num_micro_batches, name in ((3, "interleaved"), (3, "zero_bubble_v"), (5, "dualpipe_v")):
        differences.append(training_equals_one_device("mlp", FOUR.format(num_micro_batches, name), 2, 2))
    return max(map(max, differences))


@pytest.mark.parametrize("transport", ["shared", pytest.param("gloo", marks=pytest.mark.slow)])
def test_every_schedule_equals_one_device(transport):
    found = run_processes(train_under_every_schedule, 2, environment={"WORKBENCH_TRANSPORT": transport})
    assert max(found) < 1e-5


class Asking(torch.nn.Sequential):
    """Reads a value of each stage."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
            x = x / (1 + abs(x.sum().item())) if x.isfinite().all() else x
        return x


def read_values_on_both_stages():
    torch.manual_seed(0)
    model, one = (Asking(*(torch.nn.Linear(4, 4) for _ in range(4))) for _ in range(2))
    one.load_state_dict(model.state_dict())
    inputs, targets = torch.randn(8, 4), torch.arange(8) % 4
    loss = sum(F.cross_entropy(one(x), y) for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True)) / 4
    loss.backward()
    wb.parallelize(model, "pipeline | mb=4 1f1b")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ValueReadWarning)
        found = [wb.forward_backward(model, F.cross_entropy, inputs, targets).item() for _ in range(2)]
    grads = zip(model.parameters(), one.parameters(), strict=True)
    worst = max((a.grad.full_tensor() / 2 - b.grad).abs().max().item() for a, b in grads)
    return max(worst, *(abs(value - loss.item()) for value in found))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_values_that_a_forward_reads_are_sent_to_all_stages(transport):
    found = run_processes(read_values_on_both_stages, 2, environment={"WORKBENCH_TRANSPORT": transport})
    assert max(found) < 1e-5


class Drawing(torch.nn.Sequential):
    """Each layer draws from the generators of torch, Python and numpy."""

    def forward(self, x):
        for layer in self:
            x = layer(x + torch.rand(len(x), 4)) * (random.random() + np.random.rand())  # noqa: NPY002
        return x


def losses_of_layers_that_draw(strategy):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = wb.parallelize(Drawing(*(torch.nn.Linear(4, 4) for _ in range(4))), strategy)
    batch = torch.ones(8, 4), torch.arange(8) % 4
    return [wb.forward_backward(model, F.cross_entropy, *batch).item() for _ in range(2)]


@pytest.mark.slow
def test_every_stage_of_a_rank_draws_the_numbers_of_one_device():
    (truth,) = run_processes(losses_of_layers_that_draw, 1, "*: data | mb=4")
    for found in run_processes(
        losses_of_layers_that_draw, 2, "0: data; 1: data@1; 2: data@2; 3: data@3 | 2x1x1 mb=4 interleaved"
    ):
        assert found == pytest.approx(truth)


def fail_on_the_second_stage():
    model = wb.parallelize(make("mlp"), TWO.format("1f1b"))

    def loss_fn(output, targets):
        if wb.rank() == 1:
            raise ZeroDivisionError("the second stage has had enough")
        return F.cross_entropy(output, targets)

    wb.forward_backward(model, loss_fn, torch.ones(6, 16), torch.zeros(6, dtype=torch.long))


def test_a_stage_that_raises_ends_the_others():
    with Ranks(fail_on_the_second_stage, 2) as ranks, pytest.raises(AssertionError) as caught:
        ranks.results()
    assert "had enough" in str(caught.value)
