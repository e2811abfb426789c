"""A dispatch mode of the user's around a step is shown operators on shards, and changes no number."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import workbench as wb
from tests.training.models import batch_for, make
from workbench.testing import run_ranks

STRATEGIES = [
    "*: data | 1x2x1 mb=2",
    "*: data | 1x2x1 zero=3",
    "*: model | 1x1x2",
    "0: data; 2: data; 4: data@1 | 2x1x1 mb=2 1f1b",
    "0: data; 2: data; 4: data@1 | 2x1x1 mb=2 zero_bubble",
]


class Counting(TorchDispatchMode):
    """Counts operators, and hands them on."""

    num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def train(strategy, around=contextlib.nullcontext):
    """Losses and weights of two steps by rank, each step inside a context of its own."""
    models, (inputs, targets) = [make("mlp") for _ in range(2)], batch_for("mlp")

    def body(rank):
        model = wb.parallelize(models[rank], strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            with around():
                losses.append(wb.forward_backward(model, torch.nn.functional.cross_entropy, inputs, targets))
            optimizer.step()
        everywhere = wb.placement.all("cpu")
        return [
            t.detach().to_global(placement=everywhere, sbp="B").full_tensor() for t in (*losses, *model.parameters())
        ]

    return run_ranks(body, 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mode_changes_nothing(strategy):
    modes = []

    def counting():
        modes.append(Counting())
        return modes[-1]

    expected, found = train(strategy), train(strategy, counting)
    assert all(torch.equal(a, b) for rank in (0, 1) for a, b in zip(expected[rank], found[rank], strict=True))
    assert min(mode.num_calls for mode in modes) > 20


def test_flops_are_counted_on_shards():
    counters = []

    def counter():
        counters.append(FlopCounterMode(display=False))
        return counters[-1]

    train("*: data | 1x2x1", counter)
    counters = counters[-2:]  # a first step makes plans, which tries functions on metadata
    layers = [layer for layer in make("mlp") if isinstance(layer, torch.nn.Linear)]
    forward = [2 * layer.weight.numel() for layer in layers]
    per_sample = 3 * sum(forward) - forward[0]  # twice as much backward, but for the inputs
    assert {counter.get_total_flops() / per_sample for counter in counters} == {12, 11}


def test_operators_that_the_user_calls_go_by_layouts():
    def body():
        x = wb.ones(4, 3, placement=wb.placement.all("cpu"), sbp=wb.sbp.split(0))
        w = wb.ones(3, 2, placement=wb.placement.all("cpu"), sbp=wb.sbp.broadcast)
        y = torch.ops.aten.mm.default(x, w)
        with Counting():
            z = torch.ops.aten.mm.default(x, w)
        return y.shape, y.sbp, z.shape, z.sbp

    shape, sbp = torch.Size([4, 2]), (wb.sbp.split(0),)
    assert run_ranks(body, 2) == [(shape, sbp, shape, sbp)] * 2
