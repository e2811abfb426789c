"""Experts over the data axis: what the planner prices, chooses and writes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from tests.planning.problems import linear, machine
from tests.planning.test_bounds import assert_bounds_are_below
from workbench.core.model_costs import Extent, LayerCost, ModelCosts, OpCost
from workbench.core.rows import Layer
from workbench.core.strategy import Strategy
from workbench.cost.estimate import estimate
from workbench.cost.hardware import Link
from workbench.errors import StrategyError
from workbench.planning.candidates import not_searched
from workbench.planning.problem import Constraints, Problem
from workbench.planning.search import search

WEIGHTS = 8 * 64 * 256


def mixture(chosen: int = 2) -> ModelCosts:
    """Experts with most of the weights between two linear layers, on 16 tokens a sample."""
    shapes = {"up": (8, 64, 256)}
    flops = 2.0 * 16 * chosen * 64 * 256
    work = OpCost("matmul", flops, 4.0 * 16 * (64 + 256), inner=64, saved_bytes=4.0 * 16 * 64)
    layer = Layer("experts", "Experts", shapes, WEIGHTS, experts=8, chosen=chosen)
    experts = LayerCost(layer, (work,), (), Extent((16, 64)))
    first, last = linear("enter", 64, 64, 16), linear("head", 64, 64, 16)
    return ModelCosts((first, experts, last), (64,))


def priced(text: str, num_ranks: int = 4, **settings):
    costs = mixture()
    strategy = Strategy(text).resolve(costs.layers, num_ranks)
    return estimate(costs, strategy, machine(random.Random(1)), 64, **settings)


def test_weights_and_gradients_of_spread_experts():
    """Each of 4 ranks has a quarter of the experts, and nobody sums their gradients."""
    whole, spread, halves = priced("*: data"), priced("*: expert"), priced("*: expert:2")
    for kind in ("parameters", "optimizer"):
        saved = whole.memory[0][kind] - spread.memory[0][kind]
        per_weight = 4 if kind == "parameters" else 8
        assert saved == pytest.approx(3 / 4 * WEIGHTS * per_weight)
    gone = whole.sent.weights - spread.sent.weights
    assert gone == pytest.approx(4 * WEIGHTS * 2 * 4 * 3 / 4)  # an all-reduce among 4 ranks
    half = whole.sent.weights - halves.sent.weights
    assert half == pytest.approx(4 * 4 * (WEIGHTS * 2 * 3 / 4 - WEIGHTS / 2 * 2 / 2))


def test_tokens_travel_twice_in_forward_and_twice_in_backward():
    spread, whole = priced("*: expert"), priced("*: data")
    tokens = 64 * 16 * 2  # of which each chooses two experts, on all ranks
    assert spread.sent.activations - whole.sent.activations == pytest.approx(4 * tokens * 64 * 4 * 3 / 4)


def test_a_plan_spreads_experts_where_they_fit_only_so():
    least, more = (priced(f"*: data; experts: {choice}").peak_bytes for choice in ("expert:4", "expert:2"))
    only = Constraints(model=1, pipeline=1, zero=0, micro_batches=1, recompute=False)
    options = {"memory_bytes": (least + more) / 2, "constraints": only}
    plan = search(mixture(), machine(random.Random(1)), 4, 64, **options)
    assert str(plan.strategy).startswith("enter: data; experts: expert:4; head: data")
    assert plan.strategy.resolve(plan.problem.costs.layers, 4) == plan.resolved
    with pytest.raises(StrategyError, match="cannot pin expert"):
        search(
            mixture(),
            machine(random.Random(1)),
            4,
            64,
            constraints=replace(options["constraints"], layers="experts: expert"),
        )


def test_experts_stay_in_a_host_where_there_is_memory():
    """Over all ranks, tokens travel between hosts of two, for which every rank has its own adapter."""
    hosts = replace(machine(random.Random(1)), links=(Link(2, 1e-6, 1e10), Link(1024, 1e-5, 1e9)))
    costs, only = mixture(), Constraints(model=1, pipeline=1, zero=0, micro_batches=1, recompute=False)
    steps = {
        choice: estimate(
            costs, Strategy(f"*: data; experts: {choice} | 1x4x1").resolve(costs.layers, 4), hosts, 64
        ).step_s
        for choice in ("data", "expert:2", "expert:4")
    }
    plan = search(costs, hosts, 4, 64, constraints=only)
    assert plan.estimate.step_s == pytest.approx(min(steps.values()))
    explained = {one.choice for one in plan.explain("experts").alternatives}
    assert explained == {"data", "expert:2", "expert:4", "model"}
    least = search(costs, hosts, 4, 64, objective="memory", constraints=only)
    assert "expert:4" in str(least.strategy)


def test_numbers_of_ranks_between_a_host_and_all_are_not_searched():
    problem = Problem(mixture(), machine(random.Random(1)), 8, 64)  # hosts of two
    for ranks, missed in ((2, []), (4, ["experts over 4 ranks"]), (8, [])):
        strategy = Strategy(f"*: data; experts: expert:{ranks} | 1x8x1").resolve(problem.costs.layers, 8)
        assert not_searched(problem, strategy) == missed


def test_bounds_are_below_every_strategy_with_experts():
    only = Constraints(recompute=False, micro_batches=(1, 2), schedule="1f1b")
    assert_bounds_are_below(Problem(mixture(), machine(random.Random(1)), 4, 64, constraints=only))


@pytest.mark.sampled(4, start=2)
@pytest.mark.parametrize("limit", [inf, 3.2e6, 2.0e6, 1.6e6])
def test_expert_is_a_choice_like_others(limit):
    """Every strategy of one stage and one micro-batch, by brute force. Of 4 ranks, some limits leave spread experts
    only, beside which other layers are not what they are beside whole ones.
    """
    costs, hardware = mixture(), machine(random.Random(1))
    best = inf
    for data, model in ((4, 1), (2, 2), (1, 4)):
        splits = [["data", *(["model:column", "model:row"] if model > 1 else [])]] * 3
        spread = {4: ["expert:4", "expert:2"], 2: ["expert:4"], 1: []}[data]
        splits[1] = ["data", *spread, *(["model"] if model > 1 else [])]
        for choices, zero, sequence in product(product(*splits), range(4), (False, True) if model > 1 else (False,)):
            rows = "; ".join(f"{row.layer.name}: {choice}" for row, choice in zip(costs.rows, choices, strict=True))
            options = f"1x{data}x{model} zero={zero}{' sequence' if sequence else ''}"
            strategy = Strategy(f"{rows} | {options}".replace(" zero=0", ""))
            found = estimate(costs, strategy.resolve(costs.layers, 4), hardware, 64)
            best = min(best, found.step_s) if found.peak_bytes <= limit else best
    only = Constraints(pipeline=1, micro_batches=1, recompute=False, shards=0)
    plan = search(costs, hardware, 4, 64, memory_bytes=limit, constraints=only)
    assert plan.is_exact
    assert plan.estimate.step_s == pytest.approx(best, rel=1e-9)
