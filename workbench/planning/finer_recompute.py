"""Recomputation that keeps more: the strategies that a search has found, priced again with less of it.

The search prices none and all. What else is best depends little on which blocks run again, or what they keep.
"""

from __future__ import annotations

from dataclasses import replace

from workbench.core.recompute_kinds import KINDS
from workbench.cost.stages import recomputed_blocks
from workbench.planning.incumbents import Incumbents, PricedStrategy
from workbench.planning.problem import Problem

MAX_REFINED = 8
"""Number of strategies that are priced again."""
LEAST_PART = 0.75
"""The part of a step that stays without recomputation: of a forward, a backward and another forward."""


def finer_recompute(problem: Problem, incumbents: Incumbents) -> None:
    """Add the best strategies to the incumbents with as little recomputation as their memory allows.

    Each kind saves some bytes for some seconds. Of those that fit, the one with the shortest step has spent the fewest
    seconds on the bytes that lacked.
    """
    if problem.constraints.recompute is not None or problem.software.recompute != "full":
        return
    found = [*incumbents.by_degrees.values(), *([incumbents.least_memory] if incumbents.least_memory else [])]
    found = sorted(found, key=lambda each: each.value)[:MAX_REFINED]
    num_blocks = max(recomputed_blocks(problem.costs)) + 1
    for each in found:
        if each.strategy.options.recompute != "full" or each.value[0] * LEAST_PART > incumbents.best_value:
            continue
        for kind in KINDS[1:]:
            _again(problem, incumbents, each, kind)
        fewest, most = 0, num_blocks  # the number of blocks that fits is between
        while most - fewest > 1:
            middle = (fewest + most) // 2
            fits = _again(problem, incumbents, each, str(middle)).estimate.peak_bytes <= problem.memory_bytes
            fewest, most = (fewest, middle) if fits else (middle, most)


def _again(problem: Problem, incumbents: Incumbents, found: PricedStrategy, recompute: str) -> PricedStrategy:
    strategy = replace(found.strategy, options=replace(found.strategy.options, recompute=recompute))
    return incumbents.keep(strategy, problem.estimate(strategy))
