"""Parameters and buffers that a module has under several names, and constants that several stages read."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import workbench as wb
from workbench.testing import run_ranks


class TwoNames(nn.Module):
    """Each of its own tensors has two names, and so has a layer; two layers share a buffer."""

    def __init__(self):
        super().__init__()
        self.second = self.first = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.layer = self.layer_again = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("seen_again", self.seen)
        self.layer.register_buffer("seen", self.seen)

    def forward(self, x):
        self.layer.seen += len(x)
        x = torch.tanh(self.layer(x @ self.first))
        return self.layer_again(x @ self.second) * (1 + self.seen_again / 100)


@pytest.mark.parametrize("strategy", ["*: data", "*: model", "*: data | zero=1", "*: data | zero=3", "*: model | mb=2"])
def test_what_has_two_names_stays_one(strategy):
    torch.manual_seed(0)
    one, x = TwoNames(), torch.randn(8, 4, dtype=torch.float64)
    copies = [copy.deepcopy(one) for _ in range(2)]

    def steps(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return {name: getattr(v, "full_tensor", lambda v=v: v)().clone() for name, v in model.state_dict().items()}

    def program(rank):
        model = wb.parallelize(copies[rank], strategy)
        assert model.first is model.second and model.layer is model.layer_again
        assert model.seen is model.seen_again is model.layer.seen
        return steps(model)

    expected = steps(one)
    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


class Scaled(nn.Module):
    """A buffer beside the layers, which a later stage reads."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.layer = nn.Linear(4, 4)
        self.register_buffer("factor", torch.ones(4))

    def forward(self, x):
        return self.layer(x @ self.weight) * self.factor


def test_a_constant_of_another_stage_is_read_again_after_files_were_loaded(tmp_path):
    torch.manual_seed(0)
    one, x = Scaled(), torch.randn(8, 4)
    copies = [copy.deepcopy(one) for _ in range(2)]
    one.factor.mul_(3)
    save_file(dict(one.state_dict()), tmp_path / "model.safetensors")

    def program(rank):
        model = wb.parallelize(copies[rank], "(root): data; layer: data@1 | 2x1x1 mb=2")
        before = wb.evaluate(model, x).full_tensor()
        wb.checkpoint.load_safetensors(model, tmp_path)
        return before, wb.evaluate(model, x).full_tensor()

    for before, after in run_ranks(program, 2):
        torch.testing.assert_close(after, one(x).detach())
        torch.testing.assert_close(before * 3, after)
