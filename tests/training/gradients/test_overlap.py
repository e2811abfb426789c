"""Sums of gradients that start during backward: the bits of those that start at the step, whatever happens between."""

import gc
import itertools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.training.models import batch_for, make
from workbench.tensors.global_tensor import local_torch
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.gradients import overlap, reduction
from workbench.training.gradients.overlap import GradientReducer


class Events(list):
    """What one rank did, in order: "start" of a sum, "backward" at the end of one, "step"."""


def train(strategy, num_ranks, body, watched=True, kind="mlp", small_buckets=True):
    """Run ``body(model, optimizer, batch, events)`` on every rank; weights and events of rank 0 and the last rank."""
    models = [make(kind) for _ in range(num_ranks)]
    batch = batch_for(kind)

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        if not watched:
            for reducer in {GradientReducer.of(p) for p in model.parameters()} - {None}:
                reducer.remove()
        events, transport = Events(), current().transport
        start = transport.start_all_reduce

        def recorded(tensors, *rest):
            events.append("start")
            return start(tensors, *rest)

        transport.start_all_reduce = recorded
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer.register_step_post_hook(lambda *_: events.append("step"))
        body(model, optimizer, batch, events)
        everywhere = wb.placement.all("cpu")
        return events, [
            p.detach().to_global(placement=everywhere, sbp="B").to_local().clone() for p in model.parameters()
        ]

    found = run_ranks(program, num_ranks)
    for _, weights in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights, found[0][1], strict=True))
    return found[0]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(overlap, "_SMALLEST_BUCKET_BYTES", 512)


def plain_steps(model, optimizer, batch, events, parts=1, steps=4, clip=None):
    inputs, targets = batch
    for _ in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            F.cross_entropy(model(inputs[part::parts]), targets[part::parts]).backward()
            events.append("backward")
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


STRATEGIES = [("*: data", 2), ("*: data", 3), ("*: data | 1x2x2", 4), ("*: model | 1x2x2", 4)]


CASES = [(kind, *strategy) for kind in ("mlp", "cnn", "attention") for strategy in STRATEGIES]


@pytest.mark.parametrize(
    ("kind", "strategy", "num_ranks"),
    [("mlp", "*: data", 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)],
)
def test_the_same_bits_as_without(kind, strategy, num_ranks):
    def body(*args):
        plain_steps(*args, parts=2, clip=0.5)

    events, weights = train(strategy, num_ranks, body, kind=kind)
    without, expected = train(strategy, num_ranks, body, watched=False, kind=kind)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    assert len(without) <= len(events)


def test_sums_start_in_the_last_backward_alone():
    events, _ = train("*: data", 2, lambda *args: plain_steps(*args, parts=3))
    steps = " ".join(events).split("step")
    assert steps[0].split()[:3] == ["backward"] * 3  # nobody knows yet which is the last
    for step in steps[2:-1]:
        words = step.split()
        assert words[:2] == ["backward"] * 2 and words[-1] == "backward"
        assert words[2:-1] == ["start"] * len(words[2:-1]) and len(words) > 4


def test_sums_start_in_the_last_backward_also_where_two_optimizers_step():
    def body(model, _, batch, events):
        inputs, targets = batch
        first, *others = model.parameters()
        optimizers = torch.optim.AdamW([first]), torch.optim.SGD(others, lr=0.1)
        for _ in range(3):
            for _ in range(2):
                F.cross_entropy(model(inputs), targets).backward()
                events.append("backward")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            events.append("step")

    events, _ = train("*: data", 2, body)
    for step in " ".join(events).split("step")[1:-1]:
        first, between, last, *behind = step.split("backward")
        assert not first.strip() and not behind and between.split() and set(between.split()) == {"start"}
        assert not last.strip()


def test_sums_start_in_backward_after_a_change_of_strategy_that_moves_nothing():
    def body(model, optimizer, batch, events):
        plain_steps(model, optimizer, batch, events, steps=2)
        wb.parallelize(model, "*: data | recompute")
        plain_steps(model, optimizer, batch, events, steps=3)

    events, _ = train("*: data", 2, body)
    first, *_, last = " ".join(events).split("step")[-2].split()
    assert (first, last) == ("start", "backward")


