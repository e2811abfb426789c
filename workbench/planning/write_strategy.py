"""A resolved strategy as a table of few rows."""

from __future__ import annotations

from workbench.core.compress_patterns import compress_patterns
from workbench.core.rows import Row
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy, Strategy
from workbench.core.weight_splits import splits_of
from workbench.planning.problem import Problem


def write_strategy(problem: Problem, resolved: ResolvedStrategy) -> Strategy:
    """A strategy that resolves to ``resolved`` for the problem's layers.

    A row has a split only if the default differs.
    """
    layers = problem.costs.layers
    has_stages = resolved.num_stages > 1
    stages = [layer.stage for layer in resolved.layers]
    rows = [row_of(layer, resolved.stage_width(layer.stage)[1], has_stages) for layer in resolved.layers]
    while True:
        splits = splits_of(layers, rows, stages)
        wrong = [i for i, split in enumerate(splits) if split != resolved.layers[i].split and rows[i].split is None]
        if not wrong:
            break
        for index in wrong:
            layer, row = resolved.layers[index], rows[index]
            rows[index] = Row(row.pattern, row.parallel, layer.split, row.stage)
    return Strategy.from_rows(compress_patterns([layer.name for layer in layers], rows), resolved.options)


def row_of(layer: ResolvedLayer, model: int, has_stages: bool) -> Row:
    """The row of one layer, with an open split. ``model`` is the model degree."""
    ranks = layer.over_data * model if layer.parallel == "expert" else None
    return Row(layer.name, layer.parallel, None, layer.stage if has_stages else None, ranks)
