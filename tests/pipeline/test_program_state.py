"""What a program keeps outside of parameters and buffers, in steps that replay a block's calls, run a forward twice, or
look at the order of calls.
"""

import copy
import random
import threading
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.errors import RunError, StrategyError
from workbench.tensors.program_state import ProgramState
from workbench.testing import run_ranks
from workbench.training.parallel import state_of

ROWS = "bl.[0-1].*: data@0; bl.[2-3].*: data@1; head: data@1 | 2x1x1 mb=2"
INPUTS = torch.randn(6, 8, generator=torch.Generator().manual_seed(2)).double()
TARGETS = torch.arange(6) % 4
_kept = threading.local()


class Notes:
    """What all blocks share."""

    def __init__(self):
        self.found, self.rate, self.by_name = [], 0.0, {"rows": []}


class Kinds(OrderedDict):
    def __getitem__(self, name):  # makes what it is asked for, as the table of activations of ``transformers`` does
        return super().__getitem__(name)()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)))


class TakingNotes(Block):
    """Leaves a loss of its own in a list that a thread has, as a module-level list."""

    def forward(self, x):
        x = super().forward(x)
        _kept.losses.append(x.square().mean())
        return x


class TakingNotesInAnObject(Block):
    def forward(self, x):
        x = super().forward(x)
        self.notes.last = x.detach()
        self.notes.found.append(x.square().mean())
        return x


class Drawing(Block):
    """Draws random numbers of a generator of the program's own."""

    def forward(self, x):
        return x if self.generator.random() < 0.4 else super().forward(x)


class AddingAHook(Block):
    """Adds one in its first forward, and notes that it has, as models of ``transformers`` do."""

    has_hook = False

    def forward(self, x):
        if not self.has_hook:
            self.has_hook = True
            self.a.register_forward_hook(lambda module, args, output: output * 1.5)
        return super().forward(x)


class DrawingOfNumpy(Block):
    def forward(self, x):
        return super().forward(x) * (1 + self.of_numpy.random())


class DrawingOfARandomState(Block):
    def forward(self, x):
        return super().forward(x) * (1 + self.of_old_numpy.randn())


class Calls:
    number = 0


class CountingInAnEmptyObject(Block):
    """The object has no attribute of its own before the first call."""

    def __init__(self):
        super().__init__()
        self.counted = Calls()

    def forward(self, x):
        self.counted.number += 1
        return super().forward(x) * (1 + 0.1 * self.counted.number)


class KeepingATuple(Block):
    def __init__(self):
        super().__init__()
        self.last = np.zeros(2), (torch.zeros(2),)

    def forward(self, x):
        array, (tensor,) = self.last
        self.last = array + 1, (tensor + 1,)
        return super().forward(x) * (1 + 0.1 * (array.sum() + tensor.sum().item()))


class ReadingNotes(Block):
    """Reads a setting that all blocks share."""

    def forward(self, x):
        return x * 1.0 if self.notes.rate >= 0.3 else super().forward(x) * (1 + self.notes.rate)


class CountingInAnObject(Block):
    def forward(self, x):
        self.notes.by_name["rows"].append(len(x))
        return super().forward(x) * (1 + 0.01 * len(self.notes.by_name["rows"]))


class Replaced(Block):
    """A part and a function of it are replaced between steps."""

    def __init__(self):
        super().__init__()
        self.drop, self.act = nn.Identity(), torch.tanh

    def forward(self, x):
        return x + self.drop(self.b(self.act(self.a(x))))


class Counting(Block):
    def __init__(self):
        super().__init__()
        self.calls, self.weight = 0, torch.zeros(())

    def forward(self, x):
        self.calls += 1
        self.weight += 0.1
        return super().forward(x) * (1 + 0.1 * self.calls + self.weight)


OF_THE_SYSTEM = random.SystemRandom()
"""A generator without a state."""


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.bl, self.head = nn.ModuleList(kind() for _ in range(4)), nn.Linear(8, 4)
        self.notes, self.calls, self.seen = Notes(), 0, []
        self.register_buffer("rate", torch.zeros(()))
        for block in self.bl:
            block.notes, block.generator, block.of_numpy = self.notes, random.Random(3), np.random.default_rng(3)
            block.of_old_numpy = np.random.RandomState(3)

    def forward(self, x):
        _kept.losses = []
        assert OF_THE_SYSTEM.random() < 1
        self.notes.found.clear()
        self.calls += 1
        self.seen.append(self.calls)
        self.rate += 0.1
        for block in self.bl:
            x = block(x)
        return self.head(x) * (1 + 0.1 * len(self.seen) + self.rate)


