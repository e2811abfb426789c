"""Over how many ranks the experts of a row ``expert`` are split, and its mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workbench.core.rows import Layer, Row


def ranks_of_experts(row: Row, data: int, model: int) -> int:
    """The number of ranks over which a row ``expert`` splits the experts of a stage of data x model ranks.

    >>> ranks_of_experts(Row("*", "expert"), data=4, model=2), ranks_of_experts(Row("*", "expert"), data=4, model=1)
    (2, 4)
    """
    return row.ranks if row.ranks is not None else model if model > 1 else data


def over_data(row: Row, data: int, model: int) -> int:
    """The number of ranks of the data axis over which a row splits experts; 1 for another choice."""
    return ranks_of_experts(row, data, model) // model if row.parallel == "expert" else 1


def number_in_list(row: Row, layer: Layer, data: int, model: int) -> tuple[int, int] | None:
    """The number of a layer's expert in a list of experts that a row ``expert`` spreads over several ranks, and how
    many there are; None for any other layer.
    """
    if row.parallel != "expert" or layer.expert is None or ranks_of_experts(row, data, model) == 1:
        return None
    return layer.expert, layer.experts


def fitting_ranks(experts: int, data: int, model: int) -> list[int]:
    """All numbers of ranks over which experts may be split: the model axis times a divisor of the data axis.

    >>> fitting_ranks(8, data=6, model=2)
    [2, 4]
    """
    wanted = (model * part for part in range(1, data + 1) if data % part == 0)
    return [number for number in wanted if experts % number == 0]


def mistakes_of_experts(
    rows: Sequence[Row], layers: Sequence[Layer], deciding: Sequence[Row], widths: Sequence[tuple[int, int]]
) -> list[tuple[str | None, str, tuple[str, ...]]]:
    """Rows ``expert`` that cover no experts, or more ranks than fit: layer (or None), message, fixes.

    Args:
        rows: of the strategy.
        layers: of the model.
        deciding: the row that decides for each layer.
        widths: data and model degree of the stage of each layer.
    """
    having = [layer for layer in layers if layer.experts]
    found: list[tuple[str | None, str, tuple[str, ...]]] = [
        (None, f"row '{row}' covers no experts; {_where_they_are(having)}", ())
        for row in rows
        if row.parallel == "expert"
        and not any(row.matches(layer.name) for layer in having)
        and any(row.matches(layer.name) for layer in layers)  # else the row has another mistake already
    ]
    known = set[tuple[Row, str]]()
    for layer, row, width in zip(layers, deciding, widths, strict=True):
        for message in _misfits(row, layer, *width) if row.parallel == "expert" else ():
            if (row, message) not in known:  # layers with the same mistake are named once
                known.add((row, message))
                fits = [replace(row, ranks=ranks) for ranks in fitting_ranks(layer.experts, *width)]
                fixes = tuple(f"write {str(other)!r}" for other in reversed(fits))
                found.append((layer.name, message, fixes or (f"write '{row.pattern}: model'",)))
    return found


def _misfits(row: Row, layer: Layer, data: int, model: int) -> list[str]:
    """What is wrong with a row ``expert`` for a layer of experts on a stage of data x model ranks."""
    ranks, found = ranks_of_experts(row, data, model), []
    if ranks < 1 or ranks % model or data % max(1, ranks // model):
        found.append(
            f"experts over {ranks} rank{'s' * (ranks != 1)}, but data x model is {data} x {model}: experts are split "
            "over the model axis times a divisor of the data axis"
        )
    if ranks and layer.experts % ranks:
        found.append(f"{layer.experts} experts over {ranks} ranks: every rank holds as many")
    return found


def _where_they_are(having: Sequence[Layer]) -> str:
    if not having:
        return (
            "the model has none: modules whose weights have one row per expert, called with tokens, numbers of experts "
            "and weights"
        )
    named = [layer.name for layer in having]
    return f"experts are in {', '.join(named[:3])}" + f" and {len(named) - 3} more" * (len(named) > 3)
