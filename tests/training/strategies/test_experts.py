"""Experts split over ranks: each rank holds its part, and the numbers are those of one device."""

import copy
import functools
import gc
import math
import weakref

import pytest
import torch

import workbench as wb
from tests.training.strategies.mixtures import Mixture, Pool, batch_of
from workbench.core.strategy import Strategy
from workbench.errors import ExplicitBoxingError, StrategyError
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.costs.dry_run import dry_run
from workbench.training.parallel import describe

STEPS = {"*: expert": 20, "*: model; *: expert:4 | 1x2x2": 20}
SPLIT = {
    "*: model | 1x1x4": 2,
    "*: expert": 2,
    "*: model; *: expert:4 | 1x2x2": 2,
    "*: expert:2 | zero=2": 4,
    "*: model | 1x2x2 zero=3": 4,
    "*: expert:2 | zero=3": 4,
    "*: expert | recompute": 2,
    "*: model; *: expert | 1x2x2 sequence": 4,
    "*: model; *: expert; shared: data@1 | 2x1x2": 4,
    "*: expert | context=2": 2,
    "*: model; *: expert:4 | 1x2x2 context=2": 2,
    "*: data; shared: data@1; head: data@1 | 2x2x1": 8,
    "*: data | zero=3": 8,
    "*: model; pool: data | 1x2x2": 8,
}
"""The experts that a rank of their stage holds, of 8, on 4 ranks."""


LISTED = {
    "*: model; *: expert:4 | 1x2x2": 2,
    "*: expert:2 | zero=1": 4,
    "*: expert; head: data@1 | 2x2x1": 4,
}
"""The experts of a list that a rank of their stage holds."""
pytestmark = pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")


def made(**settings) -> Mixture:
    torch.manual_seed(5)
    return Mixture(**settings).double()


