"""Pieces of the rows of a product: each is boxed as the whole result is, while the next one is computed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

from workbench.core.layout import Layout, Shape, balanced_bounds
from workbench.core.sbp import Split


class RowPieces(NamedTuple):
    """Consecutive slices of every rank's shard along ``dim``. A piece is a tensor of its own in the same layout.

    Attributes:
        dim: a dim that the boxing leaves as it is, so that a piece is boxed into a piece.
        sizes: by piece, the size of ``dim`` of the logical piece. Its slices have the balanced sizes of a shard's.
    """

    dim: int
    sizes: tuple[int, ...]

    def shapes(self, shape: Shape) -> list[Shape]:
        """The logical shapes of the pieces of a tensor."""
        return [(*shape[: self.dim], size, *shape[self.dim + 1 :]) for size in self.sizes]


@lru_cache(maxsize=4096)
def row_pieces(source: Layout, target: Layout, shape: Shape, count: int) -> RowPieces | None:
    """The pieces of a result of ``shape`` that goes from ``source`` to ``target``; None where fewer than two fit.

    The first dim that has ``count`` rows on every rank is cut, else the one that has most. The last dim is that of the
    features. A dim that the boxing splits or gathers stays whole: its slices would not be those of the pieces.

    >>> from workbench.core.placement import Placement
    >>> grid = Placement.of("cpu", [[0, 1], [2, 3]])
    >>> row_pieces(Layout.of(grid, ["S(0)", "P"]), Layout.of(grid, ["S(0)", "B"]), (7, 6, 8), 2)
    RowPieces(dim=0, sizes=(4, 3))
    """
    found: RowPieces | None = None
    for pieces in _pieces_of_dims(source, target, shape, count):
        if found is None or len(pieces.sizes) > len(found.sizes):
            found = pieces
    return found


@lru_cache(maxsize=4096)
def exchanging_groups(source: Layout, target: Layout) -> tuple[tuple[int, ...], ...]:
    """The ranks that exchange with one another in a boxing inside a placement: those along the axes that change.

    >>> from workbench.core.placement import Placement
    >>> grid = Placement.of("cpu", [[0, 1], [2, 3]])
    >>> exchanging_groups(Layout.of(grid, ["S(0)", "P"]), Layout.of(grid, ["S(0)", "B"]))
    ((0, 1), (2, 3))
    """
    kept = [axis for axis, pair in enumerate(zip(source.sbp, target.sbp, strict=True)) if pair[0] == pair[1]]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in source.placement:
        place = source.placement.coordinates(rank)
        groups.setdefault(tuple(place[axis] for axis in kept), []).append(rank)
    return tuple(map(tuple, groups.values()))


def _pieces_of_dims(source: Layout, target: Layout, shape: Shape, count: int) -> Iterator[RowPieces]:
    axes = zip(source.placement.shape, source.sbp, target.sbp, strict=True)
    moved = {entry.dim for _, *pair in axes if pair[0] != pair[1] for entry in pair if isinstance(entry, Split)}
    for dim in range(len(shape) - 1):
        if dim in moved:
            continue
        rows = [source.local_shape(shape, rank)[dim] for rank in source.placement]
        parts = prod(source.placement.shape[axis] for axis in source.axes_splitting(dim))
        pieces = min(count, min(rows, default=0))
        slices = [[stop - start for start, stop in balanced_bounds(size, max(1, pieces))] for size in rows]
        sizes = tuple(sum(each) * parts // len(rows) for each in zip(*slices, strict=True))
        if pieces > 1 and all(_fits(source, shape, RowPieces(dim, sizes), slices)):
            yield RowPieces(dim, sizes)


def _fits(source: Layout, shape: Shape, pieces: RowPieces, slices: list[list[int]]) -> Iterator[bool]:
    """Whether the slices of every rank are its shards of the pieces."""
    for number, piece in enumerate(pieces.shapes(shape)):
        for rank, mine in zip(source.placement, slices, strict=True):
            yield source.local_shape(piece, rank)[pieces.dim] == mine[number]
