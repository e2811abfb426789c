"""``shards=N``: ZeRO inside groups of N data ranks, copies between the groups."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.models.training import whole
from tests.training.models import batch_for
from tests.training.training_runs import Setup, assert_trains_like_one_device
from tests.training.zero.test_zero import InDoubles, Wide, assert_close, steps
from workbench.core.strategy import Strategy
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.diagnostics.memory import model_memory
from workbench.training.gradients.optim import state_layout
from workbench.training.parallel import describe

CASES = [
    ("mlp", "model", "1x4x2 zero=2 shards=2 mb=2"),
    ("cnn", "data", "1x6x1 zero=1 shards=3"),
    ("mlp", "data", "2x4x1 mb=3 1f1b zero=3 shards=2"),
    ("llama", "data", "1x4x1 context=2 zero=3 shards=2 recompute"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "parallel", "options"), CASES)
def test_a_few_steps_are_those_of_one_device(kind, parallel, options):
    """With dropout, AdamW, and samples that the ranks do not divide."""
    num_ranks = 1
    for degree in options.partition(" ")[0].split("x"):
        num_ranks *= int(degree)
    assert_trains_like_one_device(Setup(kind, "adamw", num_steps=3), parallel, options, num_ranks)


@pytest.mark.sampled(3, start=2)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_groups_hold_copies_of_shards_and_send_the_bytes_of_the_plan(zero):
    """The layouts, clipping by the norm of the whole, bytes per rank, and what all ranks send in a step."""
    models = [InDoubles() for _ in range(5)]
    truth = steps(models[4], torch.optim.AdamW(models[4].parameters(), lr=0.01), clip=0.5)

    def program(rank):
        model = wb.parallelize(models[rank], f"*: data | 1x4x1 zero={zero} shards=2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found = [p.detach().clone() for p in steps(model, optimizer, clip=0.5)]
        layouts = [state_layout(p) for p in model.parameters()]
        assert {tuple(map(str, layout.sbp)) for layout in layouts} == {("B", "S(0)")}
        assert {layout.placement.shape for layout in layouts} == {(2, 2)}
        assert {frozenset(layout.placement.ranks[0]) for layout in layouts} == {frozenset({0, 1})}
        inputs, targets = batch_for("mlp")
        optimizer.zero_grad()
        current().traffic.reset()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        planned = sum(map(model.plan.gradient_bytes, model.plan.layers_of()))
        held = model_memory(model, optimizer)["optimizer"] / sum(16 * p.numel() for p in model.parameters())
        return found, sum(current().traffic.by_kind.values()), planned, held

    for found, _, _, held in (results := run_ranks(program, 4)):
        assert_close(found, truth)
        assert held == pytest.approx(1 / 2, rel=0.05)
    assert sum(sent for _, sent, _, _ in results) == results[0][2]
    for one, other in zip(results[0][0], results[3][0], strict=True):
        assert torch.equal(one, other)


def test_sums_between_groups_pass_once_in_a_step_under_zero_3():
    """Each of several backwards gathers and scatters inside the groups."""
    made = nn.Linear(64, 64, bias=False)
    size = 64 * 64 * 4

    def program(zero):
        model = wb.parallelize(copy.deepcopy(made), f"*: data | 1x4x1 zero={zero} shards=2")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with wb.debug.trace() as trace:
                for _ in range(3):
                    model(torch.ones(4, 64)).sum().backward()
                optimizer.step()
        return {(r.kind, r.function): r.sent_bytes for r in trace.records if r.direction == "step"}

    half = size // 2  # of a rank: a scatter or a gather between two ranks, and a sum of halves between two groups
    scatters = {1: 1, 2: 3, 3: 3}
    for zero, times in scatters.items():
        sent = run_ranks(lambda zero=zero: program(zero), 4)[3]
        assert sent["reduce-scatter", "gradients"] == times * half
        assert sent["all-reduce", "gradients"] == {1: 1, 2: 3, 3: 1}[zero] * half
        assert sent["all-gather", "parameters"] == {1: 1, 2: 1, 3: 6}[zero] * half


def test_a_checkpoint_loads_with_other_groups_or_none(tmp_path):
    made = Wide()
    ids = torch.arange(12).reshape(4, 3)

    def train(model, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()

    def program(strategy, path, load):
        model = wb.parallelize(copy.deepcopy(made), strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if load:
            wb.checkpoint.load(path, model=model, optimizer=optimizer)
        else:
            train(model, optimizer, 2)
            wb.checkpoint.save(path, model=model, optimizer=optimizer)
        train(model, optimizer, 1)
        return [whole(p).clone() for p in model.parameters()]

    options = "*: data | 1x4x1 zero=3 shards=2"
    truth = run_ranks(lambda: program(options, tmp_path / "one", False), 4)[0]
    for strategy, num_ranks in (("*: data | zero=3", 4), ("*: data", 2), ("*: data | zero=1 shards=2", 4)):
        assert_close(run_ranks(lambda s=strategy: program(s, tmp_path / "one", True), num_ranks)[0], truth, 1e-5)


def test_mistakes_name_both_numbers_and_fixes():
    layers = describe(nn.Linear(4, 4))
    with pytest.raises(wb.errors.StrategyError) as raised:
        Strategy("*: data | 1x12x1 shards=8").resolve(layers, 12)
    text = str(raised.value)
    assert "shards=8, but a data degree of 12" in text and "use shards=6" in text
    assert "shards=8 with zero=0" in text and "use zero=3" in text
    with pytest.raises(wb.errors.StrategyError, match="shards=1, but a data degree of 2: a group has at least 2 ranks"):
        Strategy("*: data | zero=1 shards=1").resolve(layers, 2)
    with pytest.raises(wb.errors.StrategyError, match="shards=0: a group has at least 2"):
        Strategy("*: data | zero=1 shards=0")
    with pytest.raises(wb.errors.StrategyError, match="both shards=2 and shards=4"):
        Strategy("*: data | zero=1 shards=2 shards=4")
    assert str(Strategy("*: data | shards=2 zero=1").options) == "zero=1 shards=2"
    assert Strategy("*: data").with_options(zero=3, shards=2) == Strategy("*: data | zero=3 shards=2")
