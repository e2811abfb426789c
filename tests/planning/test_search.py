"""The search: equal to brute force on small problems, close to it where it takes short cuts, and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import inf

import numpy as np
import pytest

from tests.planning.brute_force import best_value, every_strategy
from tests.planning.problems import gelu, linear, machine, norm, random_problem, table
from workbench.core.model_costs import LayerCall, ModelCosts, find_blocks
from workbench.core.strategy import Strategy
from workbench.cost.estimate import estimate
from workbench.cost.hardware import Hardware
from workbench.errors import StrategyError
from workbench.planning.best_first_search import search_best_first
from workbench.planning.incumbents import Incumbents
from workbench.planning.plan import Plan
from workbench.planning.problem import Constraints, Problem
from workbench.planning.search import candidates_if_few, run, search, search_exhaustively, solve, stage_assignments
from workbench.planning.write_strategy import write_strategy

QUICK = range(8)
MANY = [seed for seed in range(8, 240) if seed != 118]  # that one has more strategies than an exact search takes


def assert_equals_brute_force(seed: int) -> None:
    problem = random_problem(seed)
    incumbents, is_exact = run(problem)
    assert is_exact
    expected, best = best_value(problem), incumbents.best
    if best is not None and best.strategy.options.recompute not in ("", "full"):
        assert incumbents.best_value < expected  # that of a strategy which the brute force does not write
    else:
        assert incumbents.best_value == pytest.approx(expected, rel=1e-9)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", QUICK)
def test_small_problems_equal_brute_force(seed: int) -> None:
    assert_equals_brute_force(seed)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["zero_bubble_v", "dualpipe_v"])
def test_schedules_in_a_v_equal_brute_force(schedule: str, recompute: bool) -> None:
    """Four layers on two ranks; the second and the third one are on the same rank."""
    for seed in range(3):
        draw = random.Random(seed)
        widths = [draw.choice([8, 33, 128]) for _ in range(5)]
        rows = tuple(linear(f"fc{k}", a, b) for k, (a, b) in enumerate(pairwise(widths)))
        constraints = Constraints(schedule=schedule, recompute=recompute, pipeline=2)
        problem = Problem(
            ModelCosts(rows, (widths[-1],)), machine(draw, 1e9), 2, 8, "throughput", 1e9, constraints=constraints
        )
        found = run(problem)[0]
        assert found.best is not None and found.best.strategy.stages_by_slice() == [[0, 3], [1, 2]]
        assert found.best_value == pytest.approx(best_value(problem), rel=1e-9)


def test_contexts_that_a_constraint_names_are_searched() -> None:
    problem = random_problem(1)
    problem = replace(problem, constraints=replace(problem.constraints, context=(1, 2)))
    assert run(problem)[0].best_value == pytest.approx(best_value(problem), rel=1e-9)
    assert {strategy.options.context for strategy, _ in every_strategy(problem)} == {1, 2}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_small_problems_equal_brute_force() -> None:
    for seed in MANY:
        assert_equals_brute_force(seed)


def test_brute_force_finds_what_the_search_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is not the search: one that knows no model parallelism is found out."""
    problem = replace(random_problem(2), objective="throughput", memory_bytes=inf)
    lame = replace(problem, constraints=replace(problem.constraints, model=1, pipeline=1))
    assert run(lame)[0].best_value > best_value(problem) * (1 + 1e-9)


def test_short_cuts_are_close_to_the_best() -> None:
    """The search of large problems, on small ones (``benchmarks.planner`` says how close it is on more of them)."""
    ratios = []
    for seed in range(15):
        problem = random_problem(seed)
        exact, short = Incumbents(problem), Incumbents(problem)
        search_exhaustively(problem, candidates_if_few(problem) or [], exact)
        search_best_first(problem, short)
        if exact.best is not None:
            ratios.append(short.best_value / exact.best_value)
    assert len(ratios) > 10
    assert max(ratios) < 1.1
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 0.8 * len(ratios)


def least_bytes(problem: Problem) -> float:
    """The smallest peak of all strategies."""
    problem = replace(problem, objective="memory", memory_bytes=inf)
    search_exhaustively(problem, candidates_if_few(problem) or [], incumbents := Incumbents(problem))
    return incumbents.best_value


@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize("seed", [18, 22, 33, 34])
def test_short_cuts_find_what_just_fits(seed: int) -> None:
    """The sums of bytes do not show which of these holds least, so the search found nothing for them."""
    problem = random_problem(seed)
    problem = replace(problem, memory_bytes=least_bytes(problem) * 1.0001)
    search_best_first(problem, incumbents := Incumbents(problem))
    assert incumbents.best is not None
    assert incumbents.best.estimate.peak_bytes <= problem.memory_bytes