def test_more_backwards_than_before_are_never_wrong():
    def body(model, optimizer, batch, events):
        for parts in (1, 1, 3, 1, 2, 2, 1):
            plain_steps(model, optimizer, batch, events, parts=parts, steps=1)

    weights = train("*: data", 3, body)[1]
    expected = train("*: data", 3, body, watched=False)[1]
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def changed_in_place(model):
    for p in model.parameters():
        p.grad.mul_(0.5)


def changed_through_data(model):
    for p in model.parameters():
        p.grad.data.mul_(0.5)


def assigned(model):
    for p in model.parameters():
        p.grad = p.grad * 0.5


def foreach(model):
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)


def dropped(model):
    for p in list(model.parameters())[::2]:
        p.grad = None


CHANGES = [changed_in_place, changed_through_data, assigned, foreach, dropped]
OPTIONS = ["", " | zero=1", " | zero=2", " | zero=3"]


def assert_trains_as_one_device(body, options):
    """``body`` gives the weights of plain torch under data parallelism with these options."""
    model = make("mlp")
    body(model, torch.optim.AdamW(model.parameters(), lr=0.01), batch_for("mlp"), [])
    _, weights = train("*: data" + options, 2, body)
    for found, truth in zip(weights, model.parameters(), strict=True):
        torch.testing.assert_close(found, truth.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        *((change, "") for change in CHANGES[:3]),
        (assigned, " | zero=2"),
        *(pytest.param(c, o, marks=pytest.mark.slow) for c in CHANGES for o in OPTIONS),
    ],
)
def test_a_gradient_that_was_changed_after_backward_is_the_one_that_counts(change, options):
    def body(model, optimizer, batch, events):
        inputs, targets = batch
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            change(model)
            optimizer.step()

    assert_trains_as_one_device(body, options)


class Branches(nn.Module):
    """Layers of which a step uses some."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x, used):
        for number in used:
            x = torch.tanh(self.layers[number](x))
        return x


@pytest.mark.parametrize("options", ["", *(pytest.param(o, marks=pytest.mark.slow) for o in OPTIONS[1:])])
def test_parameters_that_a_backward_does_not_reach(options):
    used = [(0, 1, 2, 3), (0, 1, 2, 3), (3, 0), (1,), (2, 1, 0), (0, 1, 2, 3)]
    torch.manual_seed(0)
    models = [Branches() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    inputs = torch.randn(7, 16)

    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        for layers in used:
            optimizer.zero_grad()
            for part in (layers, layers[:1]):
                model(inputs, part).square().mean().backward()
            optimizer.step()
        return [p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]

    found = run_ranks(lambda rank: run(wb.parallelize(models[rank], "*: data" + options)), 2)
    for ours, theirs in zip(found[1], run(models[2]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_no_sync_starts_nothing():
    def body(model, optimizer, batch, events):
        inputs, targets = batch
        for _ in range(3):
            optimizer.zero_grad()
            with wb.no_sync(model):
                F.cross_entropy(model(inputs), targets).backward()
            events.append("backward")
            optimizer.step()

    events, _ = train("*: data", 2, body)
    assert all(after != "backward" for before, after in itertools.pairwise(events) if before == "start")


def test_clipping_and_the_step_share_their_sums():
    def sent(clip):
        def body(model, optimizer, batch, events):
            plain_steps(model, optimizer, batch, events, steps=1, clip=clip)
            events.append(current().traffic.by_kind["gradients"])

        return train("*: data", 2, body)[0][-1]

    assert sent(clip=0.5) == sent(clip=None)


def test_buckets_follow_the_order_in_which_gradients_become_ready():
    class Backwards(nn.Module):
        """Calls its layers against the order in which they are defined."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

        def forward(self, x):
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    torch.manual_seed(0)
    models = [Backwards() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())

    def program(rank):
        model = wb.parallelize(models[rank], "*: data")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(4, 16)).sum().backward()
            optimizer.step()
        names = {id(p): name for name, p in model.named_parameters()}
        reducer = GradientReducer.of(model.layers[0].weight)
        return [[names[id(p)] for p in bucket] for bucket in reducer._buckets]

    first, second = run_ranks(program, 2)
    assert first == second
    assert [bucket[0].split(".")[1] for bucket in first] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("options", "drops"),
    [
        *((" | zero=2", drops) for drops in (True, False)),
        *(pytest.param(o, d, marks=pytest.mark.slow) for o in ("", " | zero=1", " | zero=3") for d in (True, False)),
    ],
)
def test_a_backward_that_raises_leaves_what_it_leaves_on_one_device(options, drops):
    """What its last layers have got is dropped by ``zero_grad``, or added to."""

    def body(model, optimizer, batch, events):
        inputs, targets = batch
        is_bad = False

        def check(grad):
            if is_bad:
                raise FloatingPointError("a batch to skip")

        first = next(layer for layer in model.modules() if isinstance(layer, nn.Linear))
        first.register_forward_hook(lambda layer, inputs, result: result.register_hook(check) and None)
        for number in range(4):
            is_bad = number in (1, 2)
            try:
                F.cross_entropy(model(inputs * (number + 1)), targets).backward()
            except FloatingPointError:
                if drops:
                    optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()

    assert_trains_as_one_device(body, options)


