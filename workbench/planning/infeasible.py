"""Errors of a search without a result: constraints that exclude every strategy, and models that fit nowhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from math import prod
from typing import NoReturn

from workbench.errors import StrategyError
from workbench.planning.candidates import candidates, divisors
from workbench.planning.incumbents import Incumbents, PricedStrategy, fullest_stages
from workbench.planning.problem import Constraints, Problem
from workbench.planning.write_strategy import write_strategy
from workbench.units import format_bytes

Run = Callable[..., tuple[Incumbents, bool]]
"""``search.run``: takes a problem, and whether the question is only if anything fits."""
_DEGREES = frozenset(("pipeline", "data", "model", "heads", "micro_batches", "context"))
_MAX_ROWS = 4
"""An error prints the rows of a strategy with at most this many rows, and the options of a longer one."""
MAX_RANK_FACTOR = 64
"""The largest number of ranks that is tried, as a multiple of the problem's ranks."""


def check_constraints(problem: Problem) -> None:
    """Raise if the constraints leave no strategy.

    Raises:
        StrategyError: names the smallest set of constraints that leaves no candidate, and the rule.
    """
    for index, row in enumerate(problem.rows):
        if not problem.choices(index, 2):
            raise StrategyError(
                f"layers={problem.constraints.layers!r}: {row.layer.name} ({row.layer.kind}) cannot be split that "
                f"way. Write {row.layer.name}: data, or {row.layer.name}: model."
            )
    if next(candidates(problem), None) is not None:
        return
    given = problem.constraints.given()
    for size in range(len(given) + 1):
        for names in combinations(given, size):
            kept = Constraints(**{name: given[name] for name in names})  # type: ignore[arg-type]
            if next(candidates(replace(problem, constraints=kept)), None) is None:
                raise StrategyError(_conflict(problem, {name: given[name] for name in names}))


def _conflict(problem: Problem, names: dict[str, object]) -> str:
    asked = " and ".join(f"{name}={value}" for name, value in names.items()) or "nothing but the sizes"
    heads, length = " and ".join(map(str, problem.heads)), problem.num_positions
    split = f"pipeline x data x model = {problem.num_ranks} ranks"
    of_degrees = [  # one degree decides what is left for the others
        *([f"model divides the heads of attention, {heads} (heads= says otherwise)"] if heads else []),
        f"data / context x micro_batches divides batch_size={problem.batch_size}",
        f"pipeline is at most {len(problem.rows)}, the layers",
    ]
    of_options = {
        "context": "context divides data"
        + (f"; context is at most {length}, the positions of a sequence" * bool(length)),
        "zero": "zero above 0 needs data or model above 1",
        "shards": "shards divides data, is above 1 (0 for all data ranks), and needs zero above 0",
        "sequence": "sequence needs model above 1",
        "overlap": "overlap is at least 1, and above 1 needs model above 1 and no fp8",
        "schedule": "a schedule needs pipeline above 1; "
        "a schedule interleaved or in a V needs 2 layers on each rank of the pipeline",
    }
    has_degrees = not names or not _DEGREES.isdisjoint(names)
    rules = [split, *(of_degrees if has_degrees else []), *(of_options[name] for name in of_options if name in names)]
    fix = f"Leave one of {', '.join(names)} open" if len(names) > 1 else "Change it"
    why = _indivisible(problem, names) or f"no strategy is left. Rules: {'; '.join(rules)}"
    return f"{asked} cannot be: {why}. {fix}."


def _indivisible(problem: Problem, names: dict[str, object]) -> str:
    """The simplest conflict: degrees that do not divide the ranks. Empty if the conflict is another one."""
    given = [value for value in names.values() if isinstance(value, int)]
    if not set(names) <= {"pipeline", "data", "model"} or len(given) < len(names) or min(given, default=0) < 1:
        return ""
    number, fitting = prod(given), list(map(str, divisors(problem.num_ranks)))
    if problem.objective == "cost" or str(number) in fitting:
        return ""
    product = " x ".join(map(str, given)) + (f" = {number}" if len(given) > 1 else "")
    return f"{product} does not divide pipeline x data x model = {problem.num_ranks} ranks; {', '.join(fitting)} do"


