"""Rows of a strategy that decide for no layer of a model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace

from workbench.core.rows import Layer, Row, quoted

_OTHER_CLASS = re.compile(r"\[(?!\d+-\d+\])|\?|\{")
"""Syntax of patterns in other programs."""
_FIX = "put it behind, or leave it out"


def mistakes_of_rows(
    rows: Sequence[Row], layers: Sequence[Layer], deciding: Sequence[Row]
) -> list[tuple[str, tuple[str, ...]]]:
    """Rows that match no layer, and rows behind which another one covers all of their layers: message and fixes.

    Args:
        rows: of the strategy.
        layers: of the model.
        deciding: the row that decides for each layer.
    """
    hidden = [
        (
            f"row '{row}' decides no layer: '{later}' behind it covers all of its layers, and the last row counts",
            (_FIX,),
        )
        for row, later in hidden_rows(rows, layers, deciding)
    ]
    return _without_match(rows, layers) + hidden


def hidden_rows(rows: Sequence[Row], layers: Sequence[Layer], deciding: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Rows without effect, each with a later row that covers it and says something else. Arguments: see above.

    A row for all layers with exceptions behind it may have no layer left; so may a pattern whose layers are named one
    by one behind it. These are no mistakes.

    >>> layers = [Layer("fc", "Linear"), Layer("head", "Linear")]
    >>> rows = [Row("fc", "model"), Row("*", "data"), Row("fc", "data"), Row("head", "model")]
    >>> [(str(row), str(later)) for row, later in hidden_rows(rows, layers, rows[2:])]
    [('fc: model', 'fc: data')]
    """
    found = list[tuple[Row, Row]]()
    effective = set(deciding)
    for place, row in enumerate(rows):
        if row in effective or not (own := _layers_of(row, layers)):
            continue
        others = (later for later in reversed(rows[place + 1 :]) if replace(later, pattern=row.pattern) != row)
        wider = next((later for later in others if _covers(later, _layers_of(later, layers), row, own)), None)
        if wider is not None:
            found.append((row, wider))
    return found


def _layers_of(row: Row, layers: Sequence[Layer]) -> set[str]:
    """The layers for which a row may decide."""
    return {layer.name for layer in layers if (layer.experts or row.parallel != "expert") and row.matches(layer.name)}


def _covers(later: Row, of_later: set[str], row: Row, own: set[str]) -> bool:
    """Whether a later row takes all layers of a row and is as general: it has more of them, or covers the pattern. A
    row ``expert`` is an exception by itself.
    """
    is_exception = later.parallel == "expert" and row.parallel != "expert"
    return own < of_later or (own == of_later and later.matches(row.pattern) and not is_exception)


def _without_match(rows: Sequence[Row], layers: Sequence[Layer]) -> list[tuple[str, tuple[str, ...]]]:
    names = [layer.name for layer in layers]
    known = {quoted(".".join(name.split(".")[: n + 1])) for name in names for n in range(name.count(".") + 1)}
    paths = sorted(known)
    found = list[tuple[str, tuple[str, ...]]]()
    for row in rows:
        if row.pattern == "*" or row.pattern in known or any(row.matches(name) for name in names):
            continue
        if _OTHER_CLASS.search(row.pattern):
            message = f"no layer matches {row.pattern!r}: a pattern knows * and ranges of numbers, as in blocks.[0-3]"
            found.append((message, ("write a row for each, or a range",)))
            continue
        near = difflib.get_close_matches(row.pattern, paths, n=3, cutoff=0.3) or paths[:3]
        fixes = tuple(f"write {str(replace(row, pattern=name))!r}" for name in near)
        found.append((f"no layer matches {row.pattern!r}; nearest: {', '.join(near)}", fixes))
    return found
