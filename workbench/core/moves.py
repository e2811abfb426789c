"""Which slice of whose shard goes where: the moves of a boxing, for one rank at a time.

Between thousands of ranks there are millions of moves; a rank only ever needs its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from workbench.core.layout import Layout, Region, Shape
from workbench.core.sbp import Partial
from workbench.core.tiling import Place, num_elements, overlap, tiling_of


@dataclass(frozen=True, slots=True)
class Move:
    """One slice from one rank's shard to another's; regions count from the start of the shard."""

    source: int
    destination: int
    source_region: Region
    destination_region: Region

    @property
    def num_elements(self) -> int:
        """How many elements the slice has."""
        return math.prod(stop - start for start, stop in self.source_region)


def owner(source: Layout, destination: Layout, shape: Shape, place: Place) -> int:
    """Which of the destination's terms a source's term goes to, as an offset in the destination's grid.

    The other terms start from the reduction's identity. A term stays where it is if its first holder is in the
    destination, so that P -> P, S -> P and B -> P move nothing; the others are dealt out. Terms of one reduction must
    be complete before they enter another.
    """
    if not destination.has_partial:
        return 0
    targets = tiling_of(destination, shape)
    kinds = {entry.reduction for layout in (source, destination) for entry in layout.sbp if isinstance(entry, Partial)}
    first_holder = place.tile + place.term if len(kinds) == 1 or not source.has_partial else 0
    home = source.placement.grid[first_holder]
    return (
        targets.place(home).term if home in destination.placement else targets.terms[first_holder % len(targets.terms)]
    )


@lru_cache(maxsize=16384)
def moves_to(source: Layout, destination: Layout, shape: Shape, rank: int) -> tuple[Move, ...]:
    """By the first holder of each slice. A copy that the rank has itself comes first, then those in its own set of
    copies; what other ranks take is spread over the sets.
    """
    tiling = tiling_of(source, shape)
    target, mine = destination.region(shape, rank), tiling_of(destination, shape).place(rank)
    index = mine.tile + mine.term + mine.copy
    own = tiling.place(rank) if rank in source.placement else None
    copy = own.copy if own is not None else tiling.copies[index % len(tiling.copies)]
    found = []
    for tile, common, origin in tiling.overlaps(target):
        for term in tiling.terms:
            if owner(source, destination, shape, Place(tile, term, 0)) != mine.term:
                continue
            move = Move(
                tiling.grid[tile + term + copy],
                rank,
                _relative(common, origin),
                _relative(common, [start for start, _ in target]),
            )
            found.append((tile + term, move))
    return tuple(move for _, move in sorted(found, key=lambda item: item[0]))


@lru_cache(maxsize=16384)
def moves_from(source: Layout, destination: Layout, shape: Shape, rank: int) -> tuple[Move, ...]:
    """By destination. The counterpart of ``moves_to``: who would take a slice from this rank?"""
    tiling, targets = tiling_of(source, shape), tiling_of(destination, shape)
    own, region = tiling.place(rank), source.region(shape, rank)
    term = owner(source, destination, shape, own)
    found = []
    for tile, common, origin in targets.overlaps(region):
        for copy in targets.copies:
            index = tile + term + copy
            taker = targets.grid[index]
            is_source = taker in source.placement
            if own.copy == (tiling.place(taker).copy if is_source else tiling.copies[index % len(tiling.copies)]):
                move = Move(rank, taker, _relative(common, [start for start, _ in region]), _relative(common, origin))
                found.append((index, move))
    return tuple(move for _, move in sorted(found, key=lambda item: item[0]))


@lru_cache(maxsize=4096)
def gathered_regions(source: Layout, destination: Layout, shape: Shape, rank: int) -> dict[int, Region]:
    """By rank, the places of the parts in the shard that this rank gathers, where the same ranks gather all of it, and
    nothing else: an all-gather. Empty otherwise. Where groups of ranks have copies, each group gathers its own.

    >>> from workbench.core.placement import Placement
    >>> p = Placement.of("cpu", [1, 0])
    >>> gathered_regions(Layout.of(p, "S(0)"), Layout.of(p, "B"), (5,), 0)
    {1: ((0, 3),), 0: ((3, 5),)}
    """
    ranks: Iterable[int] = destination.placement
    if rank not in ranks or source.has_partial or destination.has_partial:
        return {}
    tiling = tiling_of(source, shape)
    if len(tiling.copies) > 1:
        if source.placement != ranks:
            return {}
        copy = tiling.place(rank).copy
        ranks = [other for other in ranks if tiling.place(other).copy == copy]
    whole = destination.region(shape, rank)
    group = [other for other in ranks if destination.region(shape, other) == whole]
    parts = {other: source.region(shape, other) for other in group if other in source.placement}
    is_inside = all(overlap(part, whole) == num_elements(part) for part in parts.values())
    num_held = sum(map(num_elements, parts.values()))
    if len(parts) < max(2, len(group)) or not is_inside or num_held != num_elements(whole) or not num_held:
        return {}
    return {other: _relative(part, [start for start, _ in whole]) for other, part in parts.items()}


def _relative(region: Region, origin: Sequence[int]) -> Region:
    return tuple((start - base, stop - base) for (start, stop), base in zip(region, origin, strict=True))
