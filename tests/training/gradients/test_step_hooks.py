"""Hooks of users before an optimizer's step: they see the parameters and gradients of one device."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

import workbench as wb
from tests.training.gradients.test_several_steps import (
    PIPELINE,
    STRATEGIES,
    X,
    Y,
    assert_as_on_one_device,
    evaluate,
    new_model,
    weights_of,
)
from workbench.testing import run_ranks


def clip(optimizer, args, kwargs):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, 0.1)


def decay(optimizer, args, kwargs):
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.add_(p, alpha=0.1)


def center(optimizer, args, kwargs):
    """Gradient centralization, by rows (Yong et al., 2020)."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.dim() > 1:
                p.grad = p.grad - p.grad.mean(1, keepdim=True)


class OwnSGD(optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", [*STRATEGIES, PIPELINE])
@pytest.mark.parametrize("hook", [clip, decay, center])
@pytest.mark.parametrize("kind", [optim.AdamW, OwnSGD])
def test_a_hook_sees_what_it_sees_on_one_device(kind, hook, strategy):
    def train(model):
        optimizer = kind(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(hook)
        for _ in range(3):
            evaluate(model)
            optimizer.step()
            optimizer.zero_grad()

    assert_as_on_one_device(train, strategy)


@pytest.mark.parametrize("strategy", ["*: data | zero=1", "*: model"])
def test_hooks_of_all_optimizers_and_those_added_and_removed_between_steps(strategy):
    def train(model):
        optimizer, seen = optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []

        def look(stepping, args, kwargs):
            if stepping is optimizer:
                seen.append([tuple(p.shape) for group in stepping.param_groups for p in group["params"]])

        handles = [register_optimizer_step_pre_hook(look), optimizer.register_step_pre_hook(look)]
        for _ in range(3):
            evaluate(model)
            optimizer.step()
            optimizer.zero_grad()
            handles.append(optimizer.register_step_pre_hook(clip))
            handles.pop(-2 if len(handles) > 3 else 1).remove()
        for handle in handles:
            handle.remove()
        assert not optimizer._optimizer_step_pre_hooks
        return [list(map(list, shapes)) for shapes in seen]

    assert_as_on_one_device(train, strategy)


@pytest.mark.parametrize("strategy", ["*: data", "*: data | zero=1"])
def test_a_hook_runs_before_the_closure_and_may_replace_it(strategy):
    def train(model):
        optimizer, order = optim.SGD(model.parameters(), lr=0.1), []

        def closure():
            order.append(1)
            optimizer.zero_grad()
            loss = F.mse_loss(model(X), Y)
            loss.backward()
            return loss

        def replace(optimizer, args, kwargs):
            order.append(0)
            return (args[0], lambda: 2 * args[1]()), kwargs

        optimizer.register_step_pre_hook(replace)
        loss = optimizer.step(closure)
        return order, float(loss.detach())

    assert_as_on_one_device(train, strategy)


def test_a_hook_that_raises_leaves_the_parameters_in_their_places():
    models = [new_model() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: data | zero=1")
        optimizer = optim.SGD(model.parameters(), lr=0.1)

        def refuse(*_):
            raise ZeroDivisionError

        optimizer.register_step_pre_hook(refuse)
        before = weights_of(model)
        evaluate(model)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
        return all(torch.equal(a, b) for a, b in zip(before, weights_of(model), strict=True))

    assert run_ranks(program, 2) == [True, True]


@pytest.mark.parametrize("strategy", ["*: data | zero=1", "*: model"])
def test_a_hook_sees_the_parameters_after_a_step_that_raised(strategy):
    def train(model):
        optimizer, shapes = optim.SGD(model.parameters(), lr=0.1), []
        optimizer.register_step_pre_hook(
            lambda o, *_: shapes.append([list(p.shape) for p in o.param_groups[0]["params"]])
        )
        evaluate(model)
        rate = optimizer.param_groups[0].pop("lr")
        with pytest.raises(KeyError, match="lr"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        return shapes

    assert_as_on_one_device(train, strategy)
