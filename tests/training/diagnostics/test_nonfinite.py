"""The first nan or infinity is found with its layer and rank; a step without any says nothing."""

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.errors import NonFiniteError
from workbench.testing import run_ranks


class ByName(nn.Module):
    """It calls its layer by keyword, as models of transformers do."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(input=x)


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 2))


MODEL = model()
INPUTS = torch.ones(4, 4)


def on_two(change=lambda parallel: None, inputs=INPUTS, step=lambda out: out.sum().backward()):
    """The error of every rank after one step of the model under data parallelism."""

    def program():
        import copy

        parallel = copy.deepcopy(MODEL)
        with torch.no_grad():
            parallel[0].weight.fill_(0.5), parallel[0].bias.fill_(1.0)
            change(parallel)
        parallel = wb.parallelize(parallel, "*: data")
        x = wb.to_global(inputs, wb.placement("cpu", ranks=[0, 1]), wb.sbp.broadcast).to_global(sbp="S(0)")
        try:
            with wb.debug.find_nonfinite(parallel):
                step(parallel(x))
        except NonFiniteError as error:
            return str(error)

    errors = run_ranks(program, 2)
    assert errors[0] == errors[1]
    return errors[0]


def test_a_clean_step_says_nothing():
    assert on_two() is None


def test_the_layer_and_the_rank_where_it_came_to_be():
    negative = INPUTS.clone()
    negative[3] = -10  # the last row lies on rank 1
    error = on_two(inputs=negative)
    assert "rank 1: the result of 1: 4 nan among 8 values of its shard; what came in was finite" in error
    assert "rank 0: the gradient" in error or "then rank 0" not in error


@pytest.mark.parametrize("by_name", [False, True])
def test_what_came_in_is_said_to_have_come_in(by_name):
    infinite = INPUTS.clone()
    infinite[0, 0] = float("inf")
    change = (lambda parallel: parallel.__setitem__(0, ByName(parallel[0]))) if by_name else (lambda parallel: None)
    error = on_two(change, inputs=infinite)
    assert f"rank 0: the result of 0{'.layer' * by_name}: 4 inf among 8 values" in error
    assert "what came in was so already" in error


def test_a_gradient():
    zero = INPUTS.clone()
    zero[0] = -0.5  # 0.5 * 4 * -0.5 + 1 = 0, whose root has no slope
    error = on_two(inputs=zero)
    assert (
        "rank 0: the gradient of the result of 0: 4 inf among 8 values of its shard; it came from what follows" in error
    )


def test_a_parameter():
    def spoil(parallel):
        parallel[2].weight[0, 0] = float("nan")

    error = on_two(spoil)
    assert "parameter 'weight' of 2: 1 nan among 8 values of its shard\n" in error + "\n"


def test_an_error_of_the_step_says_what_was_found():
    def step(out):
        assert out.isfinite().all(), "not finite"

    with pytest.raises(AssertionError) as caught:
        on_two(inputs=INPUTS * -10, step=step)
    assert "is on rank" in caught.value.__notes__[0] and "the result of 1: 8 nan" in caught.value.__notes__[0]


def test_hooks_are_gone_afterwards():
    def program():
        layers = model()
        with pytest.raises(NonFiniteError), wb.debug.find_nonfinite(layers):
            layers(torch.full((1, 4), float("nan")))
        return [len(layer._forward_hooks) for layer in layers.modules()]

    assert run_ranks(program, 2) == [[0, 0, 0, 0]] * 2


class Prompt(nn.Module):
    """Its result is its parameter, which outlives the step."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self):
        return self.weight


def test_a_parameter_that_a_layer_returns_keeps_no_hook():
    def program():
        prompt = wb.parallelize(Prompt(), "*: data")
        with wb.debug.find_nonfinite(prompt):
            prompt().sum().backward()
        return len(prompt.weight._backward_hooks)

    assert run_ranks(program, 2) == [0, 0]
