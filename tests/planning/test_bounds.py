"""Bounds are below what they bound, so a search that stops at them has missed nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from math import inf

import pytest

from tests.planning.problems import machine, random_problem
from workbench.cost.hardware_files import load_hardware
from workbench.cost.transformer import Transformer, transformer_costs
from workbench.planning.bounds import Bounds
from workbench.planning.candidates import Candidate, candidates
from workbench.planning.chooser import Chooser
from workbench.planning.incumbents import Incumbents
from workbench.planning.problem import Constraints, Problem
from workbench.planning.search import choice_assignments, stage_assignments

FEW = range(8)
MANY = range(8, 100)
GPT = Transformer(hidden=3072, heads=24, layers=3, vocab=50000, seq=1024)


def bounds_of(problem: Problem) -> Bounds:
    return Bounds(Chooser(problem, Incumbents(problem)))


def least_steps(problem: Problem) -> Iterator[tuple[Candidate, float]]:
    """Every candidate, with the shortest step of all its strategies."""
    incumbents = Incumbents(problem)
    for candidate in candidates(problem):
        stages, (_, data, model) = list(stage_assignments(len(problem.rows), candidate.num_stages)), candidate.degrees
        every = ((choices, cut) for choices in choice_assignments(problem, model, data) for cut in stages)
        yield candidate, min(incumbents.add(candidate, *one).estimate.step_s for one in every)


def assert_bounds_are_below(problem: Problem) -> None:
    bounds = bounds_of(problem)
    for candidate, step_s in least_steps(problem):
        assert bounds.quick(candidate) <= bounds.tight(candidate) * (1 + 1e-12), candidate
        assert bounds.tight(candidate) <= step_s * (1 + 1e-9), candidate


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", FEW)
def test_bounds_are_below_every_strategy(seed: int) -> None:
    assert_bounds_are_below(replace(random_problem(seed), memory_bytes=inf))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bounds_are_below_every_strategy_of_many_problems() -> None:
    for seed in MANY:
        assert_bounds_are_below(replace(random_problem(seed), memory_bytes=inf))


# Neither knows of the other: what a machine does is in the prices, how samples share out is in the candidates.
@pytest.mark.parametrize(
    ("name", "batch_size"),
    [
        pytest.param("a100-80g-selene", 60, marks=pytest.mark.slow),
        ("made up", 24),
        pytest.param("a100-80g-selene", 24, marks=pytest.mark.slow),
        pytest.param("made up", 60, marks=pytest.mark.slow),
    ],
)
def test_far_bounds_are_below_close_ones_of_a_transformer(name: str, batch_size: int) -> None:
    """Under all options, where samples share out evenly among the ranks of the model axis or not; mostly near them.

    Of the candidates every third, which has every option with every other.
    """
    hardware = load_hardware(name) if name != "made up" else replace(machine(random.Random(1)), one_shot_bytes=1e5)
    problem = Problem(
        transformer_costs(GPT), hardware, 12, batch_size, precision="bf16", constraints=Constraints(zero=(0, 3))
    )
    bounds = bounds_of(problem)
    ratios = [bounds.quick(one) / bounds.tight(one) for one in islice(candidates(problem), 0, None, 3)]
    assert max(ratios) <= 1 + 1e-12
    assert sum(ratio > 0.5 for ratio in ratios) > len(ratios) / 2


def test_a_candidate_whose_weights_do_not_fit_has_no_bound() -> None:
    problem = replace(random_problem(0), memory_bytes=10.0)
    bounds = bounds_of(problem)
    assert {bounds.tight(candidate) for candidate in candidates(problem)} == {inf}
