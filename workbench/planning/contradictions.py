"""Wishes that leave no strategy: which of them, and by which rule."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import prod

from workbench.errors import StrategyError
from workbench.planning.problem import Problem, Wishes
from workbench.planning.settings import candidates


def refuse_contradictions(problem: Problem) -> None:
    """Find out which wishes leave nothing, and say so.

    Raises:
        StrategyError: naming the smallest set of wishes that has no candidate.
    """
    for index, row in enumerate(problem.rows):
        if not problem.choices(index, 2):
            raise StrategyError(
                f"layers={problem.wishes.layers!r}: nothing of {row.layer.name} ({row.layer.kind}) can be split that "
                f"way. Write {row.layer.name}: data, or {row.layer.name}: model."
            )
    if next(candidates(problem), None) is not None:
        return
    given = problem.wishes.given()
    for size in range(len(given) + 1):
        for names in combinations(given, size):
            kept = Wishes(**{name: given[name] for name in names})  # type: ignore[arg-type]
            if next(candidates(replace(problem, wishes=kept)), None) is None:
                raise StrategyError(_contradiction(problem, {name: given[name] for name in names}))


def _contradiction(problem: Problem, names: dict[str, object]) -> str:
    told = " and ".join(f"{name}={value}" for name, value in names.items()) or "nothing but the sizes"
    heads = " and ".join(map(str, problem.heads))
    rules = [
        *([f"model divides the heads of attention, {heads} (heads= says otherwise)"] if heads else []),
        f"pipeline x data x model = {problem.num_ranks} ranks",
        f"data x micro_batches divides batch_size={problem.batch_size}",
        f"pipeline is at most {len(problem.rows)}, the layers",
        "zero above 0 needs data or model above 1",
        "sequence needs model above 1",
        "schedule zero_bubble excludes recompute",
        "schedule interleaved needs 2 layers on each rank of the pipeline",
    ]
    degrees = {"pipeline"} if {"data", "model"} <= set(names) else set[str]()  # what the two leave to the third
    rules = [rule for rule in rules if any(name in rule for name in {*names, *degrees})] or rules
    fix = f"Leave one of {', '.join(names)} open" if len(names) > 1 else "Change it"
    why = _indivisible(problem, names) or f"no strategy is left. Rules: {'; '.join(rules)}"
    return f"{told} cannot be: {why}. {fix}."


def _indivisible(problem: Problem, names: dict[str, object]) -> str:
    """The plainest contradiction: degrees that do not divide the ranks; empty where it is another."""
    wished = [value for value in names.values() if isinstance(value, int)]
    if not set(names) <= {"pipeline", "data", "model"} or len(wished) < len(names) or min(wished, default=0) < 1:
        return ""
    number, divisors = prod(wished), [str(n) for n in range(1, problem.num_ranks + 1) if problem.num_ranks % n == 0]
    if problem.objective == "cost" or str(number) in divisors:
        return ""
    told = " x ".join(map(str, wished)) + (f" = {number}" if len(wished) > 1 else "")
    return f"{told} does not divide pipeline x data x model = {problem.num_ranks} ranks; {', '.join(divisors)} do"


__all__ = ["refuse_contradictions"]
