"""What a program does to gradients and optimizers between two captured steps counts in the next one."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.training.capture.captured_runs import assert_same, filled
from workbench.testing import run_ranks


def perceptron(strategy):
    return wb.parallelize(filled(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))), strategy)


def batches(num_steps):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator)) for _ in range(num_steps)]


@pytest.mark.parametrize("strategy", ["*: model | 1x1x2", "*: data | 1x2x1 zero=1", "*: data | 1x2x1 zero=3"])
def test_state_of_an_optimizer_that_is_loaded(strategy):
    def program(capture):
        module = perceptron(strategy)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)

        def step(x, y):
            optimizer.zero_grad()
            loss = F.mse_loss(module(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        run, losses = wb.capture(step) if capture else step, []
        for number, (x, y) in enumerate(batches(7)):
            if number in (3, 5):
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            losses.append(run(x, y).full_tensor())
        assert not capture or run.num_replays == 5
        return losses

    assert_same(*(run_ranks(lambda capture=capture: program(capture)) for capture in (True, False)))


@pytest.mark.parametrize("num_passes", [1, 2])
def test_gradients_of_a_bias_that_one_rank_adds(num_passes):
    """The others hold a term of zero, which no operator of theirs reads, and a gradient of zeros."""

    def program(capture):
        module = perceptron("*: model | 1x1x2")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def passes(x, y):
            loss = F.mse_loss(module(x), y)
            loss.backward()
            return loss.detach()

        run, losses = wb.capture(passes) if capture else passes, []
        for number, (x, y) in enumerate(batches(8)):
            losses.append(run(x, y).full_tensor())
            if (number + 1) % num_passes == 0:
                losses += [parameter.grad.full_tensor().clone() for parameter in module.parameters()]
                optimizer.step()
                optimizer.zero_grad()
        assert not capture or run.num_replays > 2
        return losses

    assert_same(*(run_ranks(lambda capture=capture: program(capture)) for capture in (True, False)))
