"""A newcomer's script with a mistake in it: every rank raises, and the error says what is wrong."""

import copy
import functools
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.errors import RunError
from workbench.testing import run_ranks

ROWS = 7
Pair = namedtuple("Pair", "features label")


def perceptron():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 8, generator=generator), torch.arange(ROWS) % 4


def vector(output, targets):
    return F.cross_entropy(output, targets, reduction="none")


def turned(output, targets):
    return F.cross_entropy(output.T, targets)


def half(output, targets):
    return F.cross_entropy(output, targets[: len(targets) // 2])


MISTAKES = {
    "a vector": (vector, RunError, r"loss_fn returned a tensor of shape \(\d,\) with 1 dims, but a loss has 0"),
    "turned scores": (turned, ValueError, r"input batch_size \(4\) to match target batch_size \(\d\)"),
    "targets of other samples": (half, ValueError, r"input batch_size \(\d\) to match target batch_size \(\d\)"),
    "a class of losses": (nn.CrossEntropyLoss, RunError, r"is the class CrossEntropyLoss.*Give an instance: Cross"),
}


@pytest.mark.parametrize("strategy", ["data", "model", "pipeline | mb=2"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_loss_is_refused_under_every_strategy(name, strategy):
    loss_fn, kind, message = MISTAKES[name]
    one, errors = perceptron(), []
    models = [perceptron() for _ in range(2)]
    for model in models:
        model.load_state_dict(one.state_dict())

    def program(rank):
        try:
            wb.forward_backward(wb.parallelize(models[rank], strategy), loss_fn, *batch())
        except Exception as error:
            errors.append(error)
            raise

    with pytest.raises(kind, match=message):
        run_ranks(program, 2)
    assert len(errors) == 2


def as_pair(samples):
    return Pair(*map(torch.stack, zip(*samples, strict=True)))


@pytest.mark.parametrize("collate_fn", [None, as_pair])
def test_samples_and_batches_of_a_loader_may_be_named_tuples(collate_fn):
    def program():
        loader = wb.GlobalDataLoader(list(map(Pair, *batch())), 3, collate_fn=collate_fn)
        return [[part.full_tensor() for part in found] for found in loader]

    for found in run_ranks(program, 2):
        features, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
        assert torch.equal(features, batch()[0]) and torch.equal(labels, batch()[1])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_loss_may_read_the_parameters_of_all_stages(schedule):
    """Whether it is a mean is tried without an exchange: simulated ranks have one generator, and try in turn."""
    torch.manual_seed(0)
    one, (inputs, targets) = perceptron(), batch()
    models = [copy.deepcopy(one) for _ in range(2)]

    def decayed(model, output, targets):
        return F.cross_entropy(output, targets) + 0.1 * sum(p.square().sum() for p in model.parameters())

    def program(rank):
        model = wb.parallelize(models[rank], f"0: data; 2: data@1 | 2x1x1 mb=3 {schedule}")
        wb.forward_backward(model, functools.partial(decayed, model), inputs, targets)
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    decayed(one, one(inputs), targets).backward()
    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, [parameter.grad for parameter in one.parameters()])


class Scorer(nn.Linear):
    """Computes its own loss: a mean, or a sum over a number that it is given, as models of transformers do."""

    def forward(self, x, labels, num_items_in_batch=None):
        total = F.cross_entropy(super().forward(x), labels, reduction="sum")
        return {"loss": total / (len(labels) if num_items_in_batch is None else num_items_in_batch)}


@pytest.mark.parametrize("number", [ROWS, torch.tensor(ROWS)])
def test_a_loss_that_is_divided_by_the_words_of_the_batch_is_refused_under_micro_batches(number):
    one, (inputs, labels) = Scorer(8, 4), batch()
    models = [copy.deepcopy(one) for _ in range(2)]
    given = {"x": inputs, "labels": labels, "num_items_in_batch": number}

    def program(rank):
        model = wb.parallelize(models[rank], "data")
        whole = wb.forward_backward(model, inputs=given).item()
        wb.parallelize(model, "data | mb=3")
        for call in (lambda: wb.forward_backward(model, inputs=given), lambda: wb.evaluate(model, given)):
            with pytest.raises(RunError, match=r"the mean of 3 micro-batches would be about 3 times too small.*count="):
                call()
        return whole, wb.forward_backward(model, inputs={**given, "num_items_in_batch": None}).item()

    expected = one(inputs, labels)["loss"].item()
    for found in run_ranks(program, 2):
        assert found == pytest.approx((expected, expected))
