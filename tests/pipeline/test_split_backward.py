"""Zero bubble: the second half of a backward computes all of the weights' gradients, and once."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import workbench as wb
from workbench.testing import run_ranks
from workbench.training.pipelining.running_step import RunningStep
from workbench.training.pipelining.split_backward import WeightGradients, backward_of_inputs

ROWS = "blocks.0: data; blocks.[1-2]: data@1; head: data@1 | 2x1x1 mb=4 {}"
PRODUCTS = ("aten.mm.default", "aten.addmm.default")


class Plain(nn.Module):
    """Every function reads its own parameters."""

    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.two(torch.tanh(self.one(self.norm(x))))


class Shared(Plain):
    """Reads one weight twice, a bias that the other reading does not have, and a weight through a function of it."""

    def forward(self, x):
        y = F.linear(torch.tanh(self.one(x)), self.one.weight.t() * 2.0, self.two.bias)
        return self.norm(x + y) + F.linear(y, self.norm.weight.diag())


class Frozen(Plain):
    """A parameter that does not learn, and a term that follows from parameters alone."""

    def __init__(self):
        super().__init__()
        self.one.weight.requires_grad_(False)

    def forward(self, x):
        return super().forward(x) + self.norm.weight.exp() * self.one.bias.mean()


class Model(nn.Module):
    """Three blocks and a head."""

    def __init__(self, kind):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(kind() for _ in range(3)), nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Counting(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.products += str(function) in PRODUCTS
        return function(*args, **(kwargs or {}))


def whole_gradients(model, step):
    """Of one step."""
    step()
    everywhere = wb.placement.all("cpu")
    return {
        name: None if p.grad is None else p.grad.to_global(placement=everywhere, sbp="B").full_tensor()
        for name, p in model.named_parameters()
    }


def run(one, schedule, last_step=whole_gradients, warm_up_steps=1):
    """What the last of some steps gives on every rank; in the first one, calls of blocks run as written."""
    inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    models = [copy.deepcopy(one) for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], ROWS.format(schedule))

        def step():
            model.zero_grad()
            wb.forward_backward(model, F.cross_entropy, inputs, torch.arange(8) % 4)

        for _ in range(warm_up_steps):
            step()
        return last_step(model, step)

    return run_ranks(program, 2)


@pytest.mark.parametrize("kind", [Plain, Shared, Frozen])
def test_gradients_are_those_of_one_backward(kind):
    torch.manual_seed(0)
    one = Model(kind)
    whole, split = run(one, "1f1b")[0], run(one, "zero_bubble")[0]
    assert any(grad is not None for grad in whole.values())
    for name, grad in whole.items():
        assert (grad is None) == (split[name] is None), name
        assert grad is None or torch.equal(grad, split[name]), name


def test_the_first_half_gives_no_parameter_that_one_function_reads_its_gradient(monkeypatch):
    monkeypatch.setattr(WeightGradients, "accumulate", lambda self: None)

    def early(model, step):
        step()
        return [name for name, p in model.named_parameters() if not p.is_placeholder and p.grad is not None]

    torch.manual_seed(0)
    assert run(Model(Plain), "zero_bubble", early)[1] == []


@pytest.mark.parametrize("kind", [Plain, Frozen])
def test_a_split_backward_multiplies_as_often_as_one_backward(kind):
    torch.manual_seed(0)
    block, x = kind(), torch.randn(2, 8)
    learning = sum(p.requires_grad for p in (block.one.weight, block.two.weight))

    def program():
        model = wb.parallelize(block, "*: data")
        given = wb.to_global(x, placement=wb.placement.all("cpu"), sbp="B").requires_grad_()
        with Counting() as whole:
            model(given).sum().backward()
        with Counting() as first:
            kept = backward_of_inputs(model(given).sum(), RunningStep((), "zero_bubble", [], 1))
        with Counting() as second:
            kept.accumulate()
        assert (first.products + second.products, second.products) == (whole.products, learning)

    run_ranks(program, 1)
