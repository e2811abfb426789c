"""Optimizers whose step calls the steps of others: the numbers of one device."""

import pytest
import torch
import torch.nn.functional as F
from torch import optim

import workbench as wb
from tests.training.gradients.several_steps import Chain, Lookahead, TwoKinds, Unknown, WarmUp, Wrapper
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
from workbench.errors import CaptureError, CheckpointError, LayoutError
from workbench.testing import run_ranks


def sgd(model):
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def chain(model):
    parameters = list(model.parameters())
    matrices, others = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    return Chain(optim.SGD(matrices, lr=0.1, momentum=0.9), optim.AdamW(others, lr=0.01))


KINDS = {
    "chain of one": lambda model: Chain(sgd(model)),
    "chain of two": chain,
    "chain of a chain": lambda model: Chain(chain(model)),
    "warm-up, groups of its own": lambda model: WarmUp(model.parameters(), optim.SGD, lr=0.1),
    "warm-up of Adam": lambda model: WarmUp(model.parameters(), optim.Adam, lr=0.1),
    "lookahead": lambda model: Lookahead(sgd(model)),
    "lookahead of a chain": lambda model: Lookahead(chain(model)),
    "wrapper": lambda model: Wrapper(sgd(model)),
    "wrapper of a chain": lambda model: Wrapper(chain(model)),
    "two kinds": lambda model: TwoKinds(model.parameters()),
}


def train(model, make, step=None):
    optimizer = make(model)
    for _ in range(5):
        evaluate(model)
        (step or type(optimizer).step)(optimizer)
        optimizer.zero_grad()
    return optimizer


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", [*STRATEGIES, PIPELINE])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_within_steps_are_those_of_one_device(kind, strategy):
    assert_as_on_one_device(lambda model: train(model, KINDS[kind]) and None, strategy)


def with_a_schedule(model):
    """A scheduler of the outer one, which counts its steps, and a step that was looked up before it."""
    optimizer = KINDS["chain of two"](model)
    step = optimizer.step
    schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for number in range(4):
        evaluate(model)
        with torch.no_grad():
            (step if number % 2 else optimizer.step)()
        schedule.step()
        optimizer.zero_grad()


def with_a_scaler(model):
    optimizer, scaler = KINDS["chain of two"](model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(4):
        scaler.scale(F.mse_loss(model(X), Y)).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def with_an_error_within(model):
    """A step of the inner optimizer raises; the next one is its own, not the chain's."""
    inner = sgd(model)
    optimizer = Chain(inner)
    for number in range(4):
        evaluate(model)
        if number == 1:
            rate = optimizer.param_groups[0].pop("lr")
            with pytest.raises(KeyError, match="lr"):
                optimizer.step()
            optimizer.param_groups[0]["lr"] = rate
        (inner if number % 2 else optimizer).step()
        optimizer.zero_grad()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", [*STRATEGIES, PIPELINE])
@pytest.mark.parametrize("run", [with_a_schedule, with_a_scaler, with_an_error_within])
def test_what_people_do_with_them(run, strategy):
    assert_as_on_one_device(run, strategy)


def test_an_optimizer_that_is_not_known_to_step_another_says_so():
    models = [new_model() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: data | zero=1")
        inner = sgd(model)
        optimizer = Unknown(inner)
        evaluate(model)
        with pytest.raises(
            LayoutError, match=r"SGD\.step\(\): called by Unknown\.step\(\), which has 4 of its 4 .*attribute"
        ):
            optimizer.step()
        inner.step()
        return all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))

    assert run_ranks(program, 2) == [True, True]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("kind", ["chain of two", "warm-up of Adam", "two kinds", "wrapper", "wrapper of a chain"])
def test_the_state_of_the_inner_ones_moves_with_a_strategy(kind, is_plain):
    def run(model):
        optimizer = KINDS[kind](model)
        for strategy in (None, "*: model", "*: data | zero=1"):
            if isinstance(next(model.parameters()), wb.GlobalTensor) or (is_plain and models):
                wb.parallelize(model, strategy or "*: data", optimizer=optimizer)
            evaluate(model)
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    models = []
    expected = run(new_model())
    models += [new_model() for _ in range(2)]

    def program(rank):
        model = models[rank] if is_plain else wb.parallelize(models[rank], "*: data")
        return run(model)

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("strategy", [*STRATEGIES, PIPELINE])
def test_a_state_that_a_wrapper_shows_moves_once(strategy):
    def start(model):
        optimizer = Wrapper(optim.AdamW(model.parameters(), lr=0.1))
        F.mse_loss(model(X), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return optimizer

    def go_on(model, optimizer):
        evaluate(model)
        optimizer.step()
        return weights_of(model)

    one, *models = (new_model() for _ in range(3))
    expected = go_on(one, start(one))

    def program(rank):
        optimizer = start(models[rank])
        wb.parallelize(models[rank], strategy, optimizer=optimizer)
        wb.parallelize(models[rank], "*: model", optimizer=optimizer)
        return go_on(models[rank], optimizer)

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("strategy", [*STRATEGIES, PIPELINE])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_has_the_state_of_the_inner_ones(kind, strategy, tmp_path):
    def half(model, optimizer):
        for _ in range(2):
            evaluate(model)
            optimizer.step()
            model.zero_grad()

    def new_optimizer(model):
        optimizer = KINDS[kind](model)
        optimizer.count = 3  # an attribute of the warm-up and of lookahead, and not their state
        optimizer.k = 1
        return optimizer

    one = new_model()
    optimizer = new_optimizer(one)
    half(one, optimizer)
    optimizer.count = 3
    half(one, optimizer)
    expected = weights_of(one)
    models = [[new_model() for _ in range(2)] for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[0][rank], strategy)
        optimizer = new_optimizer(model)
        half(model, optimizer)
        wb.checkpoint.save(tmp_path / "ckpt", model=model, optimizer=optimizer)
        model = wb.parallelize(models[1][rank], "*: model")
        optimizer = new_optimizer(model)
        wb.checkpoint.load(tmp_path / "ckpt", model=model, optimizer=optimizer)
        half(model, optimizer)
        return weights_of(model)

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_a_checkpoint_without_the_inner_ones_is_of_another_optimizer(tmp_path):
    models = [new_model() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: data")
        optimizer = sgd(model)
        wb.checkpoint.save(tmp_path / "ckpt", model=model, optimizer=optimizer)
        with pytest.raises(CheckpointError, match=r"optimizer: 0 optimizers within it .*, 1 in the optimizer: SGD"):
            wb.checkpoint.load(tmp_path / "ckpt", model=model, optimizer=Chain(optimizer))
        wb.checkpoint.load(tmp_path / "ckpt", model=model, optimizer=Wrapper(optimizer))

    run_ranks(program, 2)


def test_a_captured_step_refuses_them():
    class Declared(TwoKinds):
        elementwise = True

    models = [new_model() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: data")
        optimizer = Declared(model.parameters())

        def step(inputs):
            model(inputs).square().mean().backward()
            optimizer.step()

        captured = wb.capture(step)
        captured(X)
        with pytest.raises(CaptureError, match=r"Declared has 1 other optimizers.*one after the other"):
            captured(X)

    run_ranks(program, 2)
