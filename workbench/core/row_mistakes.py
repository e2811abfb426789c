"""Rows of a strategy that decide for no layer of a model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import replace

from workbench.core.rows import Layer, Row, quoted

_OTHER_CLASS = re.compile(r"\[(?!\d+-\d+\])|\?|\{")
"""Syntax of patterns in other programs."""


def mistakes_of_rows(
    rows: Sequence[Row], layers: Sequence[Layer], deciding: Sequence[Row]
) -> list[tuple[str, tuple[str, ...]]]:
    """Rows that match no layer: message and fixes.

    Args:
        rows: of the strategy.
        layers: of the model.
        deciding: the row that decides for each layer.
    """
    return _without_match(rows, layers)


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
