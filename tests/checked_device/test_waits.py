"""How often the host waits for the device in a steady step over NCCL, by strategy. The numbers may only fall."""

import copy
import functools
from collections.abc import Hashable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from benchmarks.gpt import GPT, next_word_loss
from tests.checked_device import DEVICE, counted
from tests.checked_device.counts import counts_of_thread
from tests.checked_device.test_training import X, Y, mlp
from tests.training.strategies.mixtures import Mixture, batch_of
from tests.transport.nccl_ranks import run_over_nccl
from tests.transport.shared_ranks import assert_all_returned
from workbench.errors import RunError
from workbench.transport.network.distributed import DistributedTransport


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def scheduled_step(model, optimizer):
    wb.forward_backward(model, F.cross_entropy, X, Y)
    optimizer.step()


def own_step(model, optimizer):
    F.cross_entropy(model(X), Y).backward()
    optimizer.step()


def clipped_step(model, optimizer):
    wb.forward_backward(model, F.cross_entropy, X, Y)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def scaled_step(model, optimizer):
    if not hasattr(optimizer, "scaler"):
        optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    optimizer.scaler.scale(F.cross_entropy(model(X).float(), Y)).backward()
    optimizer.scaler.step(optimizer)
    optimizer.scaler.update()


def masked_step(model, optimizer):
    scores = model(X)
    F.cross_entropy(scores, torch.where(Y > 2, Y, -100), label_smoothing=0.1).backward()
    optimizer.step()


def dropout_step(model, optimizer):
    F.cross_entropy(F.dropout(model(X)), Y).backward()
    optimizer.step()


def loader_step(model, optimizer):
    if not hasattr(optimizer, "batches"):
        optimizer.batches = iter(wb.GlobalDataLoader((X, Y), batch_size=4, module=model, shuffle=True))
    inputs, targets = next(optimizer.batches)
    F.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def captured_step(model, optimizer):
    if not hasattr(optimizer, "captured"):

        def step(inputs, targets):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            return loss.detach()

        optimizer.captured, optimizer.batch = wb.capture(step), (X.to(DEVICE), Y.to(DEVICE))
    optimizer.captured(*optimizer.batch)


def evaluation(model, optimizer):
    wb.evaluate(model, X)


def text_step(model, optimizer):
    wb.forward_backward(model, next_word_loss, WORDS, WORDS)
    optimizer.step()


def mixture_step(model, optimizer):
    features, classes = batch_of(0)
    model(features.float(), classes).backward()
    optimizer.step()


def gpt():
    torch.manual_seed(0)
    return GPT(32, 2, 11, 8)


def mixture():
    torch.manual_seed(0)
    return Mixture().float()


MODELS = {text_step: gpt, mixture_step: mixture}
"""By step; others train the perceptron."""
WORDS = torch.randint(0, 11, (4, 8), generator=torch.Generator().manual_seed(0))
WAITS = {
    ("*: data", own_step): {},
    ("*: model", own_step): {},
    ("0: model; 2: model:row; 5: data", own_step): {},
    ("*: data | zero=1", own_step): {},
    ("*: data | zero=2", own_step): {},
    ("*: data | zero=3", own_step): {},
    ("*: data | zero=3 recompute", own_step): {},
    ("pipeline | mb=4 gpipe", scheduled_step): {},
    ("pipeline | mb=4 1f1b", scheduled_step): {},
    ("pipeline | mb=4 interleaved", scheduled_step): {},
    ("pipeline | mb=4 zero_bubble", scheduled_step): {},
    ("*: data", clipped_step): {},
    ("*: model", clipped_step): {},
    ("*: data | zero=3", clipped_step): {},
    ("pipeline | mb=4 1f1b", clipped_step): {},
    ("*: data | fp16", scaled_step): {"_local_scalar_dense": 1},
    ("*: data", masked_step): {},
    ("*: model", masked_step): {},
    ("*: data", dropout_step): {},
    ("*: data", loader_step): {"all-gather": 1, "copy to the host": 1},
    ("pipeline | mb=4 zero_bubble recompute", scheduled_step): {},
    ("pipeline | mb=4 zero_bubble_v", scheduled_step): {},
    ("pipeline | mb=4 dualpipe_v", scheduled_step): {},
    ("*: data | bf16 zero=3", own_step): {},
    ("*: data", captured_step): {},
    ("*: model", captured_step): {},
    ("*: data | zero=3", captured_step): {},
    ("*: model", evaluation): {},
    ("*: model | sequence", text_step): {},
    ("*: model | sequence overlap=2", text_step): {},
    ("*: data | context=2", text_step): {},
    ("*: data | recompute=cheap", text_step): {},
    ("*: data | recompute=attention", text_step): {},
    ("*: expert", mixture_step): {"copy to the host": 1, "nonzero": 4},  # the model looks for the rows of 4 experts
}
"""By strategy and step: what the host waits for, and how often."""


