"""Lists of experts over the data axis: the strategies that a search has found, priced again with these spread."""

from __future__ import annotations

from workbench.planning.incumbents import Incumbents
from workbench.planning.problem import Problem


def spread_experts(problem: Problem, incumbents: Incumbents) -> None:
    """Add the best strategies to the incumbents with the choice ``expert`` for all lists that no constraint pins.

    Experts are spread over as many ranks as fit. A list is spread as a whole, and the search chooses layer by layer: it
    prices ``data`` and ``model`` for the layers of lists. For fused experts it prices ``expert`` too.
    """
    free = {i for i, row in enumerate(problem.rows) if row.layer.expert is not None and problem.pins[i] is None}
    found = [*incumbents.by_degrees.values(), *([incumbents.least_memory] if incumbents.least_memory else [])]
    for each in found if free else ():
        strategy = each.strategy
        choices = [(layer.parallel, layer.split) for layer in strategy.layers]
        for index in free:
            choices[index] = ("expert", None)
        spread = problem.resolve(choices, [layer.stage for layer in strategy.layers], strategy.options)
        if any(spread.layers[index].over_data > 1 for index in free):
            incumbents.keep(spread, problem.estimate(spread))
