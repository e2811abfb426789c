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


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(2)
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


class Normed(nn.Module):
    """A layer with one output, of which the second rank has an empty shard, behind a norm with a frozen weight."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.norm.weight.requires_grad_(False)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


STAGES = "first: data@0; norm: data@1; last: data@1 | 2x1x1"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        (STAGES, "first.weight"),
        (STAGES, "norm.weight"),
        (STAGES, "norm.running_mean"),
        ("*: model:column | 1x1x2", "last.weight"),
    ],
)
def test_memory_of_a_tensor_that_is_other_on_some_ranks_only(strategy, name):
    def program(capture):
        module = wb.parallelize(filled(Normed()), strategy)
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)

        def step(x):
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run, losses, tensor = wb.capture(step) if capture else step, [], module.state_dict(keep_vars=True)[name]
        for number, (x, _) in enumerate(batches(8)):
            if number == 3:
                tensor.data = kept = tensor.data.clamp(-0.2, 0.2)
            if number == 6:
                tensor.data = kept.clamp_(-0.1, 0.1)  # the same memory
            losses.append(run(x).full_tensor())
        assert not capture or (run.num_recordings, run.num_replays) == (2, 5)
        return losses

    assert_same(*(run_ranks(lambda capture=capture: program(capture)) for capture in (True, False)))


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.parametrize(
    ("check", "num_ranks", "error", "words"),
    [
        (wb.debug.check_agreement, 2, wb.errors.LayoutError, "hold different values"),
        (wb.debug.explicit_boxing, 2, wb.errors.ExplicitBoxingError, "only boxings that"),
        (torch.autograd.detect_anomaly, 1, RuntimeError, "returned nan values"),  # a setting of the whole process
    ],
)
def test_a_check_that_begins_after_the_recording_sees_the_step(check, num_ranks, error, words):
    def program(rank):
        ranks = wb.placement("cpu", ranks=list(range(num_ranks)))
        weight = wb.ones(4, placement=ranks, sbp="S(0)").requires_grad_()

        def step(x, whole):
            weight.grad = None
            loss = (weight * x * whole).square().sum()
            loss.backward()
            return loss.detach()

        run = wb.capture(step)
        whole = wb.ones(4, placement=ranks, sbp="P(max)")
        for _ in range(3):
            run(torch.ones(4), whole)
        assert run.num_replays == 1
        with pytest.raises(error, match=words), check():
            run(torch.full((4,), float("nan") if num_ranks == 1 else float(rank)), whole)

    run_ranks(program, num_ranks)
