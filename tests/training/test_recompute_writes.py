"""What a block writes that runs again: statistics once, parameters not at all unless they become the same."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.training.models import batch_for
from workbench.errors import StrategyError
from workbench.testing import run_ranks


def test_statistics_of_batch_norm_are_written_once():
    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            part = lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))  # noqa: E731
            self.parts, self.head = nn.Sequential(part(), part()), nn.Linear(16, 10)

        def forward(self, x):
            return self.head(self.parts(x))

    torch.manual_seed(0)
    models = [Stem() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    inputs, targets = batch_for("mlp")

    def run(model):
        for _ in range(2):
            F.cross_entropy(model(inputs), targets).backward()
        return [b.full_tensor() if hasattr(b, "full_tensor") else b for b in model.buffers()]

    expected = run(models[2])
    for found in run_ranks(lambda rank: run(wb.parallelize(models[rank], "*: data | recompute")), 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_block_that_runs_again_writes_the_same_to_its_parameters(momentum):
    class Centered(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(16, 16))
            self.center = nn.Parameter(torch.zeros(16), requires_grad=False)

        def forward(self, x):
            self.center.data.mul_(momentum).add_(x.detach().mean(0))
            return super().forward(x - self.center)

    model, (inputs, targets) = nn.Sequential(Centered(), Centered(), nn.Linear(16, 10)), batch_for("mlp")

    def program():
        parallel = wb.parallelize(copy.deepcopy(model), "*: data | recompute")
        F.cross_entropy(parallel(inputs), targets).backward()

    with pytest.raises(StrategyError, match=r"1 of 3 parameters.* register_buffer") if momentum else nullcontext():
        run_ranks(program, 2)


def test_a_block_that_writes_to_what_it_was_given_is_named():
    class Scaling(nn.Sequential):
        def forward(self, x):
            return super().forward(x.mul_(0.5).clone())

    blocks = [Scaling(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2)]
    model, (inputs, _) = nn.Sequential(nn.Linear(16, 16), *blocks), batch_for("mlp")

    def program(strategy):
        wb.parallelize(copy.deepcopy(model), strategy)(inputs).sum().backward()

    run_ranks(lambda: program("*: data"), 2)
    with pytest.raises(StrategyError, match=r"Scaling has written in place to 1 tensor that it was given .*x = x \+ y"):
        run_ranks(lambda: program("*: data | recompute"), 2)
