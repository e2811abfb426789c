"""Models that write to their batch: the numbers of one device, however often a rank runs the forward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.testing import run_ranks


class Writing(nn.Module):
    """Scales its input in place, and its last layer takes the input once more."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x.mul_(0.5).add_(1)
        h = x.clone()
        for block in self.blocks:
            h = block(h)
        return self.head(h + x)


STAGES = "blocks.0: data@0; blocks.1: data@1; blocks.2: data@2; blocks.3: data@3; head: data@3 | 2x1x1 mb=4"
STRATEGIES = ["pipeline | 2x1x1 mb=4 1f1b", f"{STAGES} interleaved", f"{STAGES} zero_bubble_v", "*: data | 1x2x1 mb=4"]


def batch_of():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 3, generator=generator)


def made():
    torch.manual_seed(0)
    return Writing()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_those_of_one_device(strategy):
    one, (inputs, targets) = made(), batch_of()
    for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
        (F.mse_loss(one(x), y) / 4).backward()
    models = [made() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        wb.forward_backward(model, F.mse_loss, *batch_of())
        grads = [parameter.grad for parameter in model.parameters()]
        return [grad.full_tensor() for grad in wb.to_global(grads, placement=wb.placement.all(), sbp="B")]

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, [parameter.grad for parameter in one.parameters()])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_outputs_are_those_of_one_device(strategy):
    models, (inputs, _) = [made() for _ in range(2)], batch_of()
    expected = made()(inputs.clone()).detach()
    program = lambda rank: wb.evaluate(wb.parallelize(models[rank], strategy), batch_of()[0]).full_tensor()  # noqa: E731
    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, expected)


def test_layers_are_timed_without_a_trace_in_the_batch():
    given, seen = batch_of(), copy.deepcopy(batch_of())
    run_ranks(lambda: wb.planner.partition_stages(made(), F.mse_loss, *given, 2), 1)
    torch.testing.assert_close(given, seen, rtol=0, atol=0)
