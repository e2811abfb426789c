"""Chooses the rows and columns of a logical tensor that a table shows, and formats their numbers.

Pure functions: a tensor in, strings out. A large tensor shows its first and last rows and those at edges of shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

MAX_LINES = 8
"""A dim of at most so many rows is shown whole."""
_MAX_EDGES = 4
_DECIMALS = 4


def shown(size: int, edges: Iterable[int] = (), whole: int = MAX_LINES) -> list[int | None]:
    """The indices below ``size`` to show, with None where some are left out.

    ``edges``: the indices where shards begin. Both sides of an edge are shown; of many edges, the first and the last.

    >>> shown(100, edges=[50])
    [0, 1, None, 49, 50, None, 98, 99]
    """
    if size <= whole:
        return list(range(size))
    inner = sorted({edge for edge in edges if 0 < edge < size})
    if len(inner) > _MAX_EDGES:
        inner = [*inner[: _MAX_EDGES // 2], *inner[-_MAX_EDGES // 2 :]]
    beside = {index for edge in inner for index in (edge - 1, edge)}
    chosen = sorted({0, 1, size - 2, size - 1, *beside})
    lines: list[int | None] = [chosen[0]]
    for before, after in itertools.pairwise(chosen):
        # one missing line needs no more room than the None that would replace it
        lines += [None] if after - before > 2 else range(before + 1, after)
        lines.append(after)
    return lines


def matrix_of(values: Any, dims: tuple[int | None, int | None]) -> Any:
    """The two dims as a matrix, at index 0 of all other dims. A missing dim becomes one row or column."""
    kept = [dim for dim in dims if dim is not None]
    index = tuple(slice(None) if dim in kept else 0 for dim in range(values.dim()))
    matrix = values[index]
    if len(kept) == 2 and dims[0] > dims[1]:  # type: ignore[operator]
        matrix = matrix.t()
    return matrix.reshape(values.shape[dims[0]] if dims[0] is not None else 1, -1)


def written(matrix: Any, rows: Sequence[int | None], columns: Sequence[int | None]) -> list[list[str]]:
    """The shown numbers as text, all in the format in which torch prints them."""
    at_rows, at_columns = ([index for index in lines if index is not None] for lines in (rows, columns))
    block = matrix[at_rows][:, at_columns].tolist()
    form = _formatter([number for line in block for number in line], matrix.dtype)
    found = {(row, column): form(block[i][j]) for i, row in enumerate(at_rows) for j, column in enumerate(at_columns)}
    return [["..." if row is None or column is None else found[row, column] for column in columns] for row in rows]


def _formatter(numbers: list[Any], dtype: Any) -> Any:
    if not dtype.is_floating_point:
        return str if not dtype.is_complex else lambda number: f"{number:.{_DECIMALS}g}"
    sizes = [abs(number) for number in numbers if number == number and number not in (0.0, float("inf"), -float("inf"))]
    if not sizes:
        return lambda number: f"{number:.1f}"
    if all(number == int(number) for number in sizes) and max(sizes) < 1e5:
        return lambda number: f"{number:.0f}." if abs(number) < float("inf") else str(number)
    if max(sizes) >= 1e5 or min(sizes) < 1e-3 or max(sizes) / min(sizes) > 1e6:
        return lambda number: f"{number:.{_DECIMALS}e}"
    return lambda number: f"{number:.{_DECIMALS}f}"
