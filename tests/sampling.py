"""A sweep runs a sample of its cases in ``make test``, and all of them in ``make test-full``.

``@pytest.mark.sampled(every, start=0)`` above the ``parametrize`` marks of a test keeps one case in ``every``; the
others count as ``slow``. It is for tests of which many cases check one mechanism.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

_ParameterSet = type(pytest.param())


def is_in_sample(case: Iterable[tuple[int, int]], every: int, start: int = 0) -> bool:
    """Whether a case is in the sample, given (its index, the number of values) on each axis of the sweep.

    Cases are counted through, a step further on each new value where they would repeat: so a sample has every value of
    an axis, wherever the other axes have ``every`` values together. Of two axes with 4 and 3 values, one case in 3:

    >>> for row in range(4):
    ...     print(*("x" if is_in_sample([(row, 4), (column, 3)], 3) else "." for column in range(3)))
    x . .
    . . x
    . x .
    x . .
    """
    number, step = 0, 1
    for index, size in case:
        number += index * step
        step = step * size % every or 1
    return number % every == start


def mark_what_is_not_sampled(items: Iterable[pytest.Item]) -> None:
    """Mark ``slow`` each case of a sampled test that is not in its sample."""
    axes: dict[int, tuple[list[str], list[Any]]] = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and not is_in_sample(_case(item, axes), *mark.args, **mark.kwargs):
            item.add_marker(pytest.mark.slow)


def _case(item: pytest.Item, axes: dict[int, tuple[list[str], list[Any]]]) -> list[tuple[int, int]]:
    """By ``parametrize`` mark; several arguments of one mark are one axis. ``axes`` are those of marks seen before."""
    given = item.callspec.params  # type: ignore[attr-defined]
    found = []
    for mark in item.iter_markers("parametrize"):
        if id(mark) not in axes:
            axes[id(mark)] = _axis(mark)
        names, sets = axes[id(mark)]
        index = next(
            i for i, values in enumerate(sets) if all(given[n] is v for n, v in zip(names, values, strict=True))
        )
        found.append((index, len(sets)))
    return found


def _axis(mark: pytest.Mark) -> tuple[list[str], list[Any]]:
    """Names and sets of values of a ``parametrize`` mark."""
    names, axis = mark.args
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    return names, [_values(one, len(names)) for one in axis]


def _values(one: Any, num_names: int) -> Any:
    if isinstance(one, _ParameterSet):
        return one.values
    return (one,) if num_names == 1 else one
