"""Optimizers that keep statistics of whole gradients: matrices, means of rows, lists of them, numbers. They go on under
another strategy, from a checkpoint and from a ``state_dict`` as on one device.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import workbench as wb
from workbench.testing import run_ranks

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
STAGES = "0: data; 2: data; 4: data@1 | 2x1x1"
PAIRS = [
    ("*: data", "*: model"),
    ("*: model", "*: data | zero=3"),
    ("*: data | zero=1", STAGES),
    (STAGES, "*: data | zero=2"),
    (STAGES, "*: model"),
]


class Statistics(optim.Optimizer):
    """Shampoo and Adafactor in small: plain matrices of columns, one in a list; global means of rows, and a norm."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            state, grad, size = self.state[p], p.grad.reshape(-1, p.shape[-1]), p.shape[-1]
            if not state:
                state["count"], state["norm"] = 0, p.norm()
                state["sum"], state["mean"] = torch.zeros(size, size).double(), [torch.zeros(size, size).double()]
                state["rows"] = p.grad.new_zeros((*p.shape[:-1], 1))
            state["count"] += 1
            state["sum"] += grad.T @ grad
            state["mean"][0].lerp_(grad.T @ grad, 0.5)
            state["rows"].lerp_(p.grad.square().mean(-1, keepdim=True), 0.5)
            state["norm"] = 0.5 * (state["norm"] + p.norm())
            inverse = torch.linalg.inv(torch.eye(size).double() + state["sum"] + state["mean"][0] / state["count"])
            update = (grad @ inverse).reshape(p.shape) / (state["rows"].sqrt() + 0.1)
            p.sub_(update * state["norm"], alpha=self.param_groups[0]["lr"])


def adafactor(parameters):
    return optim.Adafactor(parameters, lr=0.1)


def new_model():
    """Its second weight is square, so a matrix of columns has its shape."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 6)).double()


def train(model, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(X), Y).backward()
        optimizer.step()


def move(model, optimizer, make, second, folder):
    return wb.parallelize(model, second, optimizer=optimizer), optimizer


def load(model, optimizer, make, second, folder):
    wb.checkpoint.save(folder, model=model, optimizer=optimizer)
    other = wb.parallelize(new_model(), second)
    another = make(other.parameters())
    wb.checkpoint.load(folder, model=other, optimizer=another)
    return other, another


def copy_state(model, optimizer, make, second, folder):
    another = make(model.parameters())
    another.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return model, another


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("go_on", [move, load, copy_state])
@pytest.mark.parametrize("make", [Statistics, adafactor])
def test_statistics_go_on(make, go_on, first, second, tmp_path):
    one = new_model()
    optimizer = make(one.parameters())
    train(one, optimizer), train(one, optimizer)
    models = [new_model() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], first)
        optimizer = make(model.parameters())
        train(model, optimizer)
        model, optimizer = go_on(model, optimizer, make, second, tmp_path / "state")
        train(model, optimizer)
        return [parameter.full_tensor().detach() for parameter in model.parameters()]

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, [p.detach() for p in one.parameters()], rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("make", [Statistics, adafactor])
def test_statistics_of_a_plain_model_go_on(make):
    """Trained before ``wb.parallelize``; new state of a step on global tensors is global, or whole."""
    one = new_model()
    optimizer = make(one.parameters())
    train(one, optimizer), train(one, optimizer)
    models = [new_model() for _ in range(2)]

    def program(rank):
        optimizer = make(models[rank].parameters())
        train(models[rank], optimizer)
        model = wb.parallelize(models[rank], "*: model", optimizer=optimizer)
        train(model, optimizer)
        return [parameter.full_tensor().detach() for parameter in model.parameters()]

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, [p.detach() for p in one.parameters()], rtol=1e-7, atol=1e-8)