def test_the_best_first_search_finds_what_fits_where_the_smallest_choices_do_not() -> None:
    problem = random_problem(43)
    search_best_first(problem, incumbents := Incumbents(problem))
    assert incumbents.best is not None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", QUICK)
def test_what_is_hopeless_fits_nowhere(seed: int) -> None:
    problem = random_problem(seed)
    least = least_bytes(problem)
    assert not replace(problem, memory_bytes=least).is_infeasible
    assert replace(problem, memory_bytes=least / 100).is_infeasible


def test_what_the_search_adds_up_is_the_estimate() -> None:
    problem = replace(random_problem(1), memory_bytes=inf, objective="throughput")
    plan = solve(problem)
    resolved = plan.strategy.resolve(problem.costs.layers, problem.num_ranks)
    again = estimate(problem.costs, resolved, problem.hardware, problem.batch_size, optimizer=problem.optimizer)
    assert again.step_s == pytest.approx(plan.found.estimate.step_s, rel=1e-9)
    assert again.peak_bytes == pytest.approx(plan.found.estimate.peak_bytes, rel=1e-9)
    assert again.boxed_bytes == pytest.approx(plan.found.estimate.boxed_bytes, rel=1e-9)


def decoder(num_blocks: int = 2) -> ModelCosts:
    """Words, blocks of a norm and two products, a head."""
    rows = [table("words", 500, 64, 16)]
    for block in range(num_blocks):
        rows.append(norm(f"b.{block}.norm", 64, 16))
        rows.append(linear(f"b.{block}.up", 64, 256, 16, (gelu(256, 16),)))
        rows.append(linear(f"b.{block}.down", 256, 64, 16))
    rows.append(linear("head", 64, 500, 16))
    return ModelCosts(tuple(rows), (16,), "fp32", find_blocks(rows))


def called_again(num_calls: int) -> ModelCosts:
    """Two products that are called several times by turns, and a head."""
    up, down, head = linear("up", 64, 256, 1, (gelu(256),)), linear("down", 256, 64), linear("head", 64, 50)
    order = [*[up, down] * num_calls, head]
    calls = tuple(LayerCall(row, place, place - 1 if place else None) for place, row in enumerate(order))
    rows = (*(replace(row, own=row.own * num_calls, after=row.after * num_calls) for row in (up, down)), head)
    return ModelCosts(rows, (64,), calls=calls)


def problem_of_calls(num_calls: int, seed: int = 3) -> Problem:
    """On two ranks."""
    constraints = Constraints(micro_batches=(1, 2), zero=(0, 1), recompute=False)
    slow = machine(random.Random(seed), 1e9)
    return Problem(called_again(num_calls), slow, 2, 8, memory_bytes=1e9, constraints=constraints)


def test_what_the_search_adds_up_has_the_boxings_of_every_call() -> None:
    problem = problem_of_calls(6)
    pinned = replace(problem.constraints, model=2, layers="up: model:column; down: model:row")
    plan = solve(replace(problem, constraints=pinned))
    once = estimate(replace(problem.costs, calls=()), plan.resolved, problem.hardware, problem.batch_size)
    assert plan.found.estimate.sent.activations > 2 * once.sent.activations
    assert plan.found.estimate.boxed_bytes == pytest.approx(plan.estimate.boxed_bytes, rel=1e-9)
    assert plan.found.estimate.step_s == pytest.approx(plan.estimate.step_s, rel=1e-9)
    assert plan.why_not(plan.strategy).reason == "equal"


@pytest.mark.parametrize("seed", range(4))
def test_layers_that_are_called_again_equal_brute_force(seed: int) -> None:
    """The search of large problems is close, too, to the best without stages."""
    problem = problem_of_calls(5, seed)
    exact, is_exact = run(problem)
    assert is_exact and exact.best_value == pytest.approx(best_value(problem), rel=1e-9)
    problem = replace(problem, constraints=replace(problem.constraints, pipeline=1))
    search_best_first(problem, short := Incumbents(problem))
    assert short.best_value <= 1.1 * run(problem)[0].best_value


def hardware(memory_bytes: float = 4e6) -> Hardware:
    """A made-up machine."""
    return machine(random.Random(3), memory_bytes)


def test_written_strategies_mean_what_was_found() -> None:
    """Every strategy of a small problem comes back from its text."""
    problem = replace(
        random_problem(3),
        batch_size=4,
        objective="throughput",
        constraints=Constraints(micro_batches=1, zero=0, recompute=False),
    )
    for resolved, _ in list(every_strategy(problem))[::7]:
        text = str(write_strategy(problem, resolved))
        assert Strategy(text).resolve(problem.costs.layers, problem.num_ranks).layers == resolved.layers


