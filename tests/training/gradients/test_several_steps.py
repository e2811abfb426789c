"""Optimizers that evaluate the model again within a step, and those that step others: as on one device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import workbench as wb
from tests.training.gradients.several_steps import SAM, Armijo
from workbench.errors import LayoutError
from workbench.testing import run_ranks

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
STRATEGIES = ["*: data", "*: data | zero=1", "*: data | zero=2", "*: data | zero=3", "*: model"]
PIPELINE = "0: data; 2: data@1 | 2x1x1 mb=2"


def new_model():
    """Its last layer's weight is cut along dim 1 under zero=1."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5)).double()


def weights_of(model):
    return [p.full_tensor().detach() if isinstance(p, wb.GlobalTensor) else p.detach() for p in model.parameters()]


def evaluate(model):
    """Add the gradients of one batch to those that are there, in micro-batches where the model has stages."""
    if any(isinstance(p, wb.GlobalTensor) for p in model.parameters()):
        return wb.forward_backward(model, F.mse_loss, X, Y)
    loss = F.mse_loss(model(X), Y)
    loss.backward()
    return loss.detach()


def assert_as_on_one_device(train, strategy, num_ranks=2):
    """``train(model)`` trains; what it returns has to be the same everywhere, too."""
    one = new_model()
    expected = train(one), weights_of(one)
    assert not torch.allclose(expected[1][2], weights_of(new_model())[2], rtol=1e-4), "nothing was trained"
    models = [new_model() for _ in range(num_ranks)]

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        return train(model), weights_of(model)

    for found in run_ranks(program, num_ranks):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def sam_with_a_closure(model):
    optimizer = SAM(model.parameters(), optim.SGD, lr=0.1, momentum=0.9)
    for _ in range(3):
        evaluate(model)
        optimizer.step(lambda: evaluate(model))
        optimizer.zero_grad()


def line_search(model):
    optimizer = Armijo(model.parameters(), lr=8.0)

    def closure():
        optimizer.zero_grad()
        return evaluate(model)

    for _ in range(2):
        optimizer.step(closure=closure)


SEVERAL = [sam_with_a_closure, line_search]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["*: data", "*: model", PIPELINE])
@pytest.mark.parametrize("train", SEVERAL)
def test_an_optimizer_that_calls_its_closure_again(train, strategy):
    assert_as_on_one_device(train, strategy)


@pytest.mark.parametrize("train", SEVERAL)
def test_it_is_refused_where_sums_are_made_once_per_step(train):
    models = [new_model() for _ in range(2)]
    with pytest.raises(LayoutError, match=r"(SAM|Armijo)\.step\(closure\).*zero=.*loss = closure\(\); optimizer.step"):
        run_ranks(lambda rank: train(wb.parallelize(models[rank], "*: data | zero=1")), 2)


class Lamb(optim.Optimizer):
    """Needs norms of whole layers, and calls its closure first, as most do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(0.9).add_(p.grad)
                p.sub_(momentum * (p.norm() / (momentum.norm() + 1e-6)), alpha=group["lr"])
        return loss


@pytest.mark.parametrize("strategy", ["*: data", "*: model", PIPELINE])
def test_steps_with_and_without_a_closure_share_their_state(strategy):
    def train(model):
        optimizer, losses = Lamb(model.parameters()), []

        def closure():
            optimizer.zero_grad()
            return evaluate(model)

        for number in range(4):
            losses.append(optimizer.step(closure) if number % 2 else closure())
            if number % 2 == 0:
                optimizer.step()
        return [float(loss) for loss in losses]

    assert_as_on_one_device(train, strategy)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", [*STRATEGIES, PIPELINE])
def test_two_steps_of_the_users_own_around_two_gradients(strategy):
    """SAM as it is used without a closure: its two halves are no ``step``."""

    def train(model):
        optimizer = SAM(model.parameters(), optim.SGD, lr=0.1, momentum=0.9)
        for _ in range(3):
            evaluate(model)
            optimizer.first_step(zero_grad=True)
            evaluate(model)
            optimizer.second_step(zero_grad=True)

    assert_as_on_one_device(train, strategy)
