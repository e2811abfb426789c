"""Wishes that leave no strategy: which of them, and by which rule."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from workbench.errors import StrategyError
from workbench.planner.problem import Problem, Wishes
from workbench.planner.settings import candidates


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
    rules = [rule for rule in rules if any(name in rule for name in names)] or rules
    fix = f"Leave one of {', '.join(names)} open" if len(names) > 1 else "Change it"
    return f"{told} cannot be: no strategy is left. Rules: {'; '.join(rules)}. {fix}."


__all__ = ["refuse_contradictions"]
