"""Selective activation checkpointing and hooks on saved tensors, on global tensors: the numbers of one device."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import workbench as wb
from tests.training.classifier_steps import assert_steps_equal_one_device
from workbench.testing import run_ranks

MATMULS = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]


def save_matmuls(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def save_all(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


def selective(policy):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def offloaded(block, x):
    with torch.autograd.graph.save_on_cpu():
        return block(x)


def packed(block, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        return block(x)


CALLS = {
    "plain": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "list": selective(MATMULS),
    "policy": selective(save_matmuls),
    "all": selective(save_all),
    "offloaded": offloaded,
    "packed": packed,
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Model(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.emb, self.head = name, nn.Linear(8, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.emb(x)
        for block in self.blocks:
            x = CALLS[self.name](block, x)
        return self.head(x)


def make(name):
    torch.manual_seed(0)
    return Model(name).double(), torch.randn(6, 8, dtype=torch.float64), torch.arange(6) % 5


STAGES = "emb: data; blocks.0*: data; blocks.1*: data@1; head: data@1 | "
STRATEGIES = [
    ("*: data", 2), ("*: model", 2), ("*: model | 1x2x2", 4), ("*: data | zero=3", 2),
    ("*: data; blocks.*.fc1: model:column; blocks.*.fc2: model:row | 1x1x2", 2), (f"{STAGES}2x1x1 mb=2 1f1b", 2),
    (f"{STAGES}2x1x1 mb=2 zero_bubble", 2), (f"{STAGES}2x1x1", 2),
]  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda pair: f"{pair[0]} on {pair[1]}")
@pytest.mark.parametrize("name", [name for name in CALLS if name != "plain"])
def test_training_equals_one_device(name, strategy):
    assert_steps_equal_one_device(*make(name), *strategy)


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num_matmuls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_matmuls += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_what_the_policy_saves_is_not_computed_again():
    def count(name):
        model, inputs, targets = make(name)

        def program():
            loss = F.cross_entropy(wb.parallelize(copy.deepcopy(model), "*: data")(inputs), targets)
            with Counting() as counting:
                loss.backward()
            return counting.num_matmuls

        return run_ranks(program, 2)

    assert [count(name) for name in ("plain", "list", "policy")] == [[4, 4], [0, 0], [0, 0]]


def test_dropout_is_drawn_again_as_it_was():
    """Against what is saved whole, because one device draws other numbers."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    inputs = torch.ones(6, 8)

    def grads(call):
        def program():
            model = wb.parallelize(copy.deepcopy(layer), "*: data")
            wb.manual_seed(3)
            call(model, wb.to_global(inputs, placement=wb.placement.all("cpu"), sbp="B")).sum().backward()
            return [p.grad.full_tensor() for p in model.parameters()]

        return run_ranks(program, 2)

    expected = grads(lambda block, x: block(x))
    assert any(grad.any() for grad in expected[0])
    for name in ("list", "all"):
        torch.testing.assert_close(grads(CALLS[name]), expected)
