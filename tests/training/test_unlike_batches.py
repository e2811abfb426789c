"""A user's own loop whose ranks hold different batches: the numbers are one device's, or every rank raises."""

import copy
import functools
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import workbench as wb
from workbench.errors import LayoutError, RunError
from workbench.tensors.agreement import fingerprint
from workbench.testing import run_ranks

SAMPLES = torch.randn(18, 8, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(18) % 3
MODEL = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
STRATEGIES = {"*: data": 2, "*: data | zero=3": 2, "*: model": 2, "*: model | 1x2x2": 4, "pipeline | mb=2": 2}
ROWS = {2: [slice(0, 5), slice(5, 9)], 4: [slice(0, 3), slice(3, 5), slice(5, 8), slice(8, 9)]}


def expected_gradients(start=0, stop=9):
    model = copy.deepcopy(MODEL)
    F.cross_entropy(model(SAMPLES[start:stop]), CLASSES[start:stop]).backward()
    return [parameter.grad for parameter in model.parameters()]


def gradients(model):
    return [parameter.grad.full_tensor().detach().clone() for parameter in model.parameters()]


def every_rank_raises(program, num_ranks, kind):
    """The errors of all ranks; each must be of ``kind``."""

    def run():
        with pytest.raises(kind) as caught:
            program(copy.deepcopy(MODEL))
        return str(caught.value)

    return run_ranks(run, num_ranks)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("parts", ["uneven", "even"])
def test_a_part_of_the_batch_on_each_rank_is_refused_at_the_first_call(strategy, parts):
    num_ranks = STRATEGIES[strategy]

    def program(model):
        rank = wb.rank()
        rows = ROWS[num_ranks][rank] if parts == "uneven" else slice(2 * rank, 2 * rank + 2)
        wb.forward_backward(wb.parallelize(model, strategy), F.cross_entropy, SAMPLES[rows], CLASSES[rows])

    for error in every_rank_raises(program, num_ranks, LayoutError):
        assert re.search(r"forward_backward: the ranks pass different batches\. inputs is float32 \(\d, 8\) ", error)
        assert "GlobalDataLoader" in error and 'sbp="S(0)"' in error


@pytest.mark.parametrize("is_training", [True, False])
def test_the_module_called_by_itself_refuses_parts_too(is_training):
    def program(model):
        with torch.set_grad_enabled(is_training):
            wb.parallelize(model, "*: data")(SAMPLES[ROWS[2][wb.rank()]])

    for error in every_rank_raises(program, 2, LayoutError):
        assert error.startswith("Sequential: the ranks pass different batches. argument 1 is float32 (5, 8) ")
        assert "on rank 0 and float32 (4, 8)" in error


@pytest.mark.parametrize("evaluate", [wb.evaluate, lambda model, inputs: model.eval()(inputs)])
def test_an_evaluation_after_training_refuses_parts_too(evaluate):
    """The batches of training were alike. A call without gradients has no sums that show what differs."""

    def program(model, has_gradients):
        model = wb.parallelize(model, "*: data")
        F.cross_entropy(model(SAMPLES[:6]), CLASSES[:6]).backward()
        with torch.set_grad_enabled(has_gradients):
            for rows in (slice(0, 6), slice(6, 12), ROWS[2][wb.rank()]):
                evaluate(model, SAMPLES[rows])

    def part(model):
        model = wb.parallelize(model, "*: data")
        F.cross_entropy(model(SAMPLES[:6]), CLASSES[:6]).backward()
        with torch.no_grad():
            evaluate(model, SAMPLES[6 * wb.rank() :][:6])

    for each in (functools.partial(program, has_gradients=True), functools.partial(program, has_gradients=False), part):
        for error in every_rank_raises(each, 2, LayoutError):
            assert "the ranks pass different batches" in error and "GlobalDataLoader" in error


def test_targets_and_the_number_of_inputs_are_compared():
    def other_targets(model):
        targets = CLASSES[:8] + wb.rank()
        wb.forward_backward(wb.parallelize(model, "*: data"), F.cross_entropy, SAMPLES[:8], targets)

    def one_more(model):
        model = wb.parallelize(model, "*: data")
        wb.forward_backward(model, None, (SAMPLES, CLASSES) if wb.rank() else (SAMPLES,))

    assert "targets is int64 (8,)" in every_rank_raises(other_targets, 2, LayoutError)[0]
    assert "is nothing on rank 0" in every_rank_raises(one_more, 2, LayoutError)[0]


def test_a_sampler_per_rank_is_refused_and_right_where_the_parts_are_joined():
    """Of 9 samples the ranks have 5 and 4; each rank's loader has batches of 3 and 2, then of 3 and 1."""

    class Rest(DistributedSampler):
        def __iter__(self):
            return iter(range(9)[ROWS[2][self.rank]])

    def loader(rank):
        dataset = TensorDataset(SAMPLES, CLASSES)
        return DataLoader(dataset, batch_size=3, sampler=Rest(dataset, num_replicas=2, rank=rank))

    def of_parts(model):
        model = wb.parallelize(model, "*: data")
        for inputs, targets in loader(wb.rank()):
            F.cross_entropy(model(inputs), targets).backward()

    def joined():
        model = wb.parallelize(copy.deepcopy(MODEL), "*: data")
        ranks, found = wb.placement("cpu", ranks=[0, 1]), []
        for batch in loader(wb.rank()):
            inputs, targets = (wb.to_global(part, placement=ranks, sbp="S(0)") for part in batch)
            model.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            found.append(gradients(model))
        return found

    every_rank_raises(of_parts, 2, LayoutError)
    for found in run_ranks(joined, 2):
        for rows, own in zip(([0, 1, 2, 5, 6, 7], [3, 4, 8]), found, strict=True):
            model = copy.deepcopy(MODEL)
            F.cross_entropy(model(SAMPLES[rows]), CLASSES[rows]).backward()
            for parameter, gradient in zip(model.parameters(), own, strict=True):
                torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize("strategy", ["*: data", "*: data | zero=3", "*: model", "pipeline | mb=2"])
def test_uneven_parts_joined_to_a_global_batch_give_one_devices_gradients(strategy):
    def program():
        model = wb.parallelize(copy.deepcopy(MODEL), strategy)
        ranks, rows = wb.placement("cpu", ranks=[0, 1]), ROWS[2][wb.rank()]
        inputs, targets = (wb.to_global(x[rows], placement=ranks, sbp="S(0)") for x in (SAMPLES, CLASSES))
        wb.forward_backward(model, F.cross_entropy, inputs, targets)
        return gradients(model)

    for found in run_ranks(program, 2):
        for own, expected in zip(found, expected_gradients(), strict=True):
            torch.testing.assert_close(own, expected)


def test_targets_of_a_part_do_not_fit_a_joined_batch():
    def program(model):
        model, rows = wb.parallelize(model, "*: data"), ROWS[2][wb.rank()]
        inputs = wb.to_global(SAMPLES[rows], placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")
        F.cross_entropy(model(inputs), CLASSES[rows])

    assert "batch_size (9) to match target batch_size" in every_rank_raises(program, 2, ValueError)[0]


def test_a_fingerprint_shows_other_values_and_shapes():
    image = torch.zeros(64, 1, 8, 8)
    other = image.clone()
    other[:, :, 4, 4] = 1.0
    assert fingerprint([image]) != fingerprint([other]) != fingerprint([other[:63]])
    assert fingerprint([other]) == fingerprint([other.clone()])
    assert fingerprint([image.to(memory_format=torch.channels_last)]) == fingerprint([image])
    assert fingerprint([image[:, :, ::2]]) == "(64, 1, 4, 8)" and fingerprint([3, None, torch.ones(2).to("meta")]) == ""


# ---- sums as losses ------------------------------------------------------------------------------------------------


def summed(output, targets):
    return F.cross_entropy(output, targets, reduction="sum")


def summed_words(output, targets):
    return F.nll_loss(output.log_softmax(-1).flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("strategy", ["*: data | 1x2x1 mb=3", "*: model | 1x1x2 mb=2", "pipeline | mb=2"])
@pytest.mark.parametrize("loss_fn", [summed, nn.CrossEntropyLoss(reduction="sum")])
def test_a_sum_as_loss_is_refused_under_micro_batches(strategy, loss_fn):
    def program(model):
        wb.forward_backward(wb.parallelize(model, strategy), loss_fn, SAMPLES, CLASSES)

    for error in every_rank_raises(program, 2, RunError):
        assert error.startswith("forward_backward: loss_fn gives ") and "no mean over the samples" in error
        assert re.search(r"micro-batch; this one has [23]\.$", error)


def test_sums_of_words_of_squares_and_of_probabilities_are_refused():
    words = nn.Sequential(nn.Linear(8, 4))
    cases = {
        summed_words: (torch.ones(4, 5, 8), torch.ones(4, 5, dtype=torch.long)),
        nn.MSELoss(reduction="sum"): (torch.ones(4, 8), torch.ones(4, 4)),
        lambda output, targets: F.binary_cross_entropy(output.sigmoid(), targets, reduction="sum"): (
            torch.ones(4, 8), torch.ones(4, 4),
        ),
        lambda output, targets: ((output - targets) ** 2).sum() / 16: (torch.ones(4, 8), torch.ones(4, 4)),
    }  # fmt: skip

    def program():
        for loss_fn, batch in cases.items():
            with pytest.raises(RunError, match="no mean over the samples"):
                wb.forward_backward(wb.parallelize(copy.deepcopy(words), "*: data | 1x2x1 mb=2"), loss_fn, *batch)

    run_ranks(program, 2)


def test_a_sum_is_right_with_one_micro_batch_and_a_sum_over_the_samples_with_several():
    model = copy.deepcopy(MODEL)
    summed(model(SAMPLES), CLASSES).backward()
    expected = [parameter.grad for parameter in model.parameters()]

    def program():
        found = []
        for strategy, loss_fn, factor in (
            ("*: data", summed, 1),
            ("*: data | 1x2x1 mb=3", lambda output, targets: summed(output, targets) / len(targets), 18),
        ):
            model = wb.parallelize(copy.deepcopy(MODEL), strategy)
            wb.forward_backward(model, loss_fn, SAMPLES, CLASSES)
            found.append([factor * gradient for gradient in gradients(model)])
        return found

    for ways in run_ranks(program, 2):
        for found in ways:
            for own, right in zip(found, expected, strict=True):
                torch.testing.assert_close(own, right, rtol=1e-4, atol=1e-5)


_called = 0


class Annealed(nn.Module):
    """Every call weighs more than the one before, by what the loss keeps in many places."""

    rate = 0

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(3))
        self.of_numpy, self.deep = np.zeros(1), SimpleNamespace(counts={"calls": [0]})

    def forward(self, output, targets):
        self.of_numpy += 1
        self.deep.counts["calls"][0] += 1
        type(self).rate += 1
        weight = self.of_numpy[0] + self.deep.counts["calls"][0] + type(self).rate
        with torch.no_grad():
            self.center[:2] += 1
        return F.cross_entropy(output * (1 + self.center.sum()), targets) * weight


def around(loss, count=0, seen=None):
    def annealed(output, targets):
        nonlocal count
        global _called
        count, _called = count + 1, _called + 1
        annealed.calls = getattr(annealed, "calls", 0) + 1
        seen.append(count)
        return loss.forward(output, targets) * (count + _called + annealed.calls + len(seen))

    seen = []
    return annealed


class Iterating:
    """Nobody can put back what this reads, so it is not tried."""

    def __init__(self, values=range(1, 100)):
        self.weights = iter(values)

    def loss(self, output, targets):
        return F.cross_entropy(output, targets) * int(next(self.weights))


class Warming:
    """Has no attribute of its own before its first call."""

    step = 0

    def __call__(self, output, targets):
        self.step += 1
        return F.cross_entropy(output, targets) * self.step


class Settings(dict):
    """A dict with attributes."""

    def __init__(self):
        self.step = 0

    def __call__(self, output, targets):
        self.step += 1
        return F.cross_entropy(output, targets) * self.step


class Weighing:
    """Draws weights of a generator of numpy."""

    def __init__(self, generator):
        self.draw = generator

    def __call__(self, output, targets):
        return F.cross_entropy(output, targets) * (1 + self.draw.random_raw() % 7)


class Remembering:
    """Keeps a tuple of tensors and arrays."""

    def __init__(self):
        self.last = torch.zeros(3), (np.zeros(2), 1.0)

    def __call__(self, output, targets):
        tensor, (array, number) = self.last
        self.last = tensor + 1, (array + 1, number + 1)
        return F.cross_entropy(output, targets) * (tensor.sum() + array.sum() + number)


class WithRandomState(Weighing):
    def __call__(self, output, targets):
        return F.cross_entropy(output, targets) * (self.draw.rand() + self.draw.randn())


def next_of(values):
    """A loss that has a method of an iterator."""
    draw = iter(values).__next__
    return lambda output, targets: F.cross_entropy(output, targets) * int(draw())


WAYS = [
    Annealed,
    lambda: Annealed().forward,
    lambda: functools.partial(Annealed.forward, Annealed()),
    lambda: around(Annealed()),
    lambda: torch.enable_grad()(around(Annealed())),
    lambda: Iterating().loss,
    lambda: Iterating(DataLoader(torch.arange(1, 100))).loss,
    lambda: Iterating(np.nditer(np.arange(1, 100))).loss,
    lambda: next_of(range(1, 100)),
    lambda: next_of(DataLoader(torch.arange(1, 100))),
    Warming,
    Settings,
    Remembering,
    lambda: Weighing(np.random.PCG64(0)),
    lambda: WithRandomState(np.random.RandomState(0)),
]


@pytest.mark.parametrize("way", WAYS)
def test_the_check_of_a_loss_leaves_what_the_loss_keeps_as_it_is(way):
    def losses(strategy):
        global _called
        _called = Annealed.rate = 0
        model, loss_fn = wb.parallelize(copy.deepcopy(MODEL), strategy), way()
        return [wb.forward_backward(model, loss_fn, SAMPLES, CLASSES).item() for _ in range(2)]

    def step_by_step():
        global _called
        _called = Annealed.rate = 0
        loss_fn = way()
        parts = list(zip(SAMPLES.chunk(3), CLASSES.chunk(3), strict=True))
        return [sum(loss_fn(MODEL(x), y).item() for x, y in parts) / 3 for _ in range(2)]

    assert run_ranks(lambda: losses("*: data | mb=3"), 1)[0] == pytest.approx(step_by_step())


def test_the_check_of_a_loss_leaves_generators_as_they_are():
    def loss_fn(output, targets):
        if type(output) is torch.Tensor:  # only the check has plain tensors
            torch.rand([])
            random.random()
        return F.cross_entropy(output, targets)

    def program():
        model = wb.parallelize(copy.deepcopy(MODEL), "*: data | 1x2x1 mb=3")
        before = torch.get_rng_state(), random.getstate()
        for _ in range(2):
            wb.forward_backward(model, loss_fn, SAMPLES, CLASSES)
        return torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()

    assert run_ranks(program, 2) == [True, True]
