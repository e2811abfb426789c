"""What people do with optimizers: schedules of the learning rate, groups added later, states saved and loaded."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from tests.training.models import batch_for, make
from workbench.errors import CaptureError, LayoutError
from workbench.testing import run_ranks
from workbench.training.gradients.optim import state_layout
from workbench.training.gradients.optimizer_kinds import is_elementwise

STRATEGIES = [
    "*: model",
    "*: data | zero=1",
    *(pytest.param(s, marks=pytest.mark.slow) for s in ("*: data", "*: data | zero=2", "*: data | zero=3")),
]


def step(model, optimizer, times=1):
    inputs, targets = batch_for("mlp")
    for _ in range(times):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.to(next(model.parameters()).dtype)), targets).backward()
        optimizer.step()


def weights_of(model):
    return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def with_a_schedule(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])
    for _ in range(5):
        step(model, optimizer)
        schedule.step()


def with_a_group_added_later(model):
    first, *others = model.children()
    optimizer = torch.optim.Adam(first.parameters(), lr=0.02)
    step(model, optimizer)
    optimizer.add_param_group({"params": [p for m in others for p in m.parameters()], "lr": 0.01})
    step(model, optimizer, times=2)


def with_a_state_saved_and_loaded(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, amsgrad=True)
    step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    optimizer.load_state_dict(saved)
    step(model, optimizer, times=2)


def with_inner_steps_that_have_a_history(model):
    inputs, targets = batch_for("mlp")
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    inner = torch.optim.SGD(weights.values(), lr=0.1, momentum=0.9, weight_decay=0.5, differentiable=True)

    def loss():
        read = {name: weight.clone() for name, weight in weights.items()}  # a step writes in place
        return F.cross_entropy(torch.func.functional_call(model, read, (inputs.double(),)), targets)

    for weight in weights.values():
        weight.retain_grad()
    for _ in range(2):
        for weight, grad in zip(weights.values(), torch.autograd.grad(loss(), [*weights.values()]), strict=True):
            weight.grad = grad
        inner.step()
    outer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss().backward()  # through both steps, whose weight decay shortens what comes back
    outer.step()


def assert_trained_as_on_one_device(train, strategy):
    models = [make("mlp").double() for _ in range(3)]
    train(models[2])

    def body(rank):
        model = wb.parallelize(models[rank], strategy)
        train(model)
        return weights_of(model)

    for found in run_ranks(body, 2):
        torch.testing.assert_close(found, weights_of(models[2]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "train",
    [
        with_a_schedule,
        with_a_group_added_later,
        with_a_state_saved_and_loaded,
        with_inner_steps_that_have_a_history,
    ],
)
def test_weights_are_those_of_one_device(train, strategy):
    assert_trained_as_on_one_device(train, strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_state_of_one_device_is_cut_where_it_is_loaded(strategy):
    models = [make("mlp").double() for _ in range(3)]
    optimizer = torch.optim.Adam(models[2].parameters(), lr=0.02)
    step(models[2], optimizer)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(models[2].state_dict())
    step(models[2], optimizer)
    for model in models[:2]:
        model.load_state_dict(weights)

    def body(rank):
        model = wb.parallelize(models[rank], strategy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
        optimizer.load_state_dict(copy.deepcopy(saved))
        step(model, optimizer)
        for parameter, state in optimizer.state.items():
            wanted = state_layout(parameter).local_shape(tuple(parameter.shape), rank)
            assert type(state["exp_avg"]) is torch.Tensor and tuple(state["exp_avg"].shape) == wanted
        return weights_of(model)

    torch.testing.assert_close(run_ranks(body, 2)[1], weights_of(models[2]), rtol=1e-9, atol=1e-9)


def test_a_step_that_raised_leaves_the_optimizer_usable():
    models = [make("mlp").double() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: data | zero=1")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step(model, optimizer)
        rate = optimizer.param_groups[0].pop("lr")
        with pytest.raises(KeyError, match="lr"):
            step(model, optimizer)
        optimizer.param_groups[0]["lr"] = rate
        step(model, optimizer)
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))
        return weights_of(model)

    first, second = run_ranks(program, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_state_of_another_layout_that_is_loaded_is_an_error():
    models = [make("mlp") for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: data | zero=1")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optimizer)
        wb.parallelize(model, "*: data")
        optimizer.load_state_dict(optimizer.state_dict())
        with pytest.raises(LayoutError, match=r"shape \(16, 16\) for a parameter of shape \(32, 16\).*optimizer="):
            step(model, optimizer)

    run_ranks(program, 2)


class Renamed(torch.optim.AdamW):
    """Inherits a step that works element by element."""


class Own(torch.optim.Adam):
    """Has a step of its own."""

    def step(self, closure=None):
        return super().step(closure)


def test_which_optimizers_work_element_by_element():
    parameters = [torch.nn.Parameter(torch.ones(2, 2))]
    kinds = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, Renamed]
    assert all(is_elementwise(kind(parameters, lr=0.1)) for kind in kinds)
    others = [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, Own]
    assert not any(is_elementwise(kind(parameters, lr=0.1)) for kind in others)
    own = Own(parameters)
    own.elementwise = True
    assert is_elementwise(own)


def train_past_errors(module):
    """Two of five steps raise in a hook of the user's, and are caught; the gradients of those steps are dropped."""
    optimizer, fails = torch.optim.AdamW(module.parameters(), lr=0.1), []

    def refuse(*_):
        if fails.pop():
            raise ZeroDivisionError

    optimizer.register_step_pre_hook(refuse)
    for number in range(5):
        optimizer.zero_grad()
        module(torch.linspace(-1, 1, 12).reshape(3, 4) * (number + 1)).square().mean().backward()
        fails.append(number % 2 == 1)
        with contextlib.suppress(ZeroDivisionError):
            optimizer.step()
    return module


