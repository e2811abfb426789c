"""State of an optimizer whose parameters have changed their layouts, or have been replaced, without its knowledge."""

import pytest
import torch

import workbench as wb
from tests.training.strategies.test_reshard_state import one_step
from tests.training.training_runs import OPTIMIZERS, Setup
from workbench.errors import LayoutError
from workbench.testing import run_ranks

STAGED = "*: data; 6: data@1 | 2x1x1"
"""Some of the parameters, and so of their state, on each rank."""


@pytest.mark.parametrize(
    ("before", "after"), [(STAGED, "*: data | zero=3"), ("*: data", STAGED), ("*: model", "*: data")]
)
def test_stale_state_is_an_error_on_all_ranks(before, after):
    """Where shapes fit, one rank would go on with its state, and another begin anew."""
    setup = Setup("mlp", rate=0.0)
    models = [setup.model() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], before)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        one_step(model, optimizer, setup, 0)
        wb.parallelize(model, after)
        with pytest.raises(LayoutError, match=r"[68] of 8 parameters have other layouts .*optimizer=optimizer"):
            one_step(model, optimizer, setup, 1)
        optimizer = OPTIMIZERS["adamw"](model.parameters())  # what the message says
        return one_step(model, optimizer, setup, 1)

    first, second = run_ranks(program, 2)
    assert first == second


def test_an_optimizer_without_state_needs_not_be_told():
    setup = Setup("mlp", rate=0.0, num_steps=3)
    models = [setup.model() for _ in range(2)]

    def program(rank, texts):
        model = wb.parallelize(models[rank], texts[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return [one_step(wb.parallelize(model, text), optimizer, setup, step) for step, text in enumerate(texts)]

    found = run_ranks(lambda rank: program(rank, [STAGED, "*: data | zero=2", "*: model"]), 2)
    models = [setup.model()]
    (expected,) = run_ranks(lambda rank: program(rank, ["*: data"] * 3), 1)
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_an_optimizer_of_parameters_that_were_replaced_is_an_error(steps_before):
    """They get no gradients: its steps would train nothing, without a word."""
    setup = Setup("mlp", rate=0.0)
    models = [setup.model() for _ in range(2)]

    def program(rank):
        optimizer = OPTIMIZERS["adamw"](models[rank].parameters())
        for _ in range(steps_before):
            optimizer.step()
        model = wb.parallelize(models[rank], "*: data")
        with pytest.raises(LayoutError, match=r"8 of 8 parameters are those of a module before wb\.parallelize"):
            one_step(model, optimizer, setup, 0)

    run_ranks(program, 2)


def test_clipping_and_scaling_of_parameters_that_were_replaced_are_errors():
    """A list from before: their norm was 0, or that of gradients from before, and nothing was clipped."""
    setup = Setup("mlp", rate=0.0)
    models = [setup.model() for _ in range(2)]

    def program(rank):
        parameters, scaler = list(models[rank].parameters()), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        model = wb.parallelize(models[rank], "*: data")
        inputs, targets = setup.batch(0)
        scaler.scale(torch.nn.functional.cross_entropy(model(inputs), targets)).backward()
        said = r"8 of 8 parameters are those of a module before wb\.parallelize"
        with pytest.raises(LayoutError, match=rf"clip_grad_norm_: {said}.*module\.parameters\(\)"):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        with pytest.raises(LayoutError, match=rf"clip_grad_value_: {said}"):
            torch.nn.utils.clip_grad_value_(iter(parameters), 1.0)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        with pytest.raises(LayoutError, match=rf"GradScaler of SGD: {said}.*optimizer=optimizer"):
            scaler.step(optimizer)

    run_ranks(program, 2)
