"""Sets of times as lists of intervals (start, stop): union, intersection, difference, length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals: disjoint, in ascending order.

    >>> united([(3, 4), (0, 1), (1, 2), (3.5, 6)])
    [(0, 2), (3, 6)]
    """
    found: list[Interval] = []
    for start, stop in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The intersection of two unions.

    >>> common([(0, 2), (3, 6)], [(1, 4)])
    [(1, 2), (3, 4)]
    """
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, stop = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < stop:
            found.append((start, stop))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """What of one union is not in the other.

    >>> without([(0, 6)], [(1, 2), (5, 9)])
    [(0, 1), (2, 5)]
    """
    if not one:
        return []
    first, last = one[0][0], one[-1][1]
    edges = [first, *(edge for interval in other for edge in interval), last]
    gaps = zip(edges[0::2], edges[1::2], strict=True)
    return common(one, united((max(start, first), min(stop, last)) for start, stop in gaps))


def total(intervals: Iterable[Interval]) -> float:
    """The length of a union.

    >>> total([(0, 2), (3, 6)])
    5
    """
    return sum(stop - start for start, stop in intervals)
