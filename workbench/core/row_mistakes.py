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
        spanned = _over_names(row.pattern, paths)
        if spanned:
            message = f"no layer matches {row.pattern!r}: a * is a part of one name, between two dots"
            found.append((message, tuple(f"write {str(replace(row, pattern=each))!r}" for each in spanned)))
            continue
        near = difflib.get_close_matches(row.pattern, paths, n=3, cutoff=0.3) or paths[:3]
        fixes = tuple(f"write {str(replace(row, pattern=name))!r}" for name in near)
        found.append((f"no layer matches {row.pattern!r}; nearest: {', '.join(near)}", fixes))
    return found


def _over_names(pattern: str, paths: Sequence[str]) -> list[str]:
    """The patterns of the modules that a pattern covers if its ``*`` may have dots; of modules that differ by their
    numbers only, one.

    >>> _over_names("*.experts", ["blocks.0.gate", "blocks.0.experts", "blocks.1.experts"])
    ['blocks.*.experts']
    """
    regex = re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
    alike = dict[tuple[str, ...], list[list[str]]]()
    for names in (path.split(".") for path in paths if regex.fullmatch(path)):
        alike.setdefault(tuple("*" if name.isdecimal() else name for name in names), []).append(names)
    columns = [zip(*group, strict=True) for group in alike.values()]
    return [".".join(names[0] if len(set(names)) == 1 else "*" for names in each) for each in columns[:3]]
