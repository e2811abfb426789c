"""One plan: what is printed and drawn is what the layout hooks execute and what the cost model prices."""

from __future__ import annotations

import itertools
import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import workbench as wb
from tests.training.models import CNN
from workbench.core.layer_extents import traced
from workbench.core.rows import Layer
from workbench.core.sharding_plan import ShardingPlan
from workbench.core.strategy import Strategy
from workbench.cost.estimate import estimate
from workbench.cost.hardware_files import load_hardware
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.costs.layer_costs import layer_costs
from workbench.training.parallel import parallelize
from workbench.training.pipelining.step import forward_backward
from workbench.training.strategies.state import state_of
from workbench.ui.grid.boxing_column import boxings_of, end_of

SPLIT = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Conv2d)
CHOICES = ["data", "model", "model:column", "model:row"]


class Heads(nn.Module):
    """Words, three layers that take one tensor, and a sum of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(12, width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(words))
        return self.o(torch.tanh(self.q(x)) * self.k(x) + self.v(x))


def chain(rng: random.Random, sizes: tuple[int, ...]) -> nn.Module:
    """Linear layers and norms in any order, of any widths."""
    widths = [rng.choice(sizes) for _ in range(5)]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), *rng.choice([[], [nn.Tanh()], [nn.LayerNorm(after)]])]
    return nn.Sequential(*layers)


def case(seed: int, sizes: tuple[int, ...], num_samples: int) -> tuple[nn.Module, torch.Tensor, str, int]:
    """A random model, its batch, a strategy and a number of ranks."""
    rng = random.Random(seed)
    kind = ("matrices", "sequences", "heads", "stages", "images")[seed % 5]
    if kind == "heads":
        model, batch = Heads(rng.choice(sizes)), torch.arange(num_samples * 5).view(num_samples, 5) % 12
    elif kind == "images":
        model, batch = CNN(), torch.ones(num_samples, 1, 8, 8)
    else:
        model = chain(rng, sizes)
        batch = torch.ones(*((num_samples, 5) if kind == "sequences" else (num_samples,)), model[0].in_features)
    names = [name for name, layer in model.named_modules() if isinstance(layer, SPLIT)]
    shared = rng.choice(CHOICES)  # of queries, keys and values
    rows = [f"{name}: {shared if name in ('q', 'k', 'v') else rng.choice(CHOICES)}" for name in names]
    degrees, num_ranks = rng.choice([("1x1x2", 2), ("1x2x1", 2), ("1x2x2", 4), ("1x1x3", 3)])
    if kind == "stages":
        degrees, num_ranks = rng.choice([("2x1x1", 2), ("2x1x2", 4), ("1x2+2x1", 4), ("1x1+1x2", 3)])
        rows[-2] += "@1"
    sequence = rng.choice(["", " sequence"])
    return model, batch, f"{'; '.join(rows)} | {degrees} mb={rng.choice([1, 2])}{sequence}", num_ranks


def square(output: torch.Tensor, _: object) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(15))
def test_hooks_send_the_bytes_of_the_plan_layer_by_layer(seed: int) -> None:
    """Uneven widths and batches, on every rank, forward and backward."""
    model, batch, strategy, num_ranks = case(seed, (5, 6, 9), 6)
    kept, make = model.state_dict(), lambda: case(seed, (5, 6, 9), 6)[0]

    def program(rank: int) -> tuple[dict, dict]:
        mine = make()
        mine.load_state_dict(kept)
        parallelize(mine, strategy)
        with wb.debug.trace() as trace:
            forward_backward(mine, square, batch, batch)
        planned, sent = {}, {}
        micro_batches = mine.plan.resolved.num_micro_batches
        for layer in mine.plan.layers_of():
            both = (layer.boxes_input + layer.boxes_output).sent_bytes(rank)
            planned[layer.layer.name] = tuple(micro_batches * each for each in both)
        for name in planned:
            sent[name] = sent_for(trace, name)
        return planned, sent

    for planned, sent in run_ranks(program, num_ranks):
        assert planned == sent, strategy


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", [seed for seed in range(15) if seed % 5 < 3])
def test_the_cost_model_prices_and_the_panel_draws_the_bytes_of_the_plan(seed: int) -> None:
    """Even parts: prices do not round."""
    model, batch, strategy, num_ranks = case(seed, (12, 24), 24)
    costs = layer_costs(model, batch, loss_fn=square, targets=batch)
    resolved = Strategy(strategy).resolve(costs.layers, num_ranks)
    extents = traced(costs.layers, costs.rows, costs.sample_shape)
    plan = ShardingPlan(costs.layers, resolved)
    num_micro_batches = resolved.num_micro_batches
    layers = plan.layers_of(extents, 24 // num_micro_batches)
    edges = [edge for layer in layers for edge in (layer.boxes_input, layer.boxes_output)]
    planned = num_micro_batches * sum(edge.forward_bytes + edge.backward_bytes for edge in edges)
    assert estimate(costs, resolved, load_hardware("h200"), 24).sent.activations == pytest.approx(planned, rel=1e-9)
    drawn = boxings_of(plan, extents, 24)
    end = end_of(drawn, resolved, is_cross_entropy=False)
    assert num_micro_batches * (drawn.bytes_per_micro_batch + end.num_bytes) == planned


class NormsFirst(nn.Module):
    """A transformer that lists its norms first, and calls its last block twice."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, 6)
        self.downs = nn.ModuleList(nn.Linear(24, width) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(width, 24) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (0, 1, 1):
            x = self.downs[block](self.ups[block](self.norms[block](x)).relu())
        return self.head(x)


BY_CALLS = "norms: data; ups: model:column; downs: model:row; head: "


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", [f"{BY_CALLS}data", f"{BY_CALLS}model:column | 1x2x2 mb=2"])
def test_hooks_prices_and_dry_runs_go_by_the_order_of_calls(strategy: str) -> None:
    batch, ranks = torch.ones(24, 12), 4 if "x" in strategy else 2
    torch.manual_seed(0)
    kept = NormsFirst().state_dict()

    def program(rank: int) -> tuple[list[float], list[dict[str, tuple[int, int]]]]:
        model = NormsFirst()
        model.load_state_dict(kept)
        parallelize(model, strategy)
        found, losses = [], []
        for _ in range(2):
            with wb.debug.trace() as trace:
                losses.append(forward_backward(model, square, batch, batch).item())
            found.append({name: sent_for(trace, name) for name, _ in model.named_modules()})
        times = model.plan.resolved.num_micro_batches
        for planned in model.plan.layers_of():
            edge = planned.boxes_input + planned.boxes_output
            assert found[1][planned.layer.name] == tuple(times * each for each in edge.sent_bytes(rank))
        return losses, found

    results = run_ranks(program, ranks)
    assert results[0][0] == pytest.approx([square(NormsFirst.forward(loaded(kept), batch), 0).item()] * 2)
    first, later = (sum(sum(map(sum, found[step].values())) for _, found in results) for step in (0, 1))
    assert later < first, "by the order of calls, sums go to samples"
    costs = layer_costs(NormsFirst(), batch, loss_fn=square, targets=batch)
    resolved = Strategy(strategy).resolve(costs.layers, ranks)
    assert estimate(costs, resolved, load_hardware("h200"), 24).sent.activations == pytest.approx(later, rel=1e-9)
    counted = wb.planner.dry_run(NormsFirst, strategy, ranks, batch, batch, square).by_kind
    assert sum(size for kind, size in counted.items() if kind != "gradients") == later


@pytest.mark.parametrize("calls_module", [False, True])
def test_after_a_rebuild_all_ranks_learn_the_order_of_calls_anew(calls_module: bool) -> None:
    """Rank 1 was interrupted in the first call of the model, which has ended on rank 0."""
    torch.manual_seed(0)
    kept = NormsFirst().state_dict()
    batch = torch.linspace(-1, 1, 24 * 12).reshape(24, 12)

    def program(rank: int, breaks_off: bool) -> list[float]:
        model = parallelize(loaded(kept), f"{BY_CALLS}data")

        def step() -> float:
            if not calls_module:
                return forward_backward(model, square, batch, batch).item()
            loss = square(model(batch), batch)
            loss.backward()
            return loss.item()

        losses = [step()]
        if breaks_off and rank == 1:
            state = state_of(model)
            state.layouts.plan.forget_calls()
            state.compared.clear()
        if breaks_off:
            current().rejoin(2, current().transport)
        return losses + [step() for _ in range(3)]

    broken, whole = (run_ranks(lambda rank, b=b: program(rank, b), 2) for b in (True, False))
    assert broken[0] == broken[1] == pytest.approx(whole[0], rel=1e-6)


def loaded(weights: dict[str, torch.Tensor]) -> NormsFirst:
    model = NormsFirst()
    model.load_state_dict(weights)
    return model


def sent_for(trace: Any, name: str) -> tuple[int, ...]:
    records = [record for record in trace.records if record.function == name]
    ways = ("forward", "backward")
    return tuple(sum(record.sent_bytes for record in records if record.direction == way) for way in ways)


def test_sums_of_gradients_in_16_bits_have_the_bytes_of_the_plan() -> None:
    one = nn.Linear(8, 4).to(torch.bfloat16)

    def program() -> tuple[int, int]:
        model = parallelize(deepcopy(one), "data")
        model(torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer = torch.optim.SGD(model.parameters())
        with wb.debug.trace() as trace:
            optimizer.step()
        return model.plan.gradient_bytes(model.plan.layers_of()[0]), trace.sent_bytes

    (planned, sent), (_, other) = run_ranks(program, 2)
    assert planned == sent + other == 2 * 36 * 2


def test_the_gradient_of_a_shared_weight_is_summed_once() -> None:
    words, head = (Layer(name, "Linear", {"weight": (10, 4)}, 40) for name in ("words", "head"))
    layers = [words, replace(head, tied_to="words")]
    plan = ShardingPlan(layers, Strategy("*: data").resolve(layers, 2))
    assert [plan.gradient_bytes(layer) for layer in plan.layers_of()] == [2 * 4 * 40, 0]


def test_a_plan_prints_before_and_after_the_first_batch() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)) for _ in range(4)), nn.Linear(8, 2))

    kept = make().state_dict()

    def program() -> tuple[str, str]:
        model = make()
        model.load_state_dict(kept)
        parallelize(model, "*: model; 4: data")
        before = str(model.plan)
        model(torch.ones(4, 8)).sum().backward()
        return before, str(model.plan)

    before, after = run_ranks(program, 2)[0]
    rows = [[" ".join(line.split()) for line in text.splitlines()] for text in (before, after)]
    assert rows[0][2] == "0.1 0-1 S(1) of 8 x 32 S(1) P -> B, all-reduce ? 64 B"
    assert rows[0][3] == "... the same 2 times more, to 2.1"
    assert before.endswith("the first batch shows the shapes of activations")
    assert rows[1][2] == "0.1 0-1 S(1) of 8 x 32 S(1) P -> B, all-reduce 128 B + 128 B 64 B"
    assert rows[1][-1].startswith("between layers the busiest rank sends 448 B + 448 B (forward + backward);")