def trained(model, strategy, steps, samples=8):
    """Losses of all steps; gradients of the first one and weights after the last, whole."""
    model = wb.parallelize(model, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, grads = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*batch_of(step, samples))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        grads = grads or {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, grads, {name: p.full_tensor().detach() for name, p in model.named_parameters()}


@functools.cache
def on_one_device(steps, samples=8, **settings):
    alone = made(**settings)
    (truth,) = run_ranks(lambda: trained(alone, "*: data", steps, samples), 1)
    return truth


def assert_equal(found, truth):
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("strategy", SPLIT)
def test_split_experts_train_as_on_one_device(strategy):
    models, steps = [made() for _ in range(4)], STEPS.get(strategy, 3)

    def program(rank):
        found = trained(models[rank], strategy, steps)
        return found, models[rank].pool.up

    for found, weight in run_ranks(program, 4):
        assert_equal(found, on_one_device(steps))
        if not weight.is_placeholder and "zero=3" not in strategy:
            assert len(weight.to_local()) == SPLIT[strategy]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", LISTED)
def test_listed_experts_are_spread_whole(strategy):
    models = [made(listed=True) for _ in range(4)]

    def program(rank):
        found = trained(models[rank], strategy, 2)
        return found, [expert[0].weight.is_placeholder for expert in models[rank].experts]

    for found, elsewhere in run_ranks(program, 4):
        assert_equal(found, on_one_device(2, listed=True))
        assert elsewhere.count(False) in (LISTED[strategy], 0)


class Expert(torch.nn.Module):
    """With a list of experts of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 1)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        inner = self.first(x)
        return self.last(sum(expert(inner).relu() * inner for expert in self.experts))


class Reaching(torch.nn.Module):
    """Calls the layers of an expert, or the expert."""

    def __init__(self, into):
        super().__init__()
        self.into, self.router = into, torch.nn.Linear(6, 2)
        self.experts = torch.nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x):
        odds = self.router(x).softmax(-1)
        call = Expert.forward if self.into else torch.nn.Module.__call__
        return (
            sum(call(expert, x) * odds[:, number, None] for number, expert in enumerate(self.experts)).square().mean()
        )


@pytest.mark.parametrize("into", [False, True])
def test_experts_of_experts_and_layers_of_an_expert_that_are_called_by_themselves(into):
    torch.manual_seed(3)
    alone = Reaching(into).double()
    models, x = [copy.deepcopy(alone) for _ in range(4)], torch.randn(8, 6).double()
    truth = alone(x)
    truth.backward()
    weights = torch.nn.utils.parameters_to_vector([p.grad for p in alone.parameters()])

    def program(rank):
        model = wb.parallelize(models[rank], "*: expert:2")
        loss = model(x)
        loss.backward()
        grads = torch.nn.utils.parameters_to_vector([p.grad.full_tensor() for p in model.parameters()])
        return loss.item(), grads, [expert.first.weight.is_placeholder for expert in model.experts]

    for loss, grads, elsewhere in run_ranks(program, 4):
        assert_equal([loss, grads], [truth.item(), weights])
        assert elsewhere.count(True) == 1


def test_uneven_parts_and_ranks_without_tokens_or_experts():
    """3 samples on 4 ranks; 5 experts under ``model``, which may hold different numbers."""
    for experts, strategy in ((8, "*: expert"), (8, "*: data"), (5, "*: model | 1x2x2"), (3, "*: model | 1x1x4")):
        models = [made(experts=experts) for _ in range(4)]
        for found in run_ranks(lambda rank: trained(models[rank], strategy, 2, 3), 4):  # noqa: B023 - called here
            assert_equal(found, on_one_device(2, 3, experts=experts))


@pytest.mark.parametrize("strategy", ["*: data", "*: data | 1x1x2"])
def test_experts_that_are_whole_run_on_the_tokens_of_their_rank(strategy):
    """Only what the mixture says of all tokens is exchanged: how often an expert is chosen, and the mean odds."""
    models = [made() for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        with wb.debug.trace() as trace:
            model(*batch_of(0)).backward()
        return {(record.function, record.shape) for record in trace.records if record.wire_bytes}

    assert run_ranks(program, 2)[0] == {("mul", (8,))}


def test_what_does_not_fit_is_named_at_once():
    layers = describe(made(experts=6))
    text = "*: data; pool: expert:4; head: expert; shared: expert | 1x2x2"
    with pytest.raises(StrategyError) as caught:
        Strategy(text).resolve(layers, 4)
    for words in (
        "row 'head: expert' covers no experts; experts are in pool", "row 'shared: expert'",
        "pool: 6 experts over 4 ranks", "write 'pool: expert:2'",
    ):  # fmt: skip
        assert words in str(caught.value)
    with pytest.raises(StrategyError, match="experts over 3 ranks, but data x model is 2 x 2"):
        Strategy("*: expert:3 | 1x2x2").resolve(layers, 4)
    with pytest.raises(StrategyError, match="the model has none"):
        Strategy("*: expert").resolve([layer for layer in layers if layer.name != "pool"], 2)


def test_text_of_rows():
    for text in ("*: model; *.experts: expert", "a.experts: expert:8@1", "*: expert"):
        assert str(Strategy(text)) == text
    assert str(Strategy("expert:4 | 1x4x1")) == "*: expert:4 | 1x4x1"
    with pytest.raises(StrategyError, match="expert:N"):
        Strategy("*: expert:row")


def test_explicit_boxing_names_the_exchange_of_tokens():
    models, x, chosen = [made() for _ in range(2)], torch.randn(6, 8).double(), torch.arange(12).view(6, 2) % 8

    def program(rank):
        model, everywhere = wb.parallelize(models[rank], "*: expert"), wb.placement.all("cpu")
        given = [wb.to_global(t, everywhere, "B").to_global(sbp="S(0)") for t in (x, chosen, x[:, :2])]
        with wb.debug.explicit_boxing(), pytest.raises(ExplicitBoxingError, match="pool: tokens go to experts"):
            model.pool(*given)

    run_ranks(program, 2)


def test_a_module_with_a_forward_of_its_own_is_no_module_of_experts():
    """The tripled results of all experts, not of some of them without the factor."""
    models = [made() for _ in range(2)]
    for model in models:
        model.pool.forward = functools.partial(lambda forward, *args: 3 * forward(*args), model.pool.forward)
    one, batch = made(), batch_of(0)
    with torch.no_grad():
        one.pool.down.mul_(3)
    expected = run_ranks(lambda: wb.parallelize(one.eval(), "*: data")(*batch).item(), 1)
    with pytest.warns(UserWarning, match=r"less than half of the weights: .* in pool \(Pool\)"):
        found = run_ranks(lambda rank: wb.parallelize(models[rank].eval(), "*: model")(*batch).item(), 2)
    assert found == pytest.approx(2 * expected)


def test_only_what_sums_experts_counts_as_experts():
    class Dense(torch.nn.Module):
        """Three arguments, but each token gets the sum of all experts."""

        def __init__(self):
            super().__init__()
            self.num_experts = 4
            self.weight = torch.nn.Parameter(torch.randn(4, 8, 8))

        def forward(self, x, chosen, weights):
            return torch.einsum("th,ehk->tk", x, self.weight)

    found = {layer.name: layer.experts for layer in describe(torch.nn.ModuleList([made(), Dense()]))}
    assert {name: count for name, count in found.items() if count} == {"0.pool": 8}


class Odd(Pool):
    """Each token's result depends on the number of tokens, on a random draw, or leaves something in the module."""

    def __init__(self, capacity=None, p=0.0, storing=None):
        super().__init__(8)
        self.capacity, self.p, self.storing = capacity, p, storing
        self.calls, self.kept = 0, {"loads": []}

    def forward(self, x, chosen, weights):
        if self.storing == "number":
            self.calls += 1
        elif self.storing == "list":
            self.kept["loads"].append(chosen)
        elif self.storing == "result":
            self.loss = weights.sum()
        if self.capacity is not None:
            taken = torch.nn.functional.one_hot(chosen.flatten(), self.num_experts).cumsum(0)
            dropped = (taken > self.capacity(chosen.numel(), self.num_experts)).any(-1).view_as(weights)
            weights = weights.masked_fill(dropped, 0)
        return super().forward(torch.nn.functional.dropout(x, self.p, self.training), chosen, weights)


@pytest.mark.parametrize(
    "settings",
    [
        {"capacity": lambda choices, experts: math.ceil(1.25 * choices / experts)},
        {"capacity": lambda choices, experts: int(2 * choices / experts)},
        {"capacity": lambda choices, experts: max(4, choices // experts)},
        {"capacity": lambda choices, experts: 20},
        {"p": 0.5},
        {"storing": "number"},
        {"storing": "list"},
        {"storing": "result"},
    ],
)
def test_experts_that_drop_tokens_draw_or_keep_something_are_not_run_in_parts(settings):
    """Whatever other modules of their class do."""
    model = torch.nn.ModuleList([Odd(), Odd(**settings), Odd()])
    assert [layer.experts for layer in describe(model)] == [8, 0, 8]
    assert not model[1].kept["loads"]


def test_a_verdict_keeps_no_experts():
    """A function among their attributes, which counts, holds them."""
    model = Pool(4)
    model.act = lambda x, experts=model: x / experts.num_experts
    assert describe(model)[0].experts == 4
    known = weakref.ref(model)
    del model
    gc.collect()
    assert known() is None


def test_what_experts_keep_after_all_is_an_error():
    """Such as in evaluation only."""
    model = torch.nn.Sequential(Odd())
    x, chosen, weights = torch.randn(6, 8), torch.arange(12).view(6, 2) % 8, torch.ones(6, 2)

    def program():
        wb.parallelize(model, "*: data")
        model[0].storing = "number"
        given = [wb.to_global(each, wb.placement.all("cpu"), "S(0)") for each in (x, chosen, weights)]
        with pytest.raises(StrategyError, match="Odd: its forward keeps 'calls'"):
            model[0](*given)

    run_ranks(program, 1)


LOADED = {
    "*: expert": ("*: data | 1x4x1 context=2 zero=1", "*: model; *: expert:4 | 1x2x2", "*: expert:2 | zero=1"),
    "*: data | 1x4x1 context=2 zero=1": ("*: expert | context=4", "*: model | 1x2x2"),
}
"""Strategies that save a checkpoint, and others that load it."""


@pytest.mark.parametrize("listed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_goes_on_from_a_checkpoint_under_any_other_strategy(tmp_path, listed):
    untrained = made(listed=listed).eval()

    def step(model, optimizer, number):
        model(*batch_of(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return {name: p.full_tensor().detach() for name, p in model.named_parameters()}

    def spread(strategy):
        model = wb.parallelize(copy.deepcopy(untrained), strategy)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def program():
        for number, (saved, others) in enumerate(LOADED.items()):
            model, optimizer = spread(saved)
            step(model, optimizer, 0)
            wb.checkpoint.save(tmp_path / str(number), model=model, optimizer=optimizer)
            expected = step(model, optimizer, 1)
            for strategy in others:
                model, optimizer = spread(strategy)
                wb.checkpoint.load(tmp_path / str(number), model=model, optimizer=optimizer)
                assert_equal([step(model, optimizer, 1)], [expected])

    run_ranks(program, 4)


class RoundRobin(torch.nn.Module):
    """All experts are chosen alike often."""

    def __init__(self):
        super().__init__()
        self.first, self.pool = torch.nn.Linear(6, 8), Pool(8)

    def forward(self, x):
        tokens = self.first(x).flatten(0, 1)
        chosen = torch.arange(2 * len(tokens)).view(-1, 2) % 8
        return self.pool(tokens, chosen, self.first(x).flatten(0, 1)[:, :2].abs())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["*: expert", "*: model; *: expert:4 | 1x2x2", "*: expert:2"])
def test_a_dry_run_counts_what_is_sent_if_experts_are_chosen_alike_often(strategy):
    x = torch.randn(8, 4, 6)
    torch.manual_seed(1)
    models = [copy.deepcopy(model) for model in [RoundRobin()] for _ in range(4)]

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        current().traffic.reset()
        wb.forward_backward(model, lambda output, _: output.square().mean(), x, torch.zeros(8))
        return current().traffic.by_kind, model.plan

    found = dry_run(RoundRobin, strategy, 4, x, torch.zeros(8), lambda output, _: output.square().mean())
    results = run_ranks(program, 4)
    sent = sum(by_kind["all-to-all"] for by_kind, _ in results)
    assert found.by_kind["all-to-all"] == sent
    if strategy == "*: expert":
        layers = results[0][1].layers_of()
        edges = [edge for layer in layers for edge in (layer.boxes_input, layer.boxes_output)]
        asked = 4 * 6 * 8  # each rank says how many tokens it has for the 6 experts of others
        assert sum(edge.forward_bytes + edge.backward_bytes for edge in edges) == sent - asked > 0
