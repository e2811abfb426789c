"""What a step makes anew in every call, by operators or without one, a replay makes anew too."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.training.capture.captured_runs import assert_same, filled
from workbench.testing import run_ranks


def perceptron():
    return filled(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))


def batches(num_steps):
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator)) for _ in range(num_steps)]


def assert_captured_alike(strategies, loss_of, before_step=lambda module: None):
    """Four steps under each strategy in turn: as written and captured, the same losses and weights."""

    def program(capture):
        module = wb.parallelize(perceptron(), strategies[0])
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)

        def step(x, y):
            optimizer.zero_grad()
            loss = loss_of(module, x, y)
            loss.backward()
            before_step(module)
            optimizer.step()
            return loss.detach()

        run, losses = wb.capture(step) if capture else step, []
        for number, (x, y) in enumerate(batches(4 * len(strategies))):
            if number and number % 4 == 0:
                wb.parallelize(module, strategies[number // 4], optimizer=optimizer)
            losses.append(run(x, y).full_tensor())
        assert not capture or (run.num_recordings, run.num_replays) == (len(strategies), 2 * len(strategies))
        return [*losses, *(parameter.full_tensor().detach() for parameter in module.parameters())]

    assert_same(*(run_ranks(lambda capture=capture: program(capture)) for capture in (True, False)))


def squares(module, x, y):
    return F.mse_loss(module(x), y)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options", [("zero=1",), ("zero=2",), ("zero=3", "zero=1", "zero=3"), ("zero=2", "", "zero=1")]
)
def test_shards_that_do_not_lie_in_a_row(options):
    """Of a weight of three rows each of two ranks steps on columns, which are copied out for every step."""
    assert_captured_alike([f"*: data | 1x2x1 {option}" for option in options], squares)


def hooked(module, x, y):
    h = module(x)
    h.register_hook(lambda gradient: gradient * 3)
    return F.mse_loss(h, y)


def mapped(module, x, y):
    gate = wb.local_map(lambda a: a * torch.sigmoid(a), ("S(0)",), "S(0)")
    return F.mse_loss(gate(module(x)), y)


def penalized(module, x, y):
    loss = F.mse_loss(module(x), y)
    gradients = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    return loss + 0.1 * sum(gradient.square().sum() for gradient in gradients)


def detached(module, x, y):
    h = module(x)
    return (h - h.data.mean()).square().mean() + F.mse_loss(h, y)


class Codes(nn.Module):
    """Moving counts, as codebooks keep them, written through ``.data``; one of a single element."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("counts", torch.ones(3))
        self.register_buffer("total", torch.ones(1))

    def forward(self, x):
        h = self.layer(x)
        self.counts.data.mul_(0.9).add_(h.detach().sigmoid().mean(0), alpha=0.1)
        self.total.data.mul_(0.5)
        return h * self.counts + self.total


@pytest.mark.parametrize("strategy", ["*: data | 1x2x1", "*: data | 1x2x1 zero=3"])
def test_writes_through_data_to_what_was_there_before(strategy):
    def program(capture):
        module = wb.parallelize(filled(Codes()), strategy)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        means = [parameter.detach().clone() for parameter in module.parameters()]

        def step(x, y):
            loss = F.mse_loss(module(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for mean, parameter in zip(means, module.parameters(), strict=True):
                mean.data.lerp_(parameter.data, 0.2)
            return loss.detach()

        run = wb.capture(step) if capture else step
        losses = [run(x, y).full_tensor() for x, y in batches(5)]
        return [*losses, *(tensor.full_tensor() for tensor in (*module.state_dict().values(), *means))]

    assert_same(*(run_ranks(lambda capture=capture: program(capture)) for capture in (True, False)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("loss_of", [hooked, mapped, penalized, detached])
def test_values_that_change_their_class(loss_of):
    """Hooks, mapped functions and second gradients see tensors that no operator has made."""
    assert_captured_alike(["*: data | 1x2x1"], loss_of)


def test_values_that_change_their_class_and_are_gone():
    """Behind a sum over ranks what a hook gives is held by the graph alone."""
    assert_captured_alike(["*: model | 1x1x2"], hooked)


def test_a_norm_that_is_global():
    def clip(module):
        norm = torch.stack([parameter.grad.norm() for parameter in module.parameters()]).norm()
        torch.nn.utils.clip_grads_with_norm_(module.parameters(), 0.1, norm)

    assert_captured_alike(["*: data | 1x2x1"], squares, clip)


def test_state_of_plain_parameters_goes_on():
    """Beside parameters that are spread, an optimizer may have some that are not."""

    def program(capture):
        spread, own = wb.parallelize(perceptron(), "*: data | 1x2x1"), filled(nn.Linear(4, 4))
        optimizer = torch.optim.SGD([*spread.parameters(), *own.parameters()], lr=0.05, momentum=0.9)

        def step(x, y):
            optimizer.zero_grad()
            loss, others = F.mse_loss(spread(x), y), own(x).square().mean()
            loss.backward()
            others.backward()
            optimizer.step()
            return loss.detach()

        run = wb.capture(step) if capture else step
        losses = [run(x, y).full_tensor() for x, y in batches(6)]
        return [*losses, *(parameter.detach() for parameter in own.parameters())]

    assert_same(*(run_ranks(lambda capture=capture: program(capture)) for capture in (True, False)))


def from_python(x):
    """A running sum that begins with a number of Python, and a table of Python's numbers that is only read."""
    total = torch.tensor([0.0, 1.0])
    total[0] += x.sum()
    return total, x[[1, 0]] * torch.tensor([2.0, 3.0]).unsqueeze(0)[:, :1]


@pytest.mark.parametrize("options", [{}, {"memory_bytes": 1 << 30}])
def test_tensors_made_of_numbers_begin_anew_in_every_replay(options):
    def program():
        captured, x = wb.capture(from_python, **options), torch.arange(12.0).reshape(3, 4)
        for number in range(5):
            made, wanted = captured(x + number), from_python(x + number)
            assert all(map(torch.equal, made, wanted))
            made[0].zero_()  # it is the caller's
        assert captured.num_replays == 3
        return str(captured.traces[0])

    listing = run_ranks(program, 1)[0]
    assert listing.count("aten.clone") == 2  # the numbers of an index are only read
