"""Layers are timed in a few steps, under every strategy, and nothing but time changes."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from workbench.testing import run_ranks
from workbench.training.runs.job import Job
from workbench.training.runs.layer_times import LayerTimes, is_measured
from workbench.training.runs.train import run_one_device, run_strategy

FORWARD_S, BACKWARD_S = 0.02, 0.04


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        time.sleep(FORWARD_S)
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        time.sleep(BACKWARD_S)
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum()


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return _Sleep.apply(x, self.weight)


def step(model: nn.Module, num_micro_batches: int = 1) -> None:
    for _ in range(num_micro_batches):
        model(torch.ones(3, 4)).sum().backward()


@pytest.mark.parametrize("at", [0, 1, 2], ids=["first", "between", "last"])
def test_time_goes_to_the_layer_that_takes_it(at: int):
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers.insert(at, Slow())
    model = nn.Sequential(*layers)
    times = LayerTimes(model)
    for _ in range(3):
        with times.measure():
            step(model, num_micro_batches=2)
    slow = str(at)
    assert times.forward_s[slow] >= 2 * FORWARD_S and times.backward_s[slow] >= 2 * BACKWARD_S
    for name in {"0", "1", "2"} - {slow}:
        assert times.forward_s[name] < FORWARD_S and times.backward_s[name] < BACKWARD_S


def test_what_lies_between_layers_is_nobodys():
    class Between(nn.Module):
        def forward(self, x):
            return _Sleep.apply(x, torch.ones(()))

    model = nn.Sequential(nn.Linear(4, 4), Between(), nn.Linear(4, 4))
    times = LayerTimes(model)
    with times.measure():
        step(model)
    assert list(times.forward_s) == list(times.backward_s) == ["0", "2"]
    assert max(*times.forward_s.values(), *times.backward_s.values()) < FORWARD_S


def test_outside_of_measured_steps_no_hook_is_left():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    times = LayerTimes(model)
    with times.measure():
        step(model)
    before = times.forward_s
    step(model)
    assert times.forward_s == before
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())


def test_ever_fewer_steps_are_measured():
    assert [step for step in range(1000) if is_measured(step)] == [5, 10, 20, 40, 80, 160, 320, 640]


def make_job() -> Job:
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(32, 6, generator=generator), torch.randint(0, 4, (32,), generator=generator))
    make = lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))  # noqa: E731
    return Job(make, data, F.cross_entropy, None, batch_size=8, num_steps=12)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "strategy",
    [
        "*: data",
        "*: model",
        "0: data; 2: model; 4: model | 1x1x2",
        "0: data; 2: data@1; 4: data@1 | 2x1x1 mb=4 1f1b",
        "0: data; 2: data@1; 4: data@1 | 2x1x1 mb=4 zero_bubble",
    ],
)
def test_a_run_that_is_listened_to_times_its_layers(strategy: str):
    results = run_ranks(lambda: run_strategy(make_job(), strategy, listen=lambda message: None), 2)
    quiet = run_ranks(lambda: run_strategy(make_job(), strategy), 2)
    assert results[0].losses == quiet[0].losses, "measuring changes no number"
    assert not quiet[0].layer_forward_s
    for name in ("0", "2", "4"):
        assert max(result.layer_forward_s.get(name, 0.0) for result in results) > 0
        if name == "0" and "zero_bubble" in strategy:
            continue  # no gradient goes on from the first layer: all of its backward is put off
        assert max(result.layer_backward_s.get(name, 0.0) for result in results) > 0


def test_one_device_reports_its_steps_and_its_layers():
    blocks = []
    result = run_one_device(make_job(), 1, blocks.append)
    assert [loss for block in blocks for loss in block.losses] == result.losses
    assert [time for block in blocks for time in block.step_times_s] == result.step_times_s
    assert blocks[-1].stop_step == 12 == blocks[-1].num_steps
    assert list(result.layer_forward_s) == list(result.layer_backward_s) == ["0", "2", "4"]
    assert result.losses == run_one_device(make_job()).losses
