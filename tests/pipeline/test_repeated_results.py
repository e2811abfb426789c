"""A block of another stage that returns a tensor twice, as encoders do with their last hidden state."""

import copy

import pytest
import torch
from torch import nn

from tests.pipeline.test_placeholder_forward import program_of
from workbench.testing import run_ranks


class Repeating(nn.Module):
    """A block that returns a tensor twice and one of another layout, as encoders do whose last hidden state is one of
    their hidden states too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.linear(x)
        return hidden, (hidden, self.linear.weight.sum(0))


class Adding(nn.Module):
    """A block that takes two tensors, which may be one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, other):
        return self.linear(x) + other


class WithARepeatedResult(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.head = Repeating(), Adding(), Adding(), nn.Linear(8, 4)

    def forward(self, x):
        hidden, (again, row) = self.a(x)
        hidden = self.b(hidden, again)
        return self.head(self.c(self.c(hidden, hidden + 1), hidden) * row)


def test_a_tensor_that_a_block_returns_twice_stays_one():
    torch.manual_seed(0)
    one = WithARepeatedResult()
    models = [copy.deepcopy(one) for _ in range(2)]
    truth = run_ranks(program_of([one], "*: data | mb=2"), 1)[0]
    strategy = "a: data; b: data@1; c: data@1; head: data@1 | 2x1x1 mb=2 1f1b"
    for losses, grads, recorded, _ in run_ranks(program_of(models, strategy), 2):
        assert losses == pytest.approx(truth[0], rel=1e-5) and (not recorded or all(recorded))
        torch.testing.assert_close(grads, truth[1], rtol=1e-4, atol=1e-6)
