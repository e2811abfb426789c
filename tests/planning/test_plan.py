"""A finished plan: how it prints, and the questions that it answers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.planning.test_search import decoder, hardware
from workbench.core.presets import strategy_of
from workbench.core.strategy import Strategy
from workbench.cost.estimate import estimate
from workbench.cost.hardware import Link
from workbench.errors import StrategyError
from workbench.planning.incumbents import PricedStrategy
from workbench.planning.plan import Plan
from workbench.planning.problem import Constraints
from workbench.planning.search import search
from workbench.planning.strategy_comparison import compare_with_best

NO_STAGES = Constraints(pipeline=1)
"""A search that takes less time."""


@cache
def plan() -> Plan:
    return search(decoder(), hardware(), 4, 8, memory_bytes=2e6)


def test_it_prints_strategy_seconds_memory_and_the_next_best() -> None:
    text = str(plan())
    for words in ("8 layers on 4 ranks of made up", "batch 8", str(plan().strategy.options), "step", "MB", "next:"):
        assert words in text
    assert "searched in" in text
    assert plan()._repr_html_().startswith("<pre>plan for")


def test_the_strategy_can_be_read_back() -> None:
    again = Strategy(str(plan().strategy)).resolve(plan().problem.costs.layers, 4)
    assert again.layers == plan().resolved.layers


def test_the_table_has_the_best_of_every_degrees() -> None:
    table = plan().table
    assert list(table["best"]) == [True] + [False] * (len(table) - 1)
    assert table[table["fits"]]["step_s"].is_monotonic_increasing
    assert not table.duplicated(["pipeline", "data", "model"]).any()
    assert ((table["peak_bytes"] <= 2e6) == table["fits"]).all()
    assert set(plan().layers["layer"]) == {layer.name for layer in plan().problem.costs.layers}


def test_one_device_is_a_row_that_need_not_fit() -> None:
    table = plan().table
    alone = table[(table["pipeline"] == 1) & (table["data"] == 1) & (table["model"] == 1)]
    (row,) = alone.to_dict("records")
    assert not row["fits"] and not row["best"] and row["boxing_s"] == row["gradient_s"] == row["bubble_s"] == 0
    assert "one device: step" in str(plan()) and "does not fit into 2.00 MB" in str(plan())


def test_it_says_that_nothing_beats_one_device() -> None:
    slow = replace(hardware(), links=(Link(4, 10.0, 1e3),))
    found = search(decoder(), slow, 4, 8, constraints=NO_STAGES)
    assert found.table.iloc[0][["pipeline", "data", "model"]].tolist() == [1, 1, 1]
    assert not found.table.iloc[0]["best"]
    assert "nothing on 4 ranks beats it" in str(found)
    fast = search(decoder(), replace(hardware(), links=(Link(4, 0.0, 1e12),)), 4, 8, constraints=NO_STAGES)
    assert "nothing on" not in str(fast) and "times as long a step" in str(fast)


def test_one_device_has_the_cores_that_four_ranks_share() -> None:
    alone = plan().one_device.estimate
    sharing = search(decoder(), replace(hardware(), alone_speedup=3.0), 4, 8, constraints=NO_STAGES).one_device.estimate
    assert sharing.step_s == pytest.approx(alone.step_s / 3)
    assert sharing.samples_per_s == pytest.approx(alone.samples_per_s * 3)


def test_a_search_on_one_rank_has_one_row() -> None:
    found = search(decoder(), hardware(), 1, 8)
    assert found.one_device is found.found
    assert len(found.table) == 1


def test_it_prints_every_row_of_the_strategy() -> None:
    given = "; ".join(f"b.{n}.up: data; b.{n}.down: model" for n in range(2)) + "; head: model"
    found = search(decoder(), hardware(), 4, 8, constraints=Constraints(layers=given))
    lines = str(found).splitlines()
    last = next(index for index, line in enumerate(lines) if line.lstrip().startswith("step "))
    assert Strategy("\n".join(lines[1:last])) == found.strategy


def test_explain_lists_every_choice_with_its_seconds() -> None:
    found = search(decoder(), hardware(), 4, 4, constraints=Constraints(model=4))
    explanation = found.explain("b.1.up")
    first = explanation.alternatives[0]
    assert first.is_chosen
    assert first.estimate is not None
    assert first.estimate.step_s == pytest.approx(found.estimate.step_s)
    assert {one.choice for one in explanation.alternatives} == {"data", "model:column", "model:row"}
    assert {len(one.layers) for one in explanation.alternatives} == {1, 2}
    others = [one.estimate.step_s for one in explanation.alternatives[1:] if one.estimate]
    assert others == sorted(others)
    assert str(explanation).startswith("b.1.up\n * ")
    assert len(explanation.table) == len(explanation.alternatives)


def test_explain_gives_each_kind_of_layer_its_own_choices() -> None:
    found = search(decoder(), hardware(), 4, 4, constraints=Constraints(model=4))
    others = found.explain("b.1").alternatives[1:]
    by_layers = {one.layers: {other.choice for other in others if other.layers == one.layers} for one in others}
    assert by_layers.keys() == {("b.1.norm",), ("b.1.up", "b.1.down")}
    assert by_layers["b.1.norm",] < {"data", "model"}
    assert by_layers["b.1.up", "b.1.down"] <= {"data", "model:column", "model:row"}


def test_explain_says_why_a_choice_is_not_there() -> None:
    found = plan().again(model=1, pipeline=1)
    assert "model axis has 1 rank" in str(found.explain("head"))
    with pytest.raises(StrategyError, match="no layer matches"):
        found.explain("nothing")


@pytest.mark.parametrize(
    ("strategy", "reason", "words"),
    [
        ("*: data | 3x1x1", "cannot run", "3 x 1 x 1 = 3, but there are 4 ranks"),
        ("nothing: data", "cannot run", "no layer matches"),
        ("*: data | 1x1x4", "memory", "too much. Most of it is"),
        ("*: model | 1x1x4 mb=8", "slower", "slower by"),
        ("pipelin", "cannot run", "did you mean 'pipeline'"),
        ("data", "memory", "too much"),
        ({"*": "data"}, "memory", "too much"),
        ({"nothing": "data"}, "cannot run", "no layer matches"),
    ],
)
def test_why_not(strategy: str | dict[str, str], reason: str, words: str) -> None:
    verdict = plan().why_not(strategy)
    assert verdict.reason == reason
    assert words in str(verdict)


def test_why_not_says_when_figures_are_of_two_precisions() -> None:
    found = search(decoder(), hardware(), 4, 8, precision="bf16", constraints=NO_STAGES)
    without = str(found.why_not("*: model | 1x1x4"))
    assert "priced in fp32, the plan in bf16. For the same, write bf16 behind its bar." in without
    assert "priced in" not in str(found.why_not("*: model | 1x1x4 bf16"))


def test_a_plan_in_fp32_says_that_it_is_priced_as_tf32() -> None:
    gpu = replace(hardware(), fp32_is_tf32=True)
    assert "priced as TF32" in str(search(decoder(), gpu, 1, 8, precision="fp32"))
    assert "TF32" not in str(search(decoder(), gpu, 1, 8, precision="bf16"))
    assert "TF32" not in str(search(decoder(), hardware(), 1, 8, precision="fp32"))


@pytest.mark.parametrize(("objective", "quantity"), [("memory", "% memory)"), ("cost", "% rank-seconds)")])
def test_the_next_best_say_of_what_they_take_more(objective: str, quantity: str) -> None:
    text = str(search(decoder(), hardware(), 4, 4, objective=objective))
    lines = [line for line in text.splitlines() if "next:" in line]
    assert lines and all(line.endswith(quantity) for line in lines)


def test_unequal_stages_cost_the_ranks_that_they_have() -> None:
    problem = replace(search(decoder(), hardware(), 4, 4, constraints=NO_STAGES).problem, objective="cost")
    layers = problem.costs.layers
    resolved = strategy_of("pipeline | 1x2+1x1 mb=2", layers, 3).resolve(layers, 3)
    found = problem.estimate(resolved)
    assert problem.value(resolved, found)[0] == 3 * found.step_s
    best = PricedStrategy(resolved, found, problem.value(resolved, found))
    assert compare_with_best(problem, best, "pipeline | 1x2+1x1 mb=2").reason == "equal"


def test_the_fullest_rank_has_several_stages_where_a_schedule_says_so() -> None:
    constraints = Constraints(pipeline=2, schedule="dualpipe_v", zero=0, micro_batches=4, recompute=False)
    found = search(decoder(), hardware(), 4, 8, constraints=constraints)
    first, second = found.resolved.stages_by_slice()[found.found.estimate.fullest_stage]
    assert f"at most, on stages {first} and {second}:" in str(found)
    verdict = compare_with_best(replace(found.problem, memory_bytes=1.0), found.found, found.strategy)
    assert f"each rank of stages {first} and {second} holds" in str(verdict)


def test_one_rank_is_one_rank() -> None:
    text = str(search(decoder(), hardware(), 1, 8))
    assert "layers on 1 rank of" in text and "on 1 rank beats it" in text


def test_why_not_itself() -> None:
    assert plan().why_not(plan().strategy).reason == "equal"


def test_why_not_says_where_it_is_slower() -> None:
    verdict = plan().why_not("*: model | 1x1x4 mb=8")
    assert verdict.difference is not None
    assert verdict.estimate is not None
    more = verdict.estimate.step_s - plan().found.estimate.step_s
    assert sum(verdict.difference.seconds.values()) == pytest.approx(more)
    assert max(verdict.difference.seconds, key=verdict.difference.seconds.__getitem__) == "boxing_s"
    assert "boxing +" in str(verdict)


@pytest.mark.parametrize(
    ("constraints", "changes", "words"),
    [
        ({}, {"precision": "bf16"}, "the search did not look at precision bf16"),
        ({"schedule": "gpipe", "micro_batches": 2}, {}, "did not look at num micro batches 8, schedule zero_bubble"),
        ({"pipeline": 1}, {}, "the search did not look at degrees 4x1x1"),
        ({"layers": "words: data@0; b.0: data@0"}, {}, "the search did not look at its choices of pinned layers"),
        ({}, {}, "the search missed it"),
    ],
)
def test_a_better_strategy_is_one_that_the_search_missed_only_if_it_looked_at_it(
    constraints: dict[str, object], changes: dict[str, object], words: str
) -> None:
    problem = replace(plan().problem, constraints=Constraints(**constraints))  # type: ignore[arg-type]
    best = replace(plan().found, value=(1.0, 1.0))
    verdict = compare_with_best(problem, best, plan().strategy.with_options(**changes))
    assert verdict.reason == "better" and f"{words}: " in verdict.text


def test_diff_names_options_layers_and_parts() -> None:
    other = plan().again(model=4)
    difference = plan().diff(other)
    assert ("degrees", "x".join(map(str, plan().resolved.degrees)), "1x1x4") in difference.options
    assert difference.layers
    assert difference.peak_bytes == pytest.approx(other.estimate.peak_bytes - plan().estimate.peak_bytes)
    assert "step:" in str(difference)
    same = plan().diff(plan())
    assert not same.options
    assert not same.layers


def test_a_wrong_strategy_is_an_error() -> None:
    assert "3 is of type int, not a strategy" in str(plan().why_not(3))  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="3 is of type int, not a strategy"):
        plan().diff(3)  # type: ignore[arg-type]


def test_an_unknown_constraint_is_an_error() -> None:
    with pytest.raises(StrategyError, match=r"again\(stages=\): no such constraint; there are pipeline, data"):
        plan().again(stages=2)


def test_a_strategy_of_32_bits_beside_a_plan_in_16_costs_what_it_costs() -> None:
    """Rows under autocast are not those of 32 bits at another scale."""
    rows = plan().problem.costs.rows
    cast_rows = tuple(replace(row, itemsize=2, passed_itemsize=4) for row in rows)
    costs = replace(plan().problem.costs, autocast=cast_rows)
    text, machine = "*: model | 1x1x4 mb=8", plan().problem.hardware
    found = search(costs, machine, 4, 8, precision="bf16", constraints=NO_STAGES).diff(text)
    alone = estimate(costs, Strategy(text).resolve(costs.layers, 4), machine, 8)
    assert found.step_s[1] == pytest.approx(alone.step_s)


def test_again_keeps_the_question() -> None:
    again = plan().again(zero=0)
    assert again.resolved.options.zero == 0
    assert again.problem.memory_bytes == 2e6


def test_the_estimate_has_a_timeline() -> None:
    assert plan().estimate.timeline is not None
    assert plan().estimate.step_s == pytest.approx(plan().found.estimate.step_s)
