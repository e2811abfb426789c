"""Layout = placement + one sbp entry per axis: which part of a logical tensor every rank holds."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from workbench.core.placement import Placement
from workbench.core.sbp import Broadcast, NdSbp, Partial, Sbp, SbpLike, Split, as_nd_sbp, broadcast, dual
from workbench.errors import PlacementError, SbpError

Shape = tuple[int, ...]
Region = tuple[tuple[int, int], ...]
"""Half-open interval ``(start, stop)`` for every dim."""


@lru_cache(maxsize=4096)
def balanced_bounds(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Cut ``size`` rows into ``parts`` consecutive slices; the first ``size % parts`` have one row more.

    >>> balanced_bounds(7, 3)
    ((0, 3), (3, 5), (5, 7))
    """
    base, extra = divmod(size, parts)
    starts = [index * base + min(index, extra) for index in range(parts + 1)]
    return tuple(itertools.pairwise(starts))


@dataclass(frozen=True)
class Layout:
    """A placement and one sbp entry per axis.

    Splits are applied axis by axis, left to right: on a 2 x 2 grid ``(S(0), S(0))`` cuts 6 rows into 2, 1, 2, 1.

    >>> Layout.of(Placement.of("cpu", [0, 1]), "S(0)").local_shape((5, 4), rank=0)
    (3, 4)
    """

    placement: Placement
    sbp: NdSbp

    @classmethod
    def of(cls, placement: Placement, sbp: SbpLike) -> Layout:
        """A layout from an sbp in any spelling.

        Raises:
            SbpError: the sbp has not one entry per axis.
            PlacementError: the first argument is no placement.
        """
        if not isinstance(placement, Placement):
            raise PlacementError(
                f"placement={placement!r} is a {type(placement).__name__}. Write wb.placement(ranks=[0, 1]); an "
                'sbp is given by name: sbp="S(0)".'
            )
        entries = as_nd_sbp(sbp)
        if len(entries) != placement.num_axes:
            example = ", ".join(["S(0)", *["B"] * (placement.num_axes - 1)])
            raise SbpError(
                f"sbp has {len(entries)} entr{'y' if len(entries) == 1 else 'ies'} "
                f"({format_sbp(entries)}) but {placement} has "
                f"{placement.num_axes} ax{'is' if placement.num_axes == 1 else 'es'}. Give one per axis, "
                f'e.g. sbp="{example}".'
            )
        return cls(placement, entries)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout) or self._hash != other._hash:
            return False
        return (self.sbp is other.sbp or self.sbp == other.sbp) and self.placement == other.placement

    @cached_property
    def _hash(self) -> int:
        return hash((self.placement, self.sbp))

    def normalized(self, shape: Shape) -> Layout:
        """The same layout with split dims counted from the front, checked against ``shape``.

        Raises:
            SbpError: a split dim that the shape does not have.
        """
        if all(not isinstance(entry, Split) or 0 <= entry.dim < len(shape) for entry in self.sbp):
            return self
        return Layout(self.placement, tuple(_normalize(entry, shape) for entry in self.sbp))

    def axes_splitting(self, dim: int) -> tuple[int, ...]:
        """The axes of the placement that split tensor dim ``dim``."""
        return tuple(axis for axis, entry in enumerate(self.sbp) if entry == Split(dim))

    def ranks_along(self, dim: int, rank: int) -> tuple[int, ...]:
        """The ranks that together hold all of ``dim``, at the coordinates of ``rank`` on the axes that do not split it.

        >>> Layout.of(Placement.of("cpu", [[0, 1], [2, 3]]), "S(0), S(1)").ranks_along(1, 3)
        (2, 3)
        """
        fixed = [axis for axis, entry in enumerate(self.sbp) if entry != Split(dim)]
        here, place = self.placement.coordinates(rank), self.placement.coordinates
        return tuple(other for other in self.placement if all(place(other)[axis] == here[axis] for axis in fixed))

    @property
    def has_partial(self) -> bool:
        """Whether some axis holds terms of a reduction."""
        return any(isinstance(entry, Partial) for entry in self.sbp)

    @cached_property
    def is_broadcast(self) -> bool:
        """Whether every rank of the placement holds the whole tensor."""
        return all(isinstance(entry, Broadcast) for entry in self.sbp)

    @property
    def num_replicas(self) -> int:
        """Product of the sizes of the broadcast axes. Backward seeds a loss with one over it."""
        return math.prod(
            size for size, entry in zip(self.placement.shape, self.sbp, strict=True) if isinstance(entry, Broadcast)
        )

    def dual(self) -> Layout:
        """The layout of the gradient of a tensor with this layout."""
        return Layout(self.placement, tuple(dual(entry) for entry in self.sbp))

    def with_sbp(self, sbp: NdSbp) -> Layout:
        """Another nd-sbp on the same placement."""
        return Layout(self.placement, sbp)

    def without_terms(self) -> Layout:
        """The layout of the sum, with B for the partial sums of this one."""
        if not self.has_partial:
            return self
        return self.with_sbp(tuple(broadcast if isinstance(entry, Partial) else entry for entry in self.sbp))

    def broadcast(self) -> Layout:
        """The whole tensor on every rank of the same placement."""
        return self if self.is_broadcast else self._broadcast

    @cached_property
    def _broadcast(self) -> Layout:
        return Layout(self.placement, (broadcast,) * self.placement.num_axes)

    def region(self, shape: Shape, rank: int) -> Region:
        """The interval of every dim that ``rank`` holds, or has a term of."""
        return _region(self, shape, rank)

    def local_shape(self, shape: Shape, rank: int) -> Shape:
        """Sizes of ``rank``'s shard of a logical ``shape``."""
        return tuple(stop - start for start, stop in self.region(shape, rank))

    def __str__(self) -> str:
        return f"{format_sbp(self.sbp)} on {self.placement.device_type}:{self.placement.ranks}"


@lru_cache(maxsize=16384)
def _region(layout: Layout, shape: Shape, rank: int) -> Region:
    bounds = [(0, size) for size in shape]
    coordinates = layout.placement.coordinates(rank)
    for coordinate, parts, entry in zip(coordinates, layout.placement.shape, layout.sbp, strict=True):
        if isinstance(entry, Split):
            start, stop = bounds[entry.dim]
            low, high = balanced_bounds(stop - start, parts)[coordinate]
            bounds[entry.dim] = (start + low, start + high)
    return tuple(bounds)


def _normalize(entry: Sbp, shape: Shape) -> Sbp:
    if not isinstance(entry, Split):
        return entry
    dim = entry.dim + len(shape) if entry.dim < 0 else entry.dim
    if not 0 <= dim < len(shape):
        raise SbpError(
            f"{entry} splits dim {entry.dim}, but the tensor has {len(shape)} dims {shape}. "
            + (f"Split one of dims 0 to {len(shape) - 1}." if shape else "A scalar cannot be split: use B or P.")
        )
    return Split(dim)


def format_sbp(sbp: NdSbp) -> str:
    """``S(0)`` for one axis, ``(S(0), B)`` for several."""
    return repr(sbp[0]) if len(sbp) == 1 else f"({', '.join(map(repr, sbp))})"
