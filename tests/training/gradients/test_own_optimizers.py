"""Optimizers of the user's own ask what a parameter is, and what attributes it has: parts of it answer as it does."""

import copy

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.testing import run_ranks

INPUTS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Own(torch.optim.Optimizer):
    """Descends along gradients."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.mine = [p for group in self.param_groups for p in group["params"]]

    def own(self):
        return [p for group in self.param_groups for p in group["params"]]

    def rate(self, parameter):
        return 0.1

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.own():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-self.rate(parameter))


class Learning(Own):
    def own(self):
        return [p for p in super().own() if p.requires_grad]


class Parameters(Own):
    def own(self):
        return [p for p in super().own() if isinstance(p, nn.Parameter)]


class Scaled(Own):
    def rate(self, parameter):
        return 0.1 * parameter.scale


class Counting(Own):
    """Keeps a number on each parameter."""

    def rate(self, parameter):
        parameter.count = getattr(parameter, "count", 0) + 1
        return 0.1 / parameter.count


class Kept(Own):
    """Steps on the parameters that it was given."""

    def own(self):
        return self.mine


class KeptData(Kept):
    """The same through ``.data``."""

    def step(self, closure=None):
        for parameter in self.mine:
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)


STRATEGIES = ["*: data", "*: data | 1x2x1 zero=1", "*: data | 1x2x1 zero=3", "*: model"]
CASES = [(kind, "*: data | 1x2x1 zero=1") for kind in (Learning, Parameters, Scaled, Counting, Kept, KeptData)]


def built():
    """The second weight is not contiguous, and one layer is frozen."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
    module[2].weight = nn.Parameter(module[2].weight.detach().T.contiguous().T)
    module[4].requires_grad_(False)
    for number, parameter in enumerate(module.parameters()):
        parameter.scale = 0.5 + number
    return module


def trained(module, kind):
    optimizer = kind(module.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        module(INPUTS).square().mean().backward()
        optimizer.step()
    whole = [p.full_tensor().detach() if isinstance(p, wb.GlobalTensor) else p.detach() for p in module.parameters()]
    return whole, [getattr(p, "count", 0) for p in module.parameters()]


@pytest.mark.parametrize(
    ("kind", "strategy", "elementwise"),
    [
        *((*case, False) for case in CASES),
        *((kind, "*: data | 1x2x1 zero=1", True) for kind in (Scaled, Parameters)),
        *(
            pytest.param(kind, strategy, elementwise, marks=pytest.mark.slow)
            for kind in (Learning, Parameters, Scaled, Counting, Kept)
            for strategy in STRATEGIES
            for elementwise in (False, True)
        ),
    ],
)
def test_own_optimizers_train_as_on_one_device(kind, strategy, elementwise):
    expected, counts = trained(built(), kind)
    kind = type(kind.__name__, (kind,), {"elementwise": elementwise})
    models = [built() for _ in range(2)]
    for found, found_counts in run_ranks(lambda rank: trained(wb.parallelize(models[rank], strategy), kind), 2):
        assert found_counts == counts
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Slowing(Own):
    """Its rate falls with a count that it keeps beside the state of its parameters."""

    elementwise = True

    def own(self):
        self.state["step"] = self.state.get("step", 0) + 1
        return super().own()

    def rate(self, parameter):
        return 0.1 / self.state["step"]


@pytest.mark.parametrize("captures", [False, True])
def test_a_count_beside_the_state_of_parameters_goes_on(captures):
    """In replays, and under another strategy."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def program(*strategies):
        module = copy.deepcopy(made)
        optimizer = Slowing(module.parameters())

        def step(inputs):
            optimizer.zero_grad()
            module(inputs).square().mean().backward()
            optimizer.step()

        for strategy in strategies:
            if strategy:
                wb.parallelize(module, strategy, optimizer=optimizer)
            run = wb.capture(step) if strategy and captures else step
            for _ in range(3):
                run(INPUTS)
        weights = [p.full_tensor() if isinstance(p, wb.GlobalTensor) else p for p in module.parameters()]
        return optimizer.state["step"], [weight.detach() for weight in weights]

    num_steps, expected = program(None, None)
    for found_steps, found in run_ranks(lambda: program("*: data | 1x2x1 zero=1", "*: model | 1x1x2"), 2):
        assert found_steps == num_steps == 6
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
