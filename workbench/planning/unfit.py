"""What to say of a model that fits nowhere: by how much, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from workbench.errors import StrategyError
from workbench.planning.ledger import Found, Ledger
from workbench.planning.problem import Problem, Wishes
from workbench.planning.writing import write
from workbench.units import format_bytes

Run = Callable[..., tuple[Ledger, bool]]
"""``search.run``: a problem, and whether it is asked only if anything fits."""
_MOST_ROWS = 4
"""Of a strategy that is told whole."""
MOST_RANKS = 64
"""Times the ranks of the problem: more are not tried."""


def refuse_unfit(problem: Problem, ledger: Ledger, is_exact: bool, run: Run) -> NoReturn:
    """Raise with the leanest strategy, what it lacks, and the ways out that were tried and work.

    That no strategy fits is said only where it is certain: short cuts do not look at every one.

    Raises:
        StrategyError: always.
    """
    leanest = ledger.leanest or _looked(problem, run).leanest
    if leanest is None:
        raise StrategyError(
            f"layers={problem.wishes.layers!r} cannot be: no strategy puts these layers there. Leave out a stage "
            f"(@), or let layers that share a weight do the same."
        )
    peak, limit, stage = leanest.estimate.peak_bytes, problem.memory_bytes, leanest.estimate.fullest_stage
    parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in leanest.estimate.peak_kinds)
    ranks = f"{problem.num_ranks} rank{'s' * (problem.num_ranks > 1)}"
    is_certain = is_exact or problem.is_hopeless
    none = "no strategy fits" if is_certain else f"none of the {ledger.num_priced} strategies that were priced fits"
    beside = "" if is_certain else " (others were not looked at)"
    raise StrategyError(
        f"{ranks} with batch_size={problem.batch_size}: {none} into {format_bytes(limit)} per rank{beside}. The "
        f"leanest one found, {_told(problem, leanest)}, holds {format_bytes(peak)} (stage {stage}: {parts}), "
        f"{format_bytes(peak - limit)} or {peak / limit - 1:.0%} too much. {_ways_out(problem, run)}"
    )


def _told(problem: Problem, found: Found) -> str:
    """Its options, and the rows of the layers where these are few."""
    strategy = write(problem, found.strategy)
    return repr(str(strategy) if len(strategy.rows) <= _MOST_ROWS else str(strategy.options))


def _looked(problem: Problem, run: Run) -> Ledger:
    """What a short look at the leanest strategies finds."""
    try:
        return run(replace(problem, objective="memory"), is_quick=True)[0]
    except StrategyError:
        return Ledger(problem)


def _ways_out(problem: Problem, run: Run) -> str:
    ways = []
    if (ranks := _ranks_that_fit(problem, run)) is not None:
        ways.append(f"{ranks} ranks")
    halves = problem.precision == "fp32" and "bf16" in problem.hardware.matmul_flops_per_s
    if halves and _fits(replace(problem, precision="bf16"), run):
        ways.append("precision='bf16'")
    if problem.wishes != Wishes() and _fits(replace(problem, wishes=Wishes()), run):
        ways.append("no wishes")
    if problem.optimizer != "sgd" and _fits(replace(problem, optimizer="sgd"), run):
        ways.append("optimizer='sgd'")
    if not ways:
        tried = f"up to {MOST_RANKS} times the ranks, 16 bits, another optimizer"
        return f"A short look found nothing that makes it fit: {tried}."
    return f"It fits with {', or with '.join(ways)}."


def _ranks_that_fit(problem: Problem, run: Run) -> int | None:
    ranks = problem.num_ranks
    while ranks < MOST_RANKS * problem.num_ranks:
        ranks *= 2
        if _fits(replace(problem, num_ranks=ranks), run):
            return ranks
    return None


def _fits(problem: Problem, run: Run) -> bool:
    return not problem.is_hopeless and _looked(problem, run).best is not None


__all__ = ["refuse_unfit"]
