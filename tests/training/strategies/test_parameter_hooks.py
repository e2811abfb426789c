"""Hooks, attributes and gradients that parameters have when ``wb.parallelize`` makes them global, or moves them."""

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.tensors.dispatch import hooks
from workbench.testing import assert_equal_to_one_device, run_ranks

STRATEGIES = ["*: data", "*: model", "emb: data; fc: data@1", "*: data | 1x2x1 zero=1"]


class Frozen(nn.Module):
    """An embedding with frozen rows, and a bias that is not to decay."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.fc = nn.Linear(4, 4)
        mask = torch.tensor([0.0, 0, 0, 1, 1, 1])[:, None]
        self.handle = self.emb.weight.register_hook(lambda grad: grad * mask)
        self.fc.weight.register_hook(lambda grad: grad / grad.norm())
        self.fc.bias._no_weight_decay = True
        self.register_buffer("scale", torch.ones(4))
        self.scale.kept = "as it is"

    def forward(self, ids):
        return self.fc(self.emb(ids)) * self.scale


def built(num_ranks):
    """Models with equal weights, each with its own hooks: a copy of a model has none."""
    state = Frozen().state_dict()
    models = [Frozen() for _ in range(num_ranks)]
    for model in models:
        model.load_state_dict(state)
    return models


IDS = torch.tensor([0, 1, 3, 5])


def one_backward(model):
    model.zero_grad()
    model(IDS).square().sum().backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_and_attributes_stay(strategy):
    plain, *models = built(3)
    one_backward(plain)

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        assert model.fc.bias._no_weight_decay and model.scale.kept == "as it is"
        assert not hasattr(model.fc.weight, "_no_weight_decay")
        one_backward(model)
        for name, parameter in plain.named_parameters():
            assert_equal_to_one_device(model.get_parameter(name).grad, parameter.grad)
        model.handle.remove()
        one_backward(model)
        row = model.emb.weight.grad[0]
        assert row.abs().sum().item() > 0

    run_ranks(program, 2)


def test_a_hook_sees_the_layout_of_the_strategy_that_holds_when_it_is_called():
    plain, *models = built(3)
    one_backward(plain)

    def program(rank):
        model, seen = wb.parallelize(models[rank], "*: data"), []
        model.fc.bias.register_hook(lambda grad: seen.append((tuple(grad.shape), grad.layout_on_ranks)))
        for strategy in ("*: model", "emb: data; fc: data@1", "*: data"):
            wb.parallelize(model, strategy)
            one_backward(model)
            shape, layout = seen.pop()
            assert shape == (4,) and layout == model.fc.bias.layout_on_ranks.dual()
            for name, parameter in plain.named_parameters():
                assert_equal_to_one_device(model.get_parameter(name).grad, parameter.grad)

    run_ranks(program, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("change", [lambda h: h.unsqueeze_(0), lambda h: h.transpose_(0, 1)])
def test_a_hook_sees_the_gradient_from_before_a_change_of_shape_in_place(change, strategy):
    plain, *models = built(3)

    def seen(model):
        gradients = []
        h = model(IDS) * 2
        h.register_hook(lambda grad: gradients.append(grad))
        change(h)
        (h * torch.linspace(0, 1, 16).view(h.shape)).sum().backward()
        return gradients.pop()

    expected = seen(plain)

    def program(rank):
        assert_equal_to_one_device(seen(wb.parallelize(models[rank], strategy)), expected)

    run_ranks(program, 2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_after_accumulation_stay(strategy):
    """A step in the backward: the hook gets the parameter that the module has now."""
    plain, *models = built(3)

    def step(parameter):
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for model in (plain, *models):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        one_backward(plain)

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        for _ in range(2):
            one_backward(model)
        for name, parameter in plain.named_parameters():
            assert_equal_to_one_device(model.get_parameter(name), parameter)
            assert model.get_parameter(name).grad is None

    run_ranks(program, 2)


@pytest.mark.parametrize("strategy", [*STRATEGIES, "*: data | 1x2x1 zero=3"])
def test_gradients_from_before_are_added_to(strategy):
    state = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).state_dict()
    strategy = strategy.replace("emb", "0").replace("fc", "1")

    def accumulated(model, strategy=None):
        inputs = torch.arange(8.0).view(2, 4)
        model.load_state_dict(state)
        model(inputs).square().mean().backward()
        if strategy is not None:
            wb.parallelize(model, strategy)
        model(inputs.flip(0)).square().mean().backward()
        return model

    expected = accumulated(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))

    def program():
        model = accumulated(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}

    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    for found in run_ranks(program, 2):
        for name, parameter in expected.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach())


def test_a_frozen_parameter_keeps_its_hooks_until_it_learns():
    models = built(2)

    def program(rank):
        weight = models[rank].fc.weight.requires_grad_(False)
        model = wb.parallelize(models[rank], "*: model")
        one_backward(model)
        assert model.fc.weight.grad is None and type(weight.data) is torch.Tensor
        model.fc.weight.requires_grad_()
        one_backward(model)
        assert model.fc.weight.grad.norm().item() == pytest.approx(1.0)

    run_ranks(program, 2)


def test_a_backward_that_raises_keeps_no_hooks():
    (model,) = built(1)

    def program():
        seen = []
        parallel = wb.parallelize(model, "*: data")
        parallel.fc.weight.register_post_accumulate_grad_hook(seen.append)

        def fail(grad):
            raise FloatingPointError("a batch to skip")

        handle = parallel.emb.weight.register_hook(fail)
        with pytest.raises(FloatingPointError):
            one_backward(parallel)
        assert not seen and not hooks._waiting
        handle.remove()
        one_backward(parallel)
        assert len(seen) == 1 and not hooks._waiting

    run_ranks(program, 1)


@pytest.mark.parametrize("strategy", ["*: data | zero=1", "*: data | zero=2", "*: data | zero=3"])
def test_hooks_after_accumulation_that_were_there_before_see_gradients_before_they_are_sent(strategy):
    """Under ZeRO 2 the exchange of a gradient had begun when the hook changed it."""

    def trained(model, parallelize):
        def halve(parameter):
            parameter.grad.mul_(0.5)

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
        parallelize(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.arange(12.0).reshape(4, 3)).square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    models = [nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    expected = trained(models[2], lambda model: None)

    def program(rank):
        for found, right in zip(trained(models[rank], lambda m: wb.parallelize(m, strategy)), expected, strict=True):
            assert_equal_to_one_device(found, right)

    run_ranks(program)
