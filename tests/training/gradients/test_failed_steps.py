"""What people do after a step that raised: load a checkpoint, save one, change the strategy, go on."""

import copy

import pytest
import torch
from torch import optim

import workbench as wb
from tests.training.gradients.several_steps import Wrapper
from tests.training.gradients.test_several_steps import PIPELINE, STRATEGIES, evaluate, new_model, weights_of
from workbench.errors import LayoutError
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.gradients.stale_optimizer import optimizers_of


def fail(model, optimizer):
    """A step that raises when it has changed nothing yet, but has exchanged places."""
    evaluate(model)
    rate = optimizer.param_groups[0].pop("lr")
    with pytest.raises(KeyError, match="lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = rate


def train(model, optimizer):
    optimizer.zero_grad()
    evaluate(model)
    optimizer.step()


def new_optimizer(model):
    return optim.AdamW(model.parameters(), lr=0.1)


def on_one_device(num_steps):
    model = new_model()
    optimizer = new_optimizer(model)
    for _ in range(num_steps):
        train(model, optimizer)
    return weights_of(model)


@pytest.mark.parametrize("next_call", ["zero_grad", "step", "step of another"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_that_were_loaded_after_it_stay(strategy, next_call, tmp_path):
    models = [new_model() for _ in range(2)]
    kept = weights_of(models[0])

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        wb.checkpoint.save(tmp_path / "start", model=model)
        optimizer, other = new_optimizer(model), optim.SGD(model.parameters(), lr=0.0)
        train(model, optimizer)
        fail(model, optimizer)
        wb.checkpoint.load(tmp_path / "start", model=model)
        if next_call == "zero_grad":
            optimizer.zero_grad()
        elif next_call == "step":
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.step()
        else:
            other.step()
        return weights_of(model)

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, kept, rtol=0, atol=0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("wraps", [lambda optimizer: optimizer, Wrapper])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_optimizer_is_loaded_saved_and_moved_after_it(strategy, wraps, tmp_path):
    expected = on_one_device(3)
    models = [new_model() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        optimizer = wraps(new_optimizer(model))
        train(model, optimizer)
        wb.checkpoint.save(tmp_path / "first", model=model, optimizer=optimizer)
        train(model, optimizer)
        fail(model, optimizer)
        wb.checkpoint.load(tmp_path / "first", model=model, optimizer=optimizer)
        train(model, optimizer)
        fail(model, optimizer)
        wb.checkpoint.save(tmp_path / "second", model=model, optimizer=optimizer)
        fail(model, optimizer)
        wb.parallelize(model, "*: model", optimizer=optimizer)
        fail(model, optimizer)
        assert optimizers_of(model, current()) == [getattr(optimizer, "inner", optimizer)]
        fail(model, optimizer)
        wb.checkpoint.load(tmp_path / "second", model=model, optimizer=optimizer)
        train(model, optimizer)
        return weights_of(model)

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def kinds_of(state):
    entries = [(number, name, value) for number, own in state["state"].items() for name, value in own.items()]
    return [(number, name, type(value), value.shape) for number, name, value in entries]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["*: data", "*: data | zero=3", "*: model", PIPELINE])
def test_dicts_of_state_are_those_of_the_parameters_after_it(strategy):
    """As in a program that saves a checkpoint of its own in ``except``."""
    expected = on_one_device(2)
    models = [new_model() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        optimizer = new_optimizer(model)
        train(model, optimizer)
        kinds = kinds_of(optimizer.state_dict())
        fail(model, optimizer)
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        assert kinds_of(state) == kinds
        train(model, optimizer)
        fail(model, optimizer)
        optimizer.load_state_dict(state)
        model.load_state_dict(weights)
        train(model, optimizer)
        return weights_of(model)

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_a_dict_of_shards_asks_all_ranks_to_end_the_step():
    models = [new_model() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: data | zero=1")
        optimizer = new_optimizer(model)
        train(model, optimizer)
        kinds = kinds_of(optimizer.state_dict())
        fail(model, optimizer)
        if rank == 0:
            with pytest.raises(LayoutError, match=r"AdamW.state_dict.*zero=1 and zero=2.*zero_grad\(\) on every rank"):
                optimizer.state_dict()
        optimizer.zero_grad()
        assert kinds_of(optimizer.state_dict()) == kinds

    run_ranks(program, 2)