def raise_does_not_fit(problem: Problem, incumbents: Incumbents, is_exact: bool, run: Run) -> NoReturn:
    """Raise with the strategy that holds least, the bytes it lacks, and the fixes that were tried and work.

    The error says that no strategy fits only if that is certain: a search with short cuts skips some strategies.

    Raises:
        StrategyError: always.
    """
    smallest = incumbents.least_memory or _quick_look(problem, run).least_memory
    if smallest is None:
        raise StrategyError(
            f"layers={problem.constraints.layers!r} cannot be: no strategy puts these layers there. Leave out a stage "
            f"(@), or let layers that share a weight do the same."
        )
    peak, limit = smallest.estimate.peak_bytes, problem.memory_bytes
    where = fullest_stages(smallest.strategy, smallest.estimate)
    parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in smallest.estimate.peak_kinds)
    ranks = f"{problem.num_ranks} rank{'s' * (problem.num_ranks > 1)}"
    is_certain = is_exact or problem.is_infeasible
    none = "no strategy fits" if is_certain else f"none of the {incumbents.num_priced} strategies that were priced fits"
    others = "" if is_certain else " (others were not looked at)"
    raise StrategyError(
        f"{ranks} with batch_size={problem.batch_size}: {none} into {format_bytes(limit)} per rank{others}. The "
        f"smallest one found, {_describe(problem, smallest)}, holds {format_bytes(peak)} ({where}: {parts}), "
        f"{format_bytes(peak - limit)} or {peak / limit - 1:.0%} too much. {_fixes(problem, run)}"
    )


def _describe(problem: Problem, found: PricedStrategy) -> str:
    """The whole strategy if it has few rows, else its options."""
    strategy = write_strategy(problem, found.strategy)
    return repr(str(strategy) if len(strategy.rows) <= _MAX_ROWS else str(strategy.options))


def _quick_look(problem: Problem, run: Run) -> Incumbents:
    """The result of a quick search for strategies that hold little."""
    try:
        return run(replace(problem, objective="memory"), is_quick=True)[0]
    except StrategyError:
        return Incumbents(problem)


def _fixes(problem: Problem, run: Run) -> str:
    fixes = []
    if (ranks := _ranks_that_fit(problem, run)) is not None:
        fixes.append(f"{ranks} ranks")
    can_be_16_bits = problem.precision == "fp32" and "bf16" in problem.hardware.matmul_flops_per_s
    if can_be_16_bits and _fits(replace(problem, precision="bf16"), run):
        fixes.append("precision='bf16'")
    if problem.constraints != Constraints() and _fits(replace(problem, constraints=Constraints()), run):
        fixes.append("no constraints")
    if problem.optimizer != "sgd" and _fits(replace(problem, optimizer="sgd"), run):
        fixes.append("optimizer='sgd'")
    constraints = problem.constraints
    for offload in ("optimizer", "optimizer+activations") if constraints.offload is None else ():
        if _fits(replace(problem, constraints=replace(constraints, offload=offload)), run):
            fixes.append(f"offload={offload!r}")
            break
    if not fixes:
        tried = f"up to {MAX_RANK_FACTOR} times the ranks, 16 bits, another optimizer, offload"
        return f"A short look found nothing that makes it fit: {tried}."
    return f"It fits with {', or with '.join(fixes)}."


def _ranks_that_fit(problem: Problem, run: Run) -> int | None:
    ranks = problem.num_ranks
    while ranks < MAX_RANK_FACTOR * problem.num_ranks:
        ranks *= 2
        if _fits(replace(problem, num_ranks=ranks), run):
            return ranks
    return None


def _fits(problem: Problem, run: Run) -> bool:
    return not problem.is_infeasible and _quick_look(problem, run).best is not None