@pytest.mark.parametrize("options", ["", "zero=1", "zero=3"])
def test_training_goes_on_after_a_step_that_raised(options):
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 6)
    expected = train_past_errors(copy.deepcopy(module))

    def program():
        mine = wb.parallelize(copy.deepcopy(module), f"*: data | 1x2x1 {options}")
        return [parameter.full_tensor().detach() for parameter in train_past_errors(mine).parameters()]

    for found in run_ranks(program):
        for one, other in zip(found, expected.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", ["", "zero=1", "zero=2", "zero=3"])
def test_hooks_behind_a_step_see_new_weights_whether_they_raise_or_not(options):
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 6)

    def train(module):
        """Weights in the hook, and after a step whose hook has raised."""
        optimizer, found = torch.optim.SGD(module.parameters(), lr=0.5), []

        def look(*_):
            found.extend(weights_of(module))
            raise ZeroDivisionError

        optimizer.register_step_post_hook(look)
        module(torch.linspace(-1, 1, 12).reshape(3, 4)).square().mean().backward()
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], module.parameters(), strict=True))
        return [weight.clone() for weight in (*found, *weights_of(module))]

    expected = train(copy.deepcopy(module))
    for found in run_ranks(lambda: train(wb.parallelize(copy.deepcopy(module), f"*: data | 1x2x1 {options}"))):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


class SignOfMomentum(torch.optim.SGD):
    """An optimizer of the user's own, which steps on global tensors."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            parameter.sub_(momentum.lerp_(parameter.grad, 0.1).sign(), alpha=0.01)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        (torch.optim.SGD, "*: data"),
        (torch.optim.AdamW, "*: model"),
        (torch.optim.AdamW, "*: data | zero=1"),
        (SignOfMomentum, "*: data"),
        (SignOfMomentum, "*: data | zero=3"),
    ],
)
def test_weights_that_are_not_contiguous_are_trained(kind, when, strategy):
    def train(model):
        images = torch.randn(3, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        optimizer = kind(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()

    def model_in(memory_format):
        torch.manual_seed(0)
        made = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 3)).double()
        made[2].weight = torch.nn.Parameter(made[2].weight.detach().T.contiguous().T)
        return made.to(memory_format=memory_format)

    one = model_in(torch.channels_last)
    train(one)
    models = [model_in(torch.channels_last if when == "before" else torch.contiguous_format) for _ in range(2)]

    def body(rank):
        model = wb.parallelize(models[rank], strategy).to(memory_format=torch.channels_last)
        train(model)
        return weights_of(model)

    for found in run_ranks(body, 2):
        torch.testing.assert_close(found, weights_of(one), rtol=1e-9, atol=1e-9)


class FreesGradients(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None


class DecaysAll(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.9)  # those without a gradient, too


class AssignsData(torch.optim.SGD):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad.data.sign()


@pytest.mark.parametrize("strategy", ["*: data", "*: data | zero=1", "*: data | zero=2"])
@pytest.mark.parametrize("kind", [FreesGradients, DecaysAll, AssignsData])
def test_an_own_optimizer_may_do_to_parameters_what_it_likes(kind, strategy):
    def train(model):
        parameters = list(model.parameters())
        if kind is DecaysAll:
            parameters[0].requires_grad_(False)
        step(model, kind(parameters, lr=0.1), times=2)

    assert_trained_as_on_one_device(train, strategy)


class AssignsProducts(torch.optim.SGD):
    """What it assigns is a sum of terms where parameters are split."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
                parameter.data = 0.9 * (parameter.grad.t() @ parameter.grad)
            else:
                parameter.data = parameter.data - 0.1 * parameter.grad * parameter.grad.sum()


@pytest.mark.parametrize("strategy", ["*: model", "*: data | zero=1", "*: data | zero=3"])
def test_a_parameter_keeps_its_layout_when_an_own_optimizer_assigns_its_data(strategy):
    def train(model):
        step(model, AssignsProducts(model.parameters(), lr=0.1), times=3)

    assert_trained_as_on_one_device(train, strategy)


class AssignsElements(torch.optim.SGD):
    elementwise = True

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.5 * parameter.grad


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("strategy", ["*: data", "*: data | zero=1"])
def test_what_changes_between_the_steps_of_an_optimizer_that_assigns_data_counts(strategy, captures):
    inputs, targets = batch_for("mlp")

    def train(model):
        optimizer = AssignsElements(model.parameters(), lr=0.1)

        def once():
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.double()), targets).backward()
            optimizer.step()

        run = wb.capture(once) if captures and isinstance(next(model.parameters()), wb.GlobalTensor) else once
        for _ in range(4):
            run()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.1, 0.1)

    assert_trained_as_on_one_device(train, strategy)


def test_a_captured_step_says_how_an_own_optimizer_is_declared_elementwise():
    class Declared(SignOfMomentum):
        elementwise = True

    models = [make("mlp").double() for _ in range(3)]

    def body(rank):
        model = wb.parallelize(models[rank], "*: data")
        with pytest.raises(CaptureError, match=r"SignOfMomentum\.step\(\).*elementwise = True in its class"):
            train(model, wb.capture(partial(step, model, SignOfMomentum(model.parameters(), lr=0.1))))
        train(model, wb.capture(partial(step, model, Declared(model.parameters(), lr=0.1))))

    def train(model, run):
        for _ in range(3):
            run()

    run_ranks(body, 2)
