"""Values that a forward reads inside a scheduled step: all stages get them, or an error says what to do."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.errors import ExplicitBoxingError, StrategyError
from workbench.testing import run_ranks
from workbench.training.pipelining import running_step
from workbench.training.pipelining.running_step import ValueReadWarning

INPUTS, TARGETS = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double(), torch.arange(8) % 4


class Experts(nn.Module):
    """Each expert gets its rows only, whose number is known by values."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(6), nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        chosen = self.gate(x).argmax(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            result.index_add_(0, rows, expert(x[rows]))
        return x + result


class Asking(nn.Module):
    """Looks at values on every stage, in every way."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 0:
                x = x / 2
            x = x * (1 + int(x.argmax()) / 100 + max(x[0].tolist()) / 100 + x[0, 0].item() / 100)
            x = x[: len((x.sum(1) > -1e9).nonzero())]
        return self.head(x)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def step_of(model, strategy, num_ranks):
    """(loss, gradients) of a step on each rank; each rank takes two, so that forward caches are used."""
    copies = [copy.deepcopy(model) for _ in range(num_ranks)]

    def program(rank):
        parallel = wb.parallelize(copies[rank], strategy)
        for _ in range(2):
            parallel.zero_grad()
            loss = wb.forward_backward(parallel, F.cross_entropy, INPUTS, TARGETS)
        return loss.item(), {
            name: None if p.grad is None else p.grad.full_tensor() for name, p in parallel.named_parameters()
        }

    return run_ranks(program, num_ranks)


def truth_of(model, num_parts):
    model = copy.deepcopy(model)
    total = 0.0
    for inputs, targets in zip(INPUTS.chunk(num_parts), TARGETS.chunk(num_parts), strict=True):
        loss = F.cross_entropy(model(inputs), targets) / num_parts
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    running_step._warned.clear()


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore::workbench.training.pipelining.running_step.ValueReadWarning")
@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.parametrize(
    ("make", "num_ranks", "schedule"),
    [(Asking, 2, "gpipe"), (Asking, 4, "1f1b"), (Routed, 2, "zero_bubble"), (Routed, 3, "1f1b")],
)
def test_values_of_a_stage_are_read_on_all_ranks(make, num_ranks, schedule):
    model = make().double()
    loss, grads = truth_of(model, 4)
    for found, found_grads in step_of(model, f"pipeline | mb=4 {schedule}", num_ranks):
        assert found == pytest.approx(loss, rel=1e-12)
        for name, parameter in model.named_parameters():
            one, other = (torch.zeros_like(parameter) if g is None else g for g in (grads[name], found_grads[name]))
            torch.testing.assert_close(one, other)


def test_one_warning_names_the_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ValueReadWarning)
        step_of(Asking().double(), "pipeline | mb=4", 2)
    found = [str(w.message) for w in caught if w.category is ValueReadWarning]
    assert len(found) == 3  # lines of the forward
    assert all("test_value_reads.py:" in text and "2 stages and 4 micro-batches" in text for text in found)


def test_explicit_mode_refuses_it():
    def program(rank):
        model = wb.parallelize(models[rank], "*: data; head: data@1 | mb=2")
        with wb.debug.explicit_boxing(), pytest.raises(ExplicitBoxingError):
            wb.forward_backward(model, F.cross_entropy, INPUTS, TARGETS)

    model = Asking().double()
    models = [copy.deepcopy(model) for _ in range(2)]
    run_ranks(program, 2)


def test_stages_that_cannot_wait_are_refused():
    with pytest.raises(StrategyError, match=r"reading a value .*under interleaved.*1f1b or gpipe"):
        step_of(Asking().double(), "pipeline | mb=4 interleaved", 2)


@pytest.mark.filterwarnings("ignore::workbench.training.pipelining.running_step.ValueReadWarning")
def test_a_value_that_is_read_again_in_backward_is_refused():
    with pytest.raises(StrategyError, match=r"reading a value .*in a backward.*recompute"):
        step_of(Routed().double(), "pipeline | mb=4 recompute", 2)


def test_an_edge_that_goes_back_is_checked_once_in_a_step(monkeypatch):
    """Work is counted, not timed: each micro-batch checked the whole table for each of its edges that go back."""
    checks, original = [], running_step.check_table
    monkeypatch.setattr(running_step, "check_table", lambda *args: checks.append(wb.rank()) or original(*args))
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    (loss, gradients), *_ = step_of(model, "0: data; 1: data@1; 2: data@0; 3: data@1 | 2x1x1 mb=4 gpipe", 2)
    torch.testing.assert_close((loss, gradients), truth_of(model, 4))
    assert sorted(checks) == [0, 0, 1, 1], "2 steps on each of 2 ranks"
