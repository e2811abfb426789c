"""Steps that call the step of their base class: torch has hooks around both, if the base had an instance."""

import copy

import pytest
import torch

import workbench as wb
from tests.processes import run_processes
from workbench.testing import run_ranks


def halved(base_was_used):
    """A kind of optimizer that changes gradients before the step of its base class, and weights after it."""

    class Base(torch.optim.Optimizer):
        elementwise, fails = True, False

        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            if self.fails:
                self.fails = False
                raise ZeroDivisionError
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(parameter.grad, alpha=-group["lr"])

    class Halved(Base):
        @torch.no_grad()
        def step(self, closure=None):
            parameters = [p for group in self.param_groups for p in group["params"]]
            for parameter in parameters:
                parameter.grad.mul_(0.5)
            try:
                super().step()
            except ZeroDivisionError:
                super().step()
            for parameter in parameters:
                parameter.mul_(0.9)

    if base_was_used:
        Base([torch.zeros(1)])
    return Halved


def train(module, optimizer, num_steps=3, fails=False):
    """The weights, and how many exchanges each optimizer's step made."""
    counts = []
    for number in range(num_steps):
        optimizer.zero_grad()
        module(torch.linspace(-1, 1, 12).reshape(3, 4) * (number + 1)).square().mean().backward()
        optimizer.fails = fails and number == 1
        before = _num_exchanges(module)
        optimizer.step()
        counts.append(_num_exchanges(module) - before)
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], module.parameters(), strict=True))
    return [
        p.full_tensor().detach() if isinstance(p, wb.GlobalTensor) else p.detach() for p in module.parameters()
    ], counts


def _num_exchanges(module):
    weight = next(module.parameters())
    return weight._spec.world.traffic.num_exchanges if isinstance(weight, wb.GlobalTensor) else 0


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("options", ["", "zero=1", "zero=3"])
def test_a_step_is_one_step_whether_its_base_class_had_an_instance_or_not(options, fails):
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 6)
    alone = copy.deepcopy(module)
    expected, _ = train(alone, halved(False)(alone.parameters()), fails=fails)
    counts = {}
    for base_was_used in (False, True):
        kind = halved(base_was_used)

        def program(kind=kind):
            mine = wb.parallelize(copy.deepcopy(module), f"*: data | 1x2x1 {options}")
            return train(mine, kind(mine.parameters()), fails=fails)

        for weights, counts[base_was_used] in run_ranks(program):
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
    assert counts[True] == counts[False]
    assert any(counts[True]) or options == "zero=3"  # which sums in every backward


def test_a_captured_step_is_one_step_as_well():
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 6)
    inputs = torch.linspace(-1, 1, 12).reshape(3, 4)
    kind = halved(base_was_used=True)

    def weights(capture):
        mine = wb.parallelize(copy.deepcopy(module), "*: data | 1x2x1")
        optimizer = kind(mine.parameters())

        def step(inputs):
            optimizer.zero_grad()
            mine(inputs).square().mean().backward()
            optimizer.step()

        called = capture(step)
        for number in range(4):
            called(inputs * (number + 1))
        assert len(optimizer.__dict__["_workbench_swap"].parameters) == 2  # no replay looks like a step on plain ones
        return [p.full_tensor().detach() for p in mine.parameters()]

    for captured, plain in run_ranks(lambda: (weights(wb.capture), weights(lambda step: step))):
        torch.testing.assert_close(captured, plain, rtol=1e-6, atol=1e-7)


def on_a_rank_that_has_used_more():
    """As in a session after a rank was replaced: only its new process has had no instance of the base class."""
    torch.manual_seed(0)
    mine = wb.parallelize(torch.nn.Linear(4, 6), "*: data")
    return train(mine, halved(base_was_used=wb.rank() == 0)(mine.parameters()))


@pytest.mark.procs
def test_ranks_step_together_though_only_one_had_an_instance_of_the_base_class():
    (weights, counts), (others, others_counts) = run_processes(on_a_rank_that_has_used_more, 2)
    assert counts == others_counts
    for one, other in zip(weights, others, strict=True):
        assert torch.equal(one, other)
