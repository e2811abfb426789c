"""The search: exact where a problem is small, by dynamic programming and bounds where it is large."""

from __future__ import annotations

import time

from workbench.core.model_costs import ModelCosts
from workbench.core.options import PRECISIONS
from workbench.cost.hardware import Hardware
from workbench.cost.software import WORKBENCH, Software
from workbench.planning.contradictions import refuse_contradictions
from workbench.planning.exhaustive import all_if_few, search_all
from workbench.planning.ledger import Ledger
from workbench.planning.long_models import search_long
from workbench.planning.plan import Plan
from workbench.planning.problem import Problem, Wishes
from workbench.planning.unfit import refuse_unfit


def search(
    costs: ModelCosts,
    hardware: Hardware,
    num_ranks: int,
    batch_size: int,
    *,
    objective: str = "throughput",
    memory_bytes: float | None = None,
    precision: str | None = None,
    optimizer: str = "adamw",
    software: Software = WORKBENCH,
    wishes: Wishes | None = None,
) -> Plan:
    """The strategy that is predicted to be best.

    Looked through are all degrees, micro-batches, schedules, stages of ZeRO, recomputation and sequence parallelism,
    what every layer does, and where stages are cut. Small problems are searched exactly: ``plan.is_exact``.

    Args:
        costs: of the model.
        hardware: the machine of each rank.
        num_ranks: all of them are used, but for the objective "cost".
        batch_size: samples per step, all ranks together.
        objective: "throughput" (a short step), "memory" (a small peak), "cost" (few rank-seconds per step).
        memory_bytes: that a rank may hold. None: what the hardware has.
        precision: "fp32", "bf16" or "fp16". None: as the model was counted.
        optimizer: "adamw", "adam", "momentum" or "sgd".
        software: what the training program does.
        wishes: what is decided already.

    Raises:
        StrategyError: wishes that contradict each other (they are named), or a model that fits nowhere (by how much,
            and what would make it fit).
    """
    problem = Problem(
        costs,
        hardware,
        num_ranks,
        batch_size,
        objective,
        hardware.memory_bytes if memory_bytes is None else memory_bytes,
        precision or (costs.dtype if costs.dtype in PRECISIONS else "fp32"),
        optimizer,
        software,
        wishes or Wishes(),
    )
    return solve(problem)


def solve(problem: Problem) -> Plan:
    """``search`` for a problem that is already put together."""
    started_s = time.perf_counter()
    refuse_contradictions(problem)
    ledger, is_exact = run(problem)
    if ledger.best is None:
        refuse_unfit(problem, ledger, is_exact, run)
    return Plan.of(problem, ledger, solve, is_exact, time.perf_counter() - started_s)


def run(problem: Problem, is_quick: bool = False) -> tuple[Ledger, bool]:
    """What a search finds, and whether it looked at everything; quickly: whether anything fits."""
    ledger = Ledger(problem)
    every = all_if_few(problem)
    if every is not None:
        search_all(problem, every, ledger)
    else:
        search_long(problem, ledger, is_quick)
    return ledger, every is not None


__all__ = ["search", "solve"]