def test_stages_are_cut_between_blocks() -> None:
    plan = search(decoder(6), hardware(), 4, 4, constraints=Constraints(pipeline=4))
    assert not plan.is_exact
    stage_of = {layer.name: layer.stage for layer in plan.resolved.layers}
    for block in range(6):
        assert len({stage for name, stage in stage_of.items() if name.startswith(f"b.{block}.")}) == 1


def test_a_head_that_is_the_table_is_priced_as_an_estimate_prices_it() -> None:
    *rows, head = decoder(4).rows
    costs = replace(decoder(4), rows=(*rows, replace(head, layer=replace(head.layer, tied_to="words"))))
    plan = search(costs, hardware(), 4, 8, constraints=Constraints(pipeline=2, recompute=False))
    found, again = plan.found.estimate, plan.estimate
    assert found.boxed_bytes == pytest.approx(again.boxed_bytes, rel=1e-9)
    assert found.step_s == pytest.approx(again.step_s, rel=1e-9)
    assert found.peak_bytes == pytest.approx(again.peak_bytes, rel=1e-9)
    assert plan.layers["parameters"].sum() == costs.num_parameters


@pytest.mark.parametrize("zero", [0, 1])
def test_rows_of_data_alone_need_no_model_axis(zero: int) -> None:
    """They divide the batch over either axis for the same price, and only one of them is read without a question."""
    found = search(decoder(4), hardware(), 8, 32, constraints=Constraints(layers="*: data", pipeline=2, zero=zero))
    others = [each.strategy.degrees for each in found.others]
    assert found.resolved.degrees == (2, 4, 1) and (2, 1, 4) in others


def test_every_cut_into_stages() -> None:
    assert list(stage_assignments(3, 2)) == [(0, 1, 1), (0, 0, 1)]
    assert list(stage_assignments(3, 1)) == [(0, 0, 0)]
    assert len(list(stage_assignments(6, 3))) == 10


@pytest.mark.sampled(6, start=4)
@pytest.mark.parametrize(
    ("constraints", "holds"),
    [
        (Constraints(pipeline=2), lambda plan: plan.resolved.degrees[0] == 2),
        (Constraints(data=(1, 2)), lambda plan: plan.resolved.degrees[1] in (1, 2)),
        (Constraints(model=4), lambda plan: plan.resolved.degrees[2] == 4),
        (Constraints(micro_batches=4), lambda plan: plan.resolved.num_micro_batches == 4),
        (Constraints(zero=2), lambda plan: plan.resolved.options.zero == 2),
        (Constraints(recompute=True), lambda plan: plan.resolved.options.recompute),
        (Constraints(pipeline=2, schedule="1f1b"), lambda plan: plan.resolved.schedule == "1f1b"),
        (Constraints(model=2, sequence=True), lambda plan: plan.resolved.options.sequence),
        (Constraints(layers="head: data"), lambda plan: plan.resolved.layers[-1].parallel == "data"),
        (
            Constraints(
                model=4, layers="b.*.up: model:row", zero=0, recompute=False
            ),  # else all of thousands are priced
            lambda plan: plan.resolved.layers[2].split == "row",
        ),
        (Constraints(pipeline=2, layers="b.1: data@1"), lambda plan: plan.resolved.layers[-2].stage == 1),
    ],
)
def test_constraints_are_kept(constraints: Constraints, holds: Callable[[Plan], bool]) -> None:
    assert holds(search(decoder(), hardware(), 4, 4, constraints=constraints))


@cache
def best_by(objective: str) -> Plan:
    """Of the decoder on four ranks."""
    return search(decoder(), hardware(), 4, 4, objective=objective)  # type: ignore[arg-type]


def test_cost_may_use_fewer_ranks() -> None:
    fast, cheap = best_by("throughput"), best_by("cost")
    degrees = cheap.resolved.degrees
    ranks = degrees[0] * degrees[1] * degrees[2]
    assert ranks * cheap.estimate.step_s <= 4 * fast.estimate.step_s
    assert ranks < 4


