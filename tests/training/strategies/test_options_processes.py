"""ZeRO, sums during backward, recomputation and mixed precision on real processes, over both ways between them."""

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from tests.processes import run_processes
from tests.training.models import batch_for, make
from tests.training.programs import training_equals_one_device
from workbench.training.gradients import overlap
from workbench.training.gradients.overlap import GradientReducer

pytestmark = [pytest.mark.procs, pytest.mark.slow]


def training(strategies):
    for kind, strategy in strategies:
        losses, weights = training_equals_one_device(kind, strategy, wb.world_size(), steps=4)
        assert losses < 1e-5 and weights < 1e-5, (kind, strategy, losses, weights)
    return "ok"


FEW = [("mlp", "mb=2 zero=1"), ("cnn", "mb=2 zero=2 recompute"), ("dropping", "zero=3")]
MORE = [*FEW, ("mlp", ""), ("attention", "zero=3"), ("dropping", "zero=3 recompute"), ("encoder", "zero=2")]

GROUPS = [("mlp", f"mb=2 zero={zero} shards=2") for zero in (1, 2, 3)]


@pytest.mark.parametrize(
    ("transport", "num_ranks", "options"),
    [
        ("shared", 2, FEW),
        ("shared", 3, MORE),
        ("gloo", 3, MORE),
        *((how, 4, GROUPS) for how in ("shared", "gloo")),
    ],
)
def test_options_give_the_numbers_of_one_device(transport, num_ranks, options):
    strategies = [(kind, f"*: data | 1x{num_ranks}x1 {words}") for kind, words in options]
    environment = {"WORKBENCH_TRANSPORT": transport}
    assert run_processes(training, num_ranks, strategies, environment=environment) == ["ok"] * num_ranks


def trained(watched):
    """Weights after a few steps, some with more backwards than the step before."""
    overlap._SMALLEST_BUCKET_BYTES = 512
    model = wb.parallelize(make("mlp"), "*: data")
    if not watched:
        GradientReducer.of(next(model.parameters())).remove()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs, targets = batch_for("mlp")
    for parts in (1, 1, 3, 2, 2):
        optimizer.zero_grad()
        for part in range(parts):
            F.cross_entropy(model(inputs[part::parts]), targets[part::parts]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [p.full_tensor().detach() for p in model.parameters()]


def both_ways():
    return all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


def test_sums_during_backward_give_the_same_bits():
    assert run_processes(both_ways, 2) == [True] * 2