@pytest.fixture
def counts_gathers(monkeypatch):
    """The host waits for what it gathers."""
    gather = DistributedTransport.all_gather

    def all_gather(self, tensor, header):
        for counts in counts_of_thread():
            counts.waits["all-gather"] += 1
        return gather(self, tensor, header)

    monkeypatch.setattr(DistributedTransport, "all_gather", all_gather)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("strategy", "step"), WAITS)
def test_waits_of_a_steady_step(strategy, step, counts_gathers):
    built = MODELS.get(step, mlp)()

    def program(rank):
        model = wb.parallelize(copy.deepcopy(built), strategy)
        optimizer = adam(model)
        for _ in range(6 if step is captured_step else 3):  # recorded in the fourth
            optimizer.zero_grad()
            with counted() as counts:
                step(model, optimizer)
        return counts.waits

    expected = WAITS[strategy, step]
    assert assert_all_returned(run_over_nccl(program, device=DEVICE)) == [expected, expected]


def test_losses_that_alternate_are_looked_at_once_each(counts_gathers):
    """Also those that the program makes anew in each step."""

    class Scaled:
        def __init__(self, factor):
            self.factor = factor

        def __eq__(self, other):
            return self.factor == other.factor

        def __call__(self, output, targets):
            return F.cross_entropy(self.factor * output, targets)

    built, scaled, by_class = mlp(), Scaled(2.0), torch.ones(6).to(DEVICE)
    assert not isinstance(scaled, Hashable)

    def losses():
        yield lambda output, targets: F.cross_entropy(-output, targets)
        yield functools.partial(F.cross_entropy, label_smoothing=0.1)
        yield functools.partial(F.cross_entropy, weight=by_class.clone())
        yield scaled

    def program(rank):
        model, waits = wb.parallelize(copy.deepcopy(built), "pipeline | mb=4 1f1b"), []
        for _ in range(2):
            for loss_fn in losses():
                with counted() as counts:
                    wb.forward_backward(model, loss_fn, X, Y)
                waits.append(counts.waits.total() > 0)
        with pytest.raises(RunError, match="no mean over the samples"):
            wb.forward_backward(model, functools.partial(F.cross_entropy, reduction="sum"), X, Y)
        return waits

    for found in assert_all_returned(run_over_nccl(program, device=DEVICE)):
        assert found == [True] * 4 + [False] * 4


def test_evaluations_compare_batches_of_eight_sizes_only(counts_gathers):
    built = mlp()

    def program(rank):
        model, waits = wb.parallelize(copy.deepcopy(built), "*: model"), []
        with torch.no_grad():
            for rows in range(1, 11):
                with counted() as counts:
                    model(X[:rows])
                waits.append(counts.waits.total() > 0)
        return waits

    for found in assert_all_returned(run_over_nccl(program, device=DEVICE)):
        assert found == [True] * 8 + [False] * 2
