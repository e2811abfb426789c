"""The search: how long it takes, and whether it finds what looking at everything finds."""

from __future__ import annotations

import resource
import statistics
import time
from math import inf

from benchmarks.reporting import Comparison, Target, table
from tests.planning.brute_force import best_value
from tests.planning.problems import random_problem
from workbench.cost.hardware_files import load_hardware
from workbench.cost.transformer import transformer_costs
from workbench.planning.best_first_search import search_best_first
from workbench.planning.incumbents import Incumbents
from workbench.planning.published_models import transformer_by_name
from workbench.planning.search import run, search

CASES = (
    ("gpt2", 8, 64), ("llama2-7b", 8, 64), ("llama2-70b", 64, 256), ("gpt3-175b", 3072, 1536),
)  # fmt: skip
NUM_PROBLEMS = 220
NUM_SHORT = 60
LONGEST, MOST_MEMORY = Target(10, unit="s"), Target(2000, unit="MB")
Section = tuple[str, list[Comparison]]
"""A text with tables, and what is judged in it."""


def searched(with_rows: bool) -> Section:
    """Times of searches, and how good the found strategies are."""
    times, seconds, peak_bytes = _times()
    equal, fitting, short = _equality()
    judged = [
        Comparison("search for GPT-3 175B on 3072 ranks, processor time", seconds, LONGEST),
        Comparison("search, peak of the process", peak_bytes / 1e6, MOST_MEMORY),
        Comparison(
            f"as good as brute force: {equal} of {NUM_PROBLEMS} small problems, {fitting} of which fit",
            equal / NUM_PROBLEMS,
            Target(1.0, at_least=True),
        ),
    ]
    within = sum(ratio <= 1 + 1e-9 for ratio in short)
    summary = (
        f"The short cuts of large problems, on {len(short)} small ones: {within} equal to the best, median "
        f"{statistics.median(short):.3f}, worst {max(short):.3f} times it."
    )
    return f"{times}\n\n{summary}", judged


def _times() -> tuple[str, float, float]:
    hardware, rows, seconds = load_hardware("a100-80g-selene"), [], 0.0
    for name, ranks, batch in CASES:
        costs = transformer_costs(transformer_by_name(name))
        wall, processor = time.perf_counter(), time.process_time()
        plan = search(costs, hardware, ranks, batch, precision="bf16")
        wall, seconds = time.perf_counter() - wall, time.process_time() - processor
        step = f"{plan.found.estimate.step_s:.2f}"
        rows.append([name, str(ranks), str(batch), f"{wall:.1f}", f"{seconds:.1f}", str(plan.num_priced), step,
                     str(plan.strategy.options)])  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    heads = ["model", "ranks", "batch", "seconds", "of a core", "priced", "step s", "found"]
    return table(heads, rows), seconds, float(peak)


def _equality() -> tuple[int, int, list[float]]:
    """(problems equal to brute force, problems with a strategy that fits, short cuts over best)."""
    equal = fitting = 0
    ratios = []
    for seed in range(NUM_PROBLEMS):
        problem = random_problem(seed)
        found, truth = run(problem)[0], best_value(problem)
        best = found.best_value
        equal += best == truth or abs(best - truth) <= 1e-9 * truth
        fitting += truth < inf
        if seed < NUM_SHORT and truth < inf:
            search_best_first(problem, short := Incumbents(problem))
            ratios.append(short.best_value / best)
    return equal, fitting, ratios


__all__ = ["searched"]
