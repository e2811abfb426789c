"""Edits of a strategy's rows: they change the choices of some layers only, and keep the text short."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from workbench.core.compress_patterns import compress_patterns
from workbench.core.options import parse_options
from workbench.core.row_mistakes import hidden_rows
from workbench.core.rows import Layer, Row, quoted
from workbench.core.strategy import Strategy
from workbench.errors import StrategyError


def edited(
    strategy: Strategy, layers: Sequence[Layer], targets: Mapping[str, Sequence[int]], change: Callable[[Row], Row]
) -> tuple[Row, ...]:
    """The rows of a strategy after some layers were changed.

    Args:
        targets: pattern -> indices of the layers that are changed under it.
        change: (row that decides for a layer) -> its new row.

    >>> layers = [Layer("fc1", "Linear"), Layer("fc2", "Linear")]
    >>> rows = edited(Strategy("*: data"), layers, {"fc2": [1]}, lambda row: replace(row, parallel="model"))
    >>> [str(row) for row in rows]
    ['*: data', 'fc2: model']
    """
    wanted = [replace(row, pattern="") for row in strategy.rows_of(layers)]
    for indices in targets.values():
        for index in indices:
            wanted[index] = replace(change(wanted[index]), pattern="")
    rows = list(strategy.rows)
    for pattern, indices in targets.items():
        found = {wanted[index] for index in indices}
        if len(found) == 1:
            rows = _with_row(rows, replace(found.pop(), pattern=pattern), layers)
    rows = without_hidden(_repaired(rows, layers, wanted))
    short = compress_patterns([layer.name for layer in layers], wanted)
    unmatched = [row for row in rows if not _decides(row, layers)]
    return (*short, *unmatched) if len(short) + len(unmatched) < len(rows) else tuple(rows)


def _with_row(rows: list[Row], wanted: Row, layers: Sequence[Layer]) -> list[Row]:
    """The rows with one row added: in the place of a row with its pattern if that decides for all its layers, else at
    the end. Rows that then decide for no layer are removed.
    """
    said = Strategy.from_rows(rows).rows_of(layers)
    is_expert = wanted.parallel == "expert"  # beside a row of its pattern, which other layers keep
    replaced = [row for row in rows if row.pattern == wanted.pattern and (not is_expert or row.parallel == "expert")]
    place = rows.index(replaced[0]) if replaced else None
    matched = [i for i, layer in enumerate(layers) if wanted.matches(layer.name) and (layer.experts or not is_expert)]
    if place is not None and matched and all(said[i] == rows[place] for i in matched):
        rows = [*rows[:place], wanted, *rows[place + 1 :]]
    else:
        rows = [*(row for row in rows if row not in replaced), wanted]
    decisive = set(Strategy.from_rows(rows).rows_of(layers))
    rows = [row for row in rows if row in decisive or not _decides(row, layers)]
    return _without_needless(rows, wanted, matched, layers)


def _without_needless(rows: list[Row], wanted: Row, matched: Sequence[int], layers: Sequence[Layer]) -> list[Row]:
    """The rows without ``wanted`` if other rows say the same for all its layers."""
    others = [row for row in rows if row != wanted]
    said = Strategy.from_rows(others).rows_of(layers)
    return others if all(said[i] in others and _same(said[i], wanted) for i in matched) else rows


def _repaired(rows: list[Row], layers: Sequence[Layer], wanted: Sequence[Row]) -> list[Row]:
    """The rows, with one more for each layer for which they say something else."""
    said = Strategy.from_rows(rows).rows_of(layers)
    wrong = [i for i, row in enumerate(said) if not _same(row, wanted[i])]
    if not wrong:
        return rows
    rows = [row for row in rows if row.pattern not in {quoted(layers[i].name) for i in wrong}]
    return [*rows, *(replace(wanted[i], pattern=quoted(layers[i].name)) for i in wrong)]


def without_hidden(rows: list[Row]) -> list[Row]:
    """The rows without those that a later one replaces or covers."""
    last = {(row.pattern, row.parallel == "expert"): place for place, row in enumerate(rows)}
    kept = [row for place, row in enumerate(rows) if place == last[row.pattern, row.parallel == "expert"]]
    hidden = {row for row, _ in hidden_rows(kept)}
    return [row for row in kept if row not in hidden]


def _same(one: Row, other: Row) -> bool:
    return replace(one, pattern="") == replace(other, pattern="")


def _decides(row: Row, layers: Sequence[Layer]) -> bool:
    """Whether the row matches any layer."""
    return any(row.matches(layer.name) for layer in layers)


def first_unmatched(rows: Sequence[Row], layers: Sequence[Layer]) -> int | None:
    """Place of the first row that matches no layer."""
    return next((place for place, row in enumerate(rows) if not _decides(row, layers)), None)


def clauses(text: str, wrong_layers: Sequence[str], layers: Sequence[Layer]) -> list[tuple[str, str]]:
    """A strategy's text in pieces, each with its role: ``""``, ``"wrong"`` or ``"quiet"`` (options).

    A clause is wrong if it does not parse, matches no layer, decides for one of ``wrong_layers``, or has no effect as a
    later one covers its layers.

    >>> clauses("fc1: data; fc2: dta | mb=2", [], [Layer("fc1", "Linear"), Layer("fc2", "Linear")])
    [('fc1: data', ''), ('; ', 'quiet'), ('fc2: dta', 'wrong'), (' | ', 'quiet'), ('mb=2', 'quiet')]
    """
    rows_text, bar, options_text = text.partition("|")
    parts = [part.strip() for part in rows_text.split(";") if part.strip()]
    rows = [_row_or_none(part) for part in parts]
    decisive = Strategy.from_rows([row for row in rows if row is not None])
    blamed = {decisive.row_of(layer) for layer in layers if layer.name in wrong_layers}
    blamed |= {row for row, _ in hidden_rows(decisive.rows)}
    pieces: list[tuple[str, str]] = []
    for part, row in zip(parts, rows, strict=True):
        is_wrong = row is None or row in blamed or not (row.pattern == "*" or _decides(row, layers))
        pieces += [(part, "wrong" if is_wrong else ""), ("; ", "quiet")]
    pieces = pieces[:-1]
    if bar:
        pieces.append((" | ", "quiet"))
        words = [(word, "wrong" if _is_wrong_option(word) else "quiet") for word in options_text.split()]
        pieces += [piece for word in words for piece in (word, (" ", "quiet"))][:-1]
    return pieces


def _row_or_none(clause: str) -> Row | None:
    try:
        return Strategy(clause).rows[0]
    except (StrategyError, IndexError):
        return None


def _is_wrong_option(word: str) -> bool:
    mistakes: list[str] = []
    parse_options(word, mistakes)
    return bool(mistakes)
