"""How a layout cuts a tensor: a row of intervals per dim, and for every tile the ranks that hold it.

The cuts of different dims are independent, so what meets a region is found by bisection dim by dim, and nothing has
to walk over all ranks: that is what keeps plans for thousands of ranks cheap.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from workbench.core.layout import Layout, Region, Shape, balanced_bounds
from workbench.core.sbp import Partial, Split


@dataclass(frozen=True, slots=True)
class Cut:
    """The intervals of one dim in ascending order, and what each adds to the index of a rank in the grid."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    offsets: tuple[int, ...]

    def overlaps(self, low: int, high: int) -> Iterator[tuple[int, tuple[int, int], int]]:
        """(offset, overlap, start of the interval) of every interval that shares an element with ``low:high``."""
        for i in range(bisect_right(self.stops, low), bisect_left(self.starts, high)):
            start, stop = max(low, self.starts[i]), min(high, self.stops[i])
            if start < stop:
                yield self.offsets[i], (start, stop), self.starts[i]


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a tiling: its index in the grid as tile + term + copy."""

    tile: int
    term: int
    copy: int


class Tiling:
    """The tiles of a tensor of ``shape`` under ``layout``.

    A rank's index in the grid is the sum of three offsets: of its tile (split axes), of its term (partial axes) and of
    its copy (broadcast axes); ``terms`` and ``copies`` list the last two in ascending order.
    """

    def __init__(self, layout: Layout, shape: Shape) -> None:
        self.layout, self.shape = layout, shape
        placement = layout.placement
        self.grid = placement.grid
        self._strides = [math.prod(placement.shape[axis + 1 :]) for axis in range(placement.num_axes)]
        self.cuts = tuple(self._cut(dim, size) for dim, size in enumerate(shape))
        is_partial = [isinstance(entry, Partial) for entry in layout.sbp]
        is_split = [isinstance(entry, Split) for entry in layout.sbp]
        self.terms = self._offsets([axis for axis, yes in enumerate(is_partial) if yes])
        self.copies = self._offsets(
            [axis for axis in range(placement.num_axes) if not is_partial[axis] and not is_split[axis]]
        )
        self._is_partial, self._is_split = is_partial, is_split

    def _offsets(self, axes: list[int]) -> tuple[int, ...]:
        ranges = [range(self.layout.placement.shape[axis]) for axis in axes]
        strides = [self._strides[axis] for axis in axes]
        return tuple(sum(map(int.__mul__, place, strides)) for place in itertools.product(*ranges))

    def _cut(self, dim: int, size: int) -> Cut:
        """Splits are nested axis by axis, so the intervals come out in ascending order."""
        intervals = [(0, size, 0)]
        for axis in self.layout.axes_splitting(dim):
            stride, parts = self._strides[axis], self.layout.placement.shape[axis]
            intervals = [
                (start + low, start + high, offset + i * stride)
                for start, stop, offset in intervals
                for i, (low, high) in enumerate(balanced_bounds(stop - start, parts))
            ]
        starts, stops, offsets = zip(*intervals, strict=True)
        return Cut(starts, stops, offsets)

    def tiles(self) -> Iterator[tuple[int, Region]]:
        """(offset, region) of every tile, also of an empty one."""
        for cell in itertools.product(*(zip(cut.offsets, cut.starts, cut.stops, strict=True) for cut in self.cuts)):
            yield sum(offset for offset, _, _ in cell), tuple((start, stop) for _, start, stop in cell)

    def place(self, rank: int) -> Place:
        """The tile, term and copy of ``rank``, which is in the placement."""
        tile = term = copy = 0
        for axis, coordinate in enumerate(self.layout.placement.coordinates(rank)):
            step = coordinate * self._strides[axis]
            if self._is_split[axis]:
                tile += step
            elif self._is_partial[axis]:
                term += step
            else:
                copy += step
        return Place(tile, term, copy)

    def region(self, rank: int) -> Region:
        """The region that ``rank`` holds."""
        return self.layout.region(self.shape, rank)

    def overlaps(self, region: Region) -> Iterator[tuple[int, Region, tuple[int, ...]]]:
        """(offset of the tile, overlap, first element of the tile) of every tile that shares an element."""
        rows = [list(cut.overlaps(low, high)) for cut, (low, high) in zip(self.cuts, region, strict=True)]
        for combination in itertools.product(*rows):
            yield (
                sum(offset for offset, _, _ in combination),
                tuple(overlap for _, overlap, _ in combination),
                tuple(start for _, _, start in combination),
            )


@lru_cache(maxsize=4096)
def tiling_of(layout: Layout, shape: Shape) -> Tiling:
    """The tiling of a layout (split dims counted from the front) and a shape."""
    return Tiling(layout, shape)


def num_elements(region: Region) -> int:
    """The number of elements of a region."""
    return math.prod(stop - start for start, stop in region)


def overlap(a: Region, b: Region) -> int:
    """The number of elements that two regions share."""
    shared = 1
    for (start, stop), (other_start, other_stop) in zip(a, b, strict=True):
        low = start if start > other_start else other_start  # noqa: FURB136 - three times as fast as max and min
        high = stop if stop < other_stop else other_stop  # noqa: FURB136
        if low >= high:
            return 0
        shared *= high - low
    return shared