def test_what_was_under_way_when_the_world_broke_is_forgotten():
    """Ranks are stopped at different points: one behind its backward, with sums that cannot end any more."""

    def never():
        raise AssertionError("a sum of the broken world was waited for")

    def broken(model, optimizer, batch, events):
        plain_steps(model, optimizer, batch, events, steps=2)
        parameters = list(model.parameters())
        reducer = GradientReducer.of(parameters[0])
        if current().rank == 1:
            reducer._under_way.append(([], never))
            reducer._num_backwards, reducer._has_agreed = 1, False
            with local_torch():
                reduction.keep([reduction.term_of(p, p.grad) for p in parameters], never)
        current().num_rebuilds += 1
        reduction.start_reduction(parameters)()
        plain_steps(model, optimizer, batch, events, steps=3)

    def whole(model, optimizer, batch, events):
        plain_steps(model, optimizer, batch, events, steps=5)

    for one, other in zip(train("*: data", 2, broken)[1], train("*: data", 2, whole)[1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", ["", " | zero=1", " | zero=2"])
def test_a_program_may_end_with_a_backward_without_a_step(options):
    def one_step(model, optimizer, batch, events):
        plain_steps(model, optimizer, batch, events, steps=1)

    def and_a_backward(model, optimizer, batch, events):
        one_step(model, optimizer, batch, events)
        F.cross_entropy(model(batch[0]), batch[1]).backward()

    weights, expected = (train(f"*: data{options}", 2, body)[1] for body in (and_a_backward, one_step))
    assert weights and all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def test_a_wrong_sum_would_be_seen(monkeypatch):
    """The comparison above can fail: stamps that never tell a change give other weights."""
    monkeypatch.setattr(reduction, "_is_current", lambda *args: True)

    def body(model, optimizer, batch, events):
        for parts in (1, 3):
            plain_steps(model, optimizer, batch, events, parts=parts, steps=1)

    weights = train("*: data", 2, body)[1]
    expected = train("*: data", 2, body, watched=False)[1]
    assert not all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


@pytest.mark.parametrize("options", ["", " | zero=2", " | zero=3 offload=optimizer+activations recompute"])
def test_a_model_that_nobody_has_any_more_is_freed(options):
    models = [make("mlp") for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "*: data" + options)
        models[rank] = None
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        plain_steps(model, optimizer, batch_for("mlp"), [], steps=2)
        references = [weakref.ref(model), *map(weakref.ref, model.parameters())]
        del model, optimizer
        return references

    references = run_ranks(program, 2)
    gc.collect()
    assert not any(reference() is not None for of_rank in references for reference in of_rank)