def test_memory_finds_the_smallest_peak() -> None:
    assert best_by("memory").estimate.peak_bytes < best_by("throughput").estimate.peak_bytes


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        (Constraints(pipeline=3), r"pipeline=3 cannot be: 3 does not divide .*= 4 ranks; 1, 2, 4 do. Change it"),
        (Constraints(data=2, model=4), r"data=2 and model=4 cannot be: 2 x 4 = 8 does not divide .*= 4 ranks"),
        (Constraints(zero=1, data=1, model=1), r"data=1 and model=1 and zero=1.*Leave one of data, model, zero open"),
        (Constraints(data=4, micro_batches=4, zero=1), r"data=4 and micro_batches=4 cannot be.*batch_size=4"),
        (Constraints(sequence=True, model=1), r"model=1 and sequence=True.*sequence needs model above 1"),
        (Constraints(layers="nothing: data"), r"no layer matches 'nothing'"),
        (Constraints(layers="b.0: data@1; head: data@0"), r"no strategy puts these layers there"),
        (Constraints(layers="head: data | zero=1"), r"'zero=1' is no row; options are constraints of their own"),
    ],
)
def test_conflicting_constraints_are_named(constraints: Constraints, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        search(decoder(), hardware(), 4, 4, constraints=constraints)


def test_one_degree_decides_about_the_others_whose_rules_are_named_too() -> None:
    with pytest.raises(StrategyError, match="pipeline=1 and heads=4 cannot be") as caught:
        search(decoder(), hardware(), 3, 16, constraints=Constraints(pipeline=1, heads=4))
    text = str(caught.value)
    assert "model divides the heads of attention, 4" in text and "micro_batches divides batch_size=16" in text
    assert "schedule" not in text and "zero" not in text


def test_a_model_that_fits_nowhere_is_an_error_with_the_bytes_and_the_fixes() -> None:
    with pytest.raises(StrategyError, match=r"fits into 100 kB.*holds .*too much.*It fits with \d+ ranks") as caught:
        search(decoder(), hardware(), 4, 4, memory_bytes=1e5)
    assert "optimizer='sgd'" in str(caught.value) or "ranks" in str(caught.value)


@pytest.mark.slow
def test_that_nothing_fits_is_said_only_where_it_is_certain() -> None:
    """Of a large model, not every strategy is looked at; a small one's all are, or all weights are too much."""
    large = search(decoder(), hardware(), 4, 4, objective="memory", constraints=Constraints(pipeline=1))
    assert not large.is_exact
    with pytest.raises(
        StrategyError, match=r"none of the \d+ strategies that were priced fits .*others were not looked"
    ):
        solve(replace(large.problem, objective="throughput", memory_bytes=0.9 * large.estimate.peak_bytes))
    with pytest.raises(StrategyError, match="no strategy fits into"):
        solve(replace(large.problem, memory_bytes=0.01 * large.estimate.peak_bytes))
    small = replace(random_problem(5), objective="throughput")
    with pytest.raises(StrategyError, match="no strategy fits into"):
        solve(replace(small, memory_bytes=0.99 * least_bytes(small)))


def test_a_v_needs_two_layers_on_each_rank() -> None:
    constraints = Constraints(schedule="dualpipe_v", pipeline=2)
    with pytest.raises(StrategyError, match="a schedule interleaved or in a V needs 2 layers on each rank"):
        solve(replace(random_problem(5), num_ranks=2, batch_size=4, constraints=constraints))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "speed"}, "none of throughput"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_ranks": 0}, "0 ranks"),
        ({"memory_bytes": 0}, "above 0"),
        ({"num_ranks": "8"}, r"num_ranks='8': a whole number, such as 8"),
        ({"batch_size": 8.5}, r"batch_size=8.5: a whole number"),
        ({"memory_bytes": "80GB"}, r"memory_bytes='80GB': a number, such as 80e9"),
        ({"precision": "fp64"}, r"precision='fp64'.*fp32, bf16, fp16"),
        ({"optimizer": "AdamW"}, "optimizer='AdamW': it is one of adamw, adam, adamw8bit, momentum, sgd"),
        ({"constraints": Constraints(offload=("", "disk"))}, "offload='disk': it is one of none, optimizer, "),
        ({"constraints": Constraints(schedule="1F1B")}, r"schedule='1F1B'.*gpipe"),
        ({"constraints": Constraints(zero=(0, 7))}, r"zero=7.*0, 1, 2, 3"),
        ({"constraints": Constraints(overlap="4")}, r"overlap='4': a whole number, or several: overlap=1 or"),
        ({"constraints": Constraints(overlap=(1, 2.0))}, r"overlap=2.0: a whole number"),
        ({"constraints": Constraints(context="2")}, r"context='2': a whole number"),
    ],
)
def test_absurd_questions_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        replace(random_problem(0), **changes)  # type: ignore[arg-type]


def test_whole_numbers_of_other_types_are_ints() -> None:
    given = Constraints(overlap=np.int64(4), data=np.array([1, 2]), model={2})
    assert replace(random_problem(0), constraints=given).constraints == Constraints(overlap=4, data=(1, 2), model=(2,))


def test_the_problem_is_a_value() -> None:
    assert random_problem(4) == random_problem(4)
    assert isinstance(random_problem(4), Problem)
