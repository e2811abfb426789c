"""Rows of a strategy from their text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from workbench.core.options import PRESETS
from workbench.core.rows import Row
from workbench.core.suggest import suggest

_CHOICE = re.compile(r"(data|model(?::column|:row)?|expert(?::\d+)?)(?:@(\d+))?")
_FORMS = "data | model | model:column | model:row | expert | expert:N"


def parse_rows(clauses: Iterable[str], mistakes: list[str], options: str) -> tuple[Row, ...]:
    """The rows of a strategy; ``mistakes`` gets one text for each clause that is no row.

    Args:
        clauses: ``pattern: choice``, or a choice alone, which is for all layers.
        mistakes: a list to add to.
        options: the text behind the rows, for suggestions.

    >>> parse_rows(["*: data", "blocks.*.experts: expert:4@1"], [], "")[1].ranks
    4
    """
    rows = []
    written = [clause for part in clauses if (clause := part.strip())]
    for clause in written:
        pattern, colon, choice = (part.strip() for part in clause.partition(":"))
        if _CHOICE.fullmatch(clause) and "@" not in clause:
            pattern, colon, choice = "*", ":", clause
        match = _CHOICE.fullmatch(choice.replace(" ", ""))
        if not colon or not pattern or match is None:
            hint = _hint(clause, options if len(written) == 1 else None)
            mistakes.append(f"row {clause!r} is not 'pattern: {_FORMS} [@stage]'{hint}")
            continue
        parallel, _, how = match[1].partition(":")
        stage = None if match[2] is None else int(match[2])
        if parallel == "expert":
            rows.append(Row(pattern, parallel, None, stage, int(how) if how else None))
        else:
            rows.append(Row(pattern, parallel, how or None, stage))
    if not rows and not mistakes:
        mistakes.append("no row; write e.g. '*: data'")
    return tuple(rows)


def _hint(clause: str, options: str | None) -> str:
    """A suggestion for a wrong row. ``options`` are those of a single row, else None."""
    pattern, colon, choice = (part.strip() for part in clause.partition(":"))
    behind = f" | {options}" if options and not colon else ""
    if not colon and clause in PRESETS:
        if options is None:
            return f"; {clause!r} is a preset, which is a whole strategy: no other row stands beside it"
        return f"; {clause!r} is a preset, which is made for a model: wb.parallelize(model, {clause + behind!r})"
    kind, rest = re.fullmatch(r"(\w*)(.*)", choice if colon else clause, re.DOTALL).groups()  # type: ignore[union-attr]
    meant = suggest(kind, PRESETS if not colon and options is not None else ("data", "model", "expert"))
    if not meant and not colon and options is not None:
        return f"; presets are {', '.join(PRESETS)}"
    if not meant or kind in meant:
        return ""
    row = f"{pattern}: {meant[0]}{rest}" if colon else meant[0] + rest + behind
    return f"; did you mean {row!r}?"
