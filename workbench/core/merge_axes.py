"""Merges axes of a placement with equal sbp in one or two layouts: fewer layouts to search, fewer messages."""

from __future__ import annotations

import math

from workbench.core.layout import Layout, Shape
from workbench.core.placement import Placement
from workbench.core.sbp import Sbp, Split, broadcast


def merge_axes(source: Layout, destination: Layout, shape: Shape) -> tuple[Layout, Layout]:
    """The same two layouts with as few axes as possible: on one placement together, on two separately.

    >>> p = Placement.of("cpu", [[0, 1], [2, 3]])
    >>> [str(layout) for layout in merge_axes(Layout.of(p, "S(0), S(0)"), Layout.of(p, "B, B"), (8, 8))]
    ['S(0) on cpu:[0, 1, 2, 3]', 'B on cpu:[0, 1, 2, 3]']
    """
    if source.placement == destination.placement:
        first, second = _merge((source, destination), shape)
        return first, second
    return _merge((source,), shape)[0], _merge((destination,), shape)[0]


def _merge(layouts: tuple[Layout, ...], shape: Shape) -> tuple[Layout, ...]:
    placement = layouts[0].placement
    sizes: list[int] = []
    rows: list[tuple[Sbp, ...]] = []  # per axis that stays, one entry for each of the layouts
    for axis, size in enumerate(placement.shape):
        row = tuple(layout.sbp[axis] for layout in layouts)
        if size == 1:
            continue
        if rows and row == rows[-1] and all(map(_cuts_evenly, layouts, row, [shape] * len(layouts))):
            sizes[-1] *= size
        else:
            sizes.append(size)
            rows.append(row)
    if not rows:
        sizes, rows = [1], [(broadcast,) * len(layouts)]
    if len(sizes) == placement.num_axes:
        return layouts
    flat = Placement(placement.device_type, placement.grid, tuple(sizes))
    return tuple(Layout(flat, tuple(row[i] for row in rows)) for i in range(len(layouts)))


def _cuts_evenly(layout: Layout, entry: Sbp, shape: Shape) -> bool:
    """Whether nested cuts are one cut into as many parts; of 6 rows, 2 x 2 makes 2, 1, 2, 1 and 4 makes 2, 2, 1, 1."""
    if not isinstance(entry, Split):
        return True
    parts = math.prod(layout.placement.shape[axis] for axis in layout.axes_splitting(entry.dim))
    return shape[entry.dim] % parts == 0
