"""A captured step is recorded anew when a number changes that it reads from an object that it gets or names."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import workbench as wb
from tests.training.capture.captured_runs import Trainer
from workbench.testing import run_ranks

TRAINER = Trainer(1)
STEPS = {
    "method": TRAINER.step,
    "decorated method": TRAINER.decorated,
    "object": TRAINER,
    "partial": partial(Trainer.step, TRAINER),
    "variable of the module": lambda x: x * TRAINER.factor(x),
    "variable around it": (lambda trainer: lambda x: x * trainer.factor(x))(TRAINER),
    "argument": Trainer.step,
}


@pytest.mark.parametrize("name", STEPS)
def test_numbers_of_objects_that_the_step_gets_or_names(name, monkeypatch):
    def program():
        captured, x = wb.capture(STEPS[name]), torch.arange(12.0).reshape(3, 4)
        given = (TRAINER, x) if name == "argument" else (x,)
        for of, attribute, value in ((TRAINER.cfg, "t", 2), (TRAINER, "scale", 3)):
            for _ in range(3):
                captured(*given)
            monkeypatch.setattr(of, attribute, value)
            assert torch.equal(captured(*given), TRAINER.step(x))
        assert (captured.num_recordings, captured.num_replays) == (2, 3)

    run_ranks(program, 1)


class Steering:
    """A hook that adds a vector to what a layer returns."""

    def __init__(self):
        self.strength, self.vector = 1.0, torch.arange(4.0)

    def __call__(self, module, args, output):
        return output + self.strength * self.vector

    def before(self, module, args):
        return (self(module, (), args[0]),)


HOOKS = {
    "object": lambda layer, steering: layer.register_forward_hook(steering),
    "method": lambda layer, steering: layer.register_forward_pre_hook(steering.before),
    "function": lambda layer, steering: layer.register_forward_hook(lambda *call: steering(*call)),
}


@pytest.mark.parametrize("name", HOOKS)
def test_numbers_of_objects_that_a_hook_gets_or_names(name):
    layer = nn.Linear(4, 4)

    def program():
        module, steering = wb.parallelize(nn.Sequential(copy.deepcopy(layer), nn.Tanh()), "*: data"), Steering()
        HOOKS[name](module[0], steering)
        captured, x = wb.capture(lambda x: module(x).detach()), torch.arange(12.0).reshape(3, 4)
        for attribute, value in (("strength", 2.0), ("vector", -steering.vector)):
            for _ in range(3):
                captured(x)
            setattr(steering, attribute, value)
            assert torch.equal(captured(x).full_tensor(), module(x).full_tensor())
        assert (captured.num_recordings, captured.num_replays) == (2, 3)

    run_ranks(program, 2)


class Damping:
    """Hooks that scale a gradient."""

    def __init__(self):
        self.factor = 0.5

    def of_gradient(self, gradient):
        return gradient * self.factor

    def of_parameter(self, parameter):
        parameter.grad.mul_(self.factor)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_numbers_of_objects_that_a_hook_of_a_parameter_gets(kind):
    layer = nn.Linear(4, 4)

    def program():
        module, damping = wb.parallelize(copy.deepcopy(layer), "*: data"), Damping()
        hook = damping.of_gradient if kind == "register_hook" else damping.of_parameter
        getattr(module.weight, kind)(hook)

        def step(x):
            module.weight.grad = None
            module(x).square().mean().backward()
            return module.weight.grad.detach()

        captured, x = wb.capture(step), torch.arange(12.0).reshape(3, 4)
        for _ in range(3):
            before = captured(x).full_tensor()
        damping.factor = 2.0
        torch.testing.assert_close(captured(x).full_tensor(), before * 4)

    run_ranks(program, 2)