def test_a_copy_has_the_plan_and_another_strategy_another_one() -> None:
    class Planned(nn.Linear):
        plan = "mine"

    def program() -> None:
        assert parallelize(Planned(2, 2), "data").plan == "mine"
        model = parallelize(nn.Linear(2, 2), "data")
        first, copied = model.plan, deepcopy(model)
        assert copied.plan is first
        assert [parallelize(each, "model").plan is first for each in (model, copied)] == [False, False]

    run_ranks(program, 1)


class Listed(nn.Module):
    """A list of experts behind a layer; all take all samples, all take all tokens, or each those that choose it."""

    def __init__(self, use: str, depth: int = 2) -> None:
        super().__init__()
        self.first, self.gate, self.use = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Linear(8, 4), use
        layers = [[nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)] if depth > 1 else [nn.Linear(8, 8)] for _ in range(4)]
        self.experts = nn.ModuleList(nn.Sequential(*each) for each in layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        shape, x = x.shape, x.reshape(-1, 8) if self.use == "tokens" else x
        chosen = self.gate(x).softmax(-1)
        if "picks" not in self.use:
            return (x + sum(expert(x) * chosen[..., k, None] for k, expert in enumerate(self.experts))).reshape(shape)
        for k, expert in [*enumerate(self.experts)] * self.use.count("picks"):
            rows = torch.where(chosen.argmax(-1) == k)[0]
            x = x.index_add(0, rows, expert(x[rows]))
        return x


LISTED = [  # use, strategy, ranks, shape of the batch, layers of an expert
    ("samples", "*: data; *: expert", 2, (16, 8), 2),
    ("samples", "*: data; *: expert", 2, (16, 4, 8), 2),
    ("samples", "*: data; *: expert | bf16", 2, (16, 8), 2),
    ("samples", "*: data; *: expert | bf16", 2, (16, 8), 1),
    ("samples", "*: data; *: expert:2", 4, (16, 8), 2),
    ("tokens", "*: data; *: expert", 2, (16, 4, 8), 2),
    ("tokens", "*: data; *: expert", 2, (16, 4, 8), 1),
    ("tokens", "*: data; *: expert:2", 4, (16, 4, 8), 2),
    ("picks", "*: data; *: expert", 2, (16, 8), 2),
    ("picks", "*: data; *: expert:2", 4, (16, 8), 2),
    ("picks, picks", "*: data; *: expert", 2, (16, 8), 2),
]


@pytest.mark.filterwarnings("ignore:.*gather")
@pytest.mark.parametrize(("use", "strategy", "ranks", "shape", "depth"), LISTED)
def test_a_list_of_experts_lies_on_its_ranks_and_what_goes_there_counts(use, strategy, ranks, shape, depth):
    base = Listed(use, depth)
    models = [deepcopy(base) for _ in range(ranks)]

    def program(rank):
        model = wb.parallelize(models[rank], strategy)
        with wb.debug.trace() as trace:
            model(torch.randn(*shape, generator=torch.Generator().manual_seed(0))).sum().backward()
        plans = model.plan.layers_of()
        for name, parameter in model.named_parameters():
            planned = next(each for each in plans if each.layer.name == name.rpartition(".")[0])
            assert planned.input_layout.placement == parameter.placement, name
        edges = [edge for each in plans for edge in (each.boxes_input, each.boxes_output)]
        return (
            sum(sum(edge.sent_bytes(rank)) for edge in edges),
            sum(r.sent_bytes for r in trace.records),
            str(model.plan),
        )

    found = run_ranks(program, ranks)
    for planned, sent, text in found:
        assert (planned == 0) if "picks" in use else (planned == sent > 0)
        assert ("not counted: rows that the model picks for experts" in text) == ("picks" in use)
        assert ("between layers the busiest rank sends" in text) == ("picks" not in use)
    if (use, strategy, shape) == ("samples", "*: data; *: expert", (16, 8)):
        costs = layer_costs(base, torch.ones(16, 8), loss_fn=lambda output, _: output.sum(), targets=torch.ones(16))
        strategy = Strategy("*: data; *: expert").resolve(costs.layers, 2)
        predicted = estimate(costs, strategy, load_hardware("a100-80g-selene"), 16)
        assert predicted.sent.activations == sum(planned for planned, _, _ in found) and predicted.boxing_s > 0
