"""Rows of a strategy that decide for no layer of a model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import unquote

from workbench.core.rows import Layer, Row, quoted

_OTHER_CLASS = re.compile(r"\[(?!\d+-\d+\])|\?|\{")
"""Syntax of patterns in other programs."""


def mistakes_of_rows(rows: Sequence[Row], layers: Sequence[Layer]) -> list[tuple[str, tuple[str, ...]]]:
    """Rows that match no layer, and rows that a wider one behind them leaves nothing: message and fixes."""
    hidden = [
        (
            f"row '{row}' decides no layer: '{later}' behind it covers all of its layers, and the last row counts",
            ("put it behind, or leave it out",),
        )
        for row, later in hidden_rows(rows)
    ]
    return _without_match(rows, layers) + hidden


def hidden_rows(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Rows without effect in any model, each with a wider row behind it that says something else.

    Exceptions may take all layers that a row has in a model, and a row may replace an earlier one of the same pattern:
    these are no mistakes.

    >>> rows = [Row("fc", "model"), Row("*", "data"), Row("head", "data"), Row("head", "model")]
    >>> [(str(row), str(later)) for row, later in hidden_rows(rows)]
    [('fc: model', '*: data')]
    """
    found = list[tuple[Row, Row]]()
    for place, row in enumerate(rows):
        wider = next((later for later in reversed(rows[place + 1 :]) if _covers(later, row)), None)
        if wider is not None and replace(wider, pattern=row.pattern) != row:
            found.append((row, wider))
    return found


def _covers(later: Row, row: Row) -> bool:
    """Whether a pattern has all layers of another one, in any model. A row ``expert`` is for experts only."""
    is_exception = later.parallel == "expert" and row.parallel != "expert"
    return later.pattern != row.pattern and later.matches(unquote(row.pattern)) and not is_exception


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