def loss_of(scores, targets):
    return F.cross_entropy(scores, targets) + 0.1 * sum(_kept.losses)


def change(model, step):
    model.notes.rate = 0.2 * step
    for block in model.bl:
        if isinstance(block, Replaced):
            block.drop = nn.Dropout(0.2 * step)
            block.act = (torch.tanh, torch.sigmoid, torch.relu)[step]


def trained(one, strategy, num_ranks):
    """(losses, last weights, calls that the model has counted) of each rank."""
    models = [copy.deepcopy(one) for _ in range(num_ranks)]

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            change(model, step)
            optimizer.zero_grad()
            loss = loss_of if isinstance(one.bl[0], TakingNotes) else LossWithNotes(model).mean
            losses.append(wb.forward_backward(model, loss, INPUTS, TARGETS).item())
            optimizer.step()
        counted = model.calls, len(model.seen), [getattr(block, "calls", 0) for block in model.bl]
        caches = state_of(model).forward_caches or []
        is_replayed = any(record is not None for cache in caches for record in cache.records.values())
        return losses, [p.full_tensor() for p in model.parameters()], counted, is_replayed

    return run_ranks(program, num_ranks)


class LossWithNotes:
    """Counts its calls."""

    def __init__(self, model):
        self.model, self.calls = model, 0

    def mean(self, scores, targets):
        self.calls += 1
        return F.cross_entropy(scores, targets) * (1 + 0.1 * self.calls) + 0.1 * sum(self.model.notes.found)


KINDS = [
    TakingNotes,
    TakingNotesInAnObject,
    Drawing,
    DrawingOfNumpy,
    ReadingNotes,
    Replaced,
    Counting,
    CountingInAnObject,
    CountingInAnEmptyObject,
    KeepingATuple,
    DrawingOfARandomState,
    AddingAHook,
]


def assert_trains_as_one_device(kind, strategy):
    torch.manual_seed(0)
    one = Model(kind).double()
    mb = strategy.partition("mb=")[2][0]
    (losses, weights, counted, _), *_ = trained(one, f"*: data | mb={mb}", 1)
    found = trained(one, strategy, 2)
    for own, state, calls, _ in found:
        torch.testing.assert_close(own, losses, rtol=1e-6, atol=0)
        torch.testing.assert_close(state, weights)
        assert calls == counted
    return [is_replayed for *_, is_replayed in found]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_read_or_leave_something_of_the_program_train_as_on_one_device(kind):
    replayed = assert_trains_as_one_device(kind, ROWS)
    assert replayed == [kind in (ReadingNotes, Replaced)] * 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        (Counting, "interleaved"),
        (CountingInAnObject, "interleaved"),
        (Drawing, "zero_bubble_v"),
        (TakingNotesInAnObject, "dualpipe_v"),
        (AddingAHook, "interleaved"),
    ],
)
def test_each_stage_of_a_rank_goes_on_from_what_it_has_left(kind, schedule):
    rows = "; ".join(f"bl.{stage}.*: data@{stage}" for stage in range(4))
    assert_trains_as_one_device(kind, f"{rows}; head: data@3 | 2x1x1 mb=4 {schedule}")


class Table(dict):
    """A dict with attributes."""


