"""Where two strategies part: a wrong rule, a model whose code differs by rank; and nothing where all is right."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.core.strategy import Strategy
from workbench.testing import run_ranks
from workbench.training.batches import Batch
from workbench.training.runs.first_difference import FirstDifference
from workbench.training.runs.recorded_values import values_under

torch.manual_seed(3)
BATCH = torch.randn(8, 6), torch.randint(0, 4, (8,))
MODELS = {
    "mlp": nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)),
    "relu in 16 bits": nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).bfloat16(),
}


def differences(model: nn.Module, cases, batch=BATCH) -> list[FirstDifference]:
    def program():
        found = [
            wb.debug.first_difference(copy.deepcopy(model), *case, batch=batch, loss_fn=F.cross_entropy)
            for case in cases
        ]
        return [(str(one), one) for one in found]

    by_rank = run_ranks(program)
    assert by_rank[0] == by_rank[1], "every rank knows the answer"
    return [one for _, one in by_rank[0]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_right_model_has_no_difference_beyond_rounding(name):
    cases = [
        ["*: data"],
        ["*: model | 1x1x2"],
        ["0: data; 1: data; 3: data@1 | 2x1x1 mb=2"] if name == "mlp" else ["0: data; 2: data@1 | 2x1x1 mb=2"],
        ["*: data | zero=2"],
        ["*: model | 1x1x2", "*: data"],
    ]
    batch = (BATCH[0].to(MODELS[name][0].weight.dtype), BATCH[1])
    for case, found in zip(cases, differences(MODELS[name], cases, batch), strict=True):
        assert not found and str(found).startswith("no difference beyond rounding: "), (case, str(found))
        assert found.num_compared >= 10 and found.num_same_bytes > 0, (case, str(found))


def test_sums_over_one_rank_are_equal_in_every_bit():
    stages = "0: data; 1: data; 3: data@1 | 2x1x1 mb=2"
    (found,) = differences(MODELS["mlp"], [[stages]])
    assert found.num_same_bytes == found.num_compared >= 10
    assert str(found).endswith(f": {found.num_compared} values were compared, and all are equal.")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["", "bf16"])
def test_random_numbers_are_no_difference_and_go_on_after_it(precision):
    """Plain torch draws other ones than a strategy, so one device is then a world of one rank."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 4))
    torch.manual_seed(7)
    further = torch.rand(3)
    torch.manual_seed(7)
    for found in differences(model, [[f"*: data | mb=2 {precision}"], [f"*: model | 1x1x2 {precision}"]]):
        assert not found and found.num_compared >= 14, str(found)
    assert torch.equal(torch.rand(3), further)


class DrawsByRank(nn.Module):
    """Its dropout is not that of one device: each rank draws from a generator that it has seeded."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        own = torch.Generator().manual_seed(wb.rank() + wb.world_size())
        keep = torch.rand(8, generator=own) < 0.5
        return F.dropout(self.b(self.a(x) * keep), 0.1)


def test_a_mistake_beside_random_numbers_is_found():
    [found] = differences(DrawsByRank(), [["*: data"]])
    assert (found.layer, found.function) == ("", "mul"), str(found)


@wb.register_rule("b d -> b d")  # wrong: it takes columns apart
def shares(x):
    """Each value over the sum of its row."""
    return x / x.sum(-1, keepdim=True)


class Shares(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(shares(self.first(x).exp()))


def test_a_wrong_rule():
    [found] = differences(Shares(), [["first: model:column; last: model:row | 1x1x2"]])
    assert (found.layer, found.function, found.what) == ("", "shares", "result"), str(found)
    assert found.ranks == (0, 1) and found.size > 0.1 and "result of shares in the model, on ranks 0, 1" in str(found)
    assert found.layouts[1] == "one device" and "S(1)" in found.layouts[0]


class ByKeyword(nn.Linear):
    def forward(self, x):
        return F.linear(input=x, weight=self.weight, bias=self.bias)


def test_operands_that_are_given_by_keyword_have_layouts():
    model = nn.Sequential(ByKeyword(6, 4))

    def program():
        parts = [Batch.of(BATCH, F.cross_entropy)]
        values = values_under(Strategy("*: data"), copy.deepcopy(model), parts, F.cross_entropy)
        return [value.operands for name, value in values.items() if (name.function, name.what) == ("linear", "result")]

    for [operands] in run_ranks(program):
        assert len(operands) == 3 and "S(0)" in operands[0]


class DiffersByRank(nn.Module):
    def __init__(self, in_backward=False):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.in_backward = in_backward

    def forward(self, x):
        hidden = self.a(x)
        if wb.rank() == 1:
            hidden = hidden.tanh() if not self.in_backward else hidden
            hidden.register_hook(lambda grad: grad * 1.5 if self.in_backward else grad)
        return self.b(hidden)


def test_code_that_differs_by_rank():
    """Rank 0's one device is the one that counts."""
    forward, backward = (differences(DiffersByRank(late), [["*: data"]])[0] for late in (False, True))
    assert forward and forward.ranks == (1,) and forward.function == "linear" and forward.layer == "b", str(forward)
    assert "layer 'b', on rank 1: " in str(forward) and "S(0)" in forward.layouts[0]
    assert backward and backward.what.startswith("gradient") and backward.layer == "a", str(backward)


@wb.register_rule("b d -> b d")  # wrong: its imaginary part takes columns apart
def turned(x):
    """Each value, with the sum of its row as its imaginary part."""
    return torch.complex(x, x.sum(-1, keepdim=True).expand(x.shape))


class Turns(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.turn = nn.Linear(6, 8), nn.Parameter(torch.full((8,), 0.5 + 0.5j))

    def forward(self, x):
        hidden = self.first(x)
        return (turned(hidden) * self.turn).abs() if self.training else (hidden * self.turn).conj().imag


def test_complex_numbers_are_compared_with_their_imaginary_parts():
    cases = [["first: model:column | 1x1x2"]]
    [found] = differences(Turns(), cases)
    assert (found.function, found.what) == ("turned", "result") and found.size > 0.1, str(found)
    [right] = differences(Turns().eval(), cases)
    assert not right and right.num_compared >= 8, str(right)