def test_what_a_forward_changes_is_noticed_and_put_back():
    """Generators of Python, numpy and torch, an attribute, a list, a tuple, an object, a hook, another module in a
    module's place.
    """
    model = Model(Block)
    model.empty, model.rows, model.last = Calls(), Table(), (torch.zeros(2), (np.zeros(2), 1))
    model.bits, model.kinds = np.random.PCG64(3), Kinds(relu=nn.Bilinear)
    model.bl[0].table = np.zeros((2, 3))
    model.names, model.waiting, model.weight = {"a"}, torch.Generator(), torch.zeros(())
    changes = [
        random.random,
        np.random.rand,
        lambda: torch.rand([]),
        model.bl[0].generator.random,
        model.bl[0].of_numpy.random,
        model.bl[0].of_old_numpy.randn,
        model.bits.random_raw,
        lambda: setattr(model.empty, "number", 7),
        lambda: setattr(model.rows, "number", 7),
        lambda: setattr(model, "last", (model.last[0], (np.ones(2), 1))),
        lambda: setattr(model, "last", (model.last[0], (model.last[1][0], 2))),
        lambda: torch.rand([], generator=model.waiting),
        lambda: setattr(model, "calls", 7),
        lambda: model.names.clear(),
        lambda: model.seen.append(1),
        lambda: setattr(model.notes, "rate", 0.5),
        lambda: setattr(model.notes, "other", 0.5),
        lambda: model.kinds.clear(),
        lambda: model.notes.by_name["rows"].append(1),
        lambda: model.bl[0].table.fill(1),
        lambda: model.bl[0].register_forward_hook(print, with_kwargs=True),
    ]
    kept = ProgramState([model], torch.device("cpu"))
    assert kept.is_unchanged()
    for change_it in changes:
        change_it()
        assert not kept.is_unchanged()
        kept.put_back()
        assert kept.is_unchanged()
    model.last = (model.last[0], (model.last[1][0], 1))  # equal
    assert kept.is_unchanged()
    model.weight += 1
    assert not kept.is_unchanged()
    kept.put_back()
    assert model.weight == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "kind", [CountingInAnEmptyObject, Drawing, KeepingATuple, CountingInAnObject, DrawingOfARandomState, AddingAHook]
)
def test_the_first_look_at_the_order_of_calls_leaves_nothing_behind(kind):
    assert_trains_as_one_device(kind, "pipeline | mb=2")


class AskingForAGradient(Model):
    def forward(self, x):
        x = x.detach().requires_grad_()
        scores = super().forward(x)
        return scores + torch.autograd.grad(scores.sum(), x, create_graph=True)[0].square().mean()


def test_a_gradient_inside_the_forward_that_goes_back_is_refused():
    one = AskingForAGradient(Block).double()
    models = [copy.deepcopy(one) for _ in range(2)]

    def program(rank):
        wb.forward_backward(wb.parallelize(models[rank], f"{ROWS} 1f1b"), F.cross_entropy, INPUTS, TARGETS)

    with pytest.raises(StrategyError, match=r"autograd.grad.* from stage 1 back to stage 0: under 1f1b.*gpipe"):
        run_ranks(program, 2)


@pytest.mark.parametrize("critic", ["*: data", "*: model"])
def test_a_critic_on_the_ranks_of_all_stages_is_refused_where_stages_would_wait_for_each_other(critic):
    generator, judge = (nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double() for _ in range(2))
    copies = [copy.deepcopy((generator, judge)) for _ in range(4)]
    rows, x = "0: data@0; 2: data@1 | mb=2", torch.randn(8, 4).double()
    expected = F.mse_loss(judge(generator(x)), x).item()

    def program(rank, options, model, other):
        parallel, judging = wb.parallelize(model, f"{rows} {options}"), wb.parallelize(other, critic)
        return wb.forward_backward(parallel, lambda y, x: F.mse_loss(judging(y), x), x, x).item()

    with pytest.raises(StrategyError, match=r"on stages 0 and 1, .* from stage 1: under 1f1b.*x\.detach.*gpipe"):
        run_ranks(lambda rank: program(rank, "1f1b", *copies[rank]), 2)
    assert run_ranks(lambda rank: program(rank, "gpipe", *copies[2 + rank]), 2) == pytest.approx([expected] * 2)


def test_a_critic_beside_several_stages_per_rank_is_refused():
    """The check of the loss compared the critic's first batch, and simulated ranks waited for each other's check."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    critic, x = nn.Sequential(nn.Linear(4, 4)).double(), torch.randn(8, 4).double()

    def program(model, critic):
        model = wb.parallelize(model, "; ".join(f"{n}: data@{n}" for n in range(4)) + " | mb=4 interleaved")
        judging = wb.parallelize(critic, "*: data")
        wb.forward_backward(model, lambda y, x: F.mse_loss(judging(y), x), x, x)

    with pytest.raises(StrategyError, match=r"'0' is on stages .*under interleaved.*gpipe"):
        run_ranks(lambda: program(*copy.deepcopy((model, critic))), 2)


class WithState(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, 2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x):
        x, (state, _) = self.lstm(x[:, None])
        return self.head(x), state


def test_an_output_whose_dim_0_does_not_count_samples_is_refused():
    model = WithState().double()
    with pytest.raises(RunError, match=r"\(2, 3, 8\).* 2 micro-batches of \[3, 3\] samples.*transpose"):
        run_ranks(lambda rank: wb.evaluate(wb.parallelize(model, "*: data | mb=2"), INPUTS), 1)
