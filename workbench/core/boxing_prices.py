"""Fast prices of single boxings of one tensor, for a search that compares dozens of them.

The price is that of the plan (``BoxingPlan.time_s``), counted without a plan. Of many ranks, only a sample is counted:
layouts are regular, and neighbouring ranks send and receive alike.
"""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import NamedTuple

from workbench.core.boxing import LinkCost, is_all_reduce, plan_boxing
from workbench.core.layout import Layout, Shape
from workbench.core.moves import owner
from workbench.core.placement import Placement
from workbench.core.sbp import Broadcast, Partial, Split
from workbench.core.tiling import Place, num_elements, overlap, tiling_of

_MAX_PAIRS = 1024
"""With more pairs of ranks, the price follows from sizes alone."""
_NUM_SAMPLED = 64


class LayoutSummary(NamedTuple):
    """A layout, the elements of its largest shard, and its numbers of terms, copies and ranks."""

    layout: Layout
    largest: int
    num_terms: int
    num_copies: int
    num_ranks: int


class BoxingPrices:
    """Prices of boxings of a tensor of ``shape`` over a link.

    Attributes:
        num_priced: number of pairs of layouts priced: a measure of work that does not depend on the machine.
    """

    def __init__(self, shape: Shape, itemsize: int, cost: LinkCost) -> None:
        self.shape, self.itemsize, self.cost = shape, itemsize, cost
        self.num_priced = 0
        self._num_elements = math.prod(shape)
        self._shards: dict[Layout, _Shards] = {}
        self._common: dict[tuple[int, int], int] = {}

    def time_s(self, source: Layout, destination: Layout) -> float:
        """Seconds of a boxing, as ``plan_boxing(source, destination, ...).time_s(cost)``."""
        self.num_priced += 1
        if is_all_reduce(source, destination):
            return plan_boxing(source, destination, self.shape, self.itemsize).time_s(self.cost)
        a, b = self._shards_of(source), self._shards_of(destination)
        has_choice = a.num_copies > 1 or b.num_terms > 1  # else senders and bytes follow from the shards' sizes
        counts = has_choice and len(a.regions) * len(b.regions) <= _MAX_PAIRS
        elements = self._counted(a, b) if counts else _by_sizes(a, b)
        return self.cost.time_s(elements * self.itemsize)

    def at_least_s(self, a: LayoutSummary, b: LayoutSummary) -> float:
        """A lower bound of ``time_s``, from sizes alone.

        The busiest rank moves at least the mean, and at least what the largest new shard lacks.
        """
        if a.num_terms > b.num_terms and is_all_reduce(a.layout, b.layout):
            elements = a.largest * 2 * (a.num_terms - 1) // a.num_terms // b.num_terms
        else:
            common = self._common_ranks(a.layout.placement, b.layout.placement)
            kept = min(a.largest, b.largest) if common else 0
            elements = (self._num_elements * a.num_terms * b.num_copies - common * kept) // min(
                a.num_ranks, b.num_ranks
            )
            if b.num_terms == 1:
                elements = max(elements, b.largest * a.num_terms - kept)
        return self.cost.latency_s + elements * self.itemsize / self.cost.bandwidth_bytes_per_s if elements > 0 else 0.0

    def _common_ranks(self, a: Placement, b: Placement) -> int:
        key = (id(a), id(b))  # the placements of one search live as long as it does
        found = self._common.get(key)
        if found is None:
            found = self._common[key] = sum(rank in a for rank in b)
        return found

    def summary(self, layout: Layout) -> LayoutSummary:
        """The sizes that bounds need."""
        counts = {Partial: 1, Broadcast: 1, Split: 1}
        largest = list(self.shape)
        for entry, size in zip(layout.sbp, layout.placement.shape, strict=True):
            counts[type(entry)] *= size
            if isinstance(entry, Split):
                largest[entry.dim] = -(-largest[entry.dim] // size)
        return LayoutSummary(layout, math.prod(largest), counts[Partial], counts[Broadcast], layout.placement.num_ranks)

    def _shards_of(self, layout: Layout) -> _Shards:
        shards = self._shards.get(layout)
        if shards is None:
            shards = self._shards[layout] = _Shards(layout, self.shape)
        return shards

    def _counted(self, a: _Shards, b: _Shards) -> int:
        """Elements that the busiest rank sends or receives."""
        sent = [0] * len(a.regions)
        owners = self._owners(a, b) if b.num_terms > 1 else None
        most = 0
        for taker, position in b.index.items():
            region, received, own = b.regions[position], 0, a.index.get(taker)
            for place in a.places_for(own, position):
                if place == own or (owners is not None and owners[place] != b.terms[position]):
                    continue
                common = overlap(a.regions[place], region)
                sent[place] += common
                received += common
            most = max(most, received)
        return max(most, *sent)

    def _owners(self, a: _Shards, b: _Shards) -> list[int]:
        """By place in the source: which of the destination's terms it goes to."""
        places = zip(range(len(a.regions)), a.copies, a.terms, strict=True)
        return [
            owner(a.layout, b.layout, self.shape, Place(place - copy - term, term, 0)) for place, copy, term in places
        ]


class _Shards:
    """A layout's shards in the order of its grid: regions, and which set of copies and which term each belongs to."""

    def __init__(self, layout: Layout, shape: Shape) -> None:
        tiling = tiling_of(layout, shape)
        self.layout, self.num_copies, self.num_terms = layout, len(tiling.copies), len(tiling.terms)
        self._copy_offsets = tiling.copies
        self.index = {rank: place for place, rank in enumerate(layout.placement.grid)}
        offsets = itertools.product(tiling.tiles(), tiling.terms, tiling.copies)
        placed = sorted((tile + term + copy, region, copy, term) for (tile, region), term, copy in offsets)
        _, self.regions, self.copies, self.terms = zip(*placed, strict=True)
        self.sizes = [num_elements(region) for region in self.regions]

    @cached_property
    def _sets(self) -> dict[int, list[int]]:
        """The places of every set of copies; together the ranks of a set hold everything once."""
        found: dict[int, list[int]] = {}
        for place, copy in enumerate(self.copies):
            found.setdefault(copy, []).append(place)
        return found

    def places_for(self, own: int | None, position: int) -> list[int]:
        """Where a rank takes slices from: its own set of copies, or, from outside, one by its place in the new grid."""
        return self._sets[self._copy_offsets[position % self.num_copies] if own is None else self.copies[own]]

    @cached_property
    def sample(self) -> list[tuple[int, int]]:
        """(rank, place) of all ranks, or of some of many, evenly spread, the first and the last among them."""
        ranks = list(self.index.items())
        if len(ranks) <= _NUM_SAMPLED:
            return ranks
        return [*itertools.islice(ranks, 0, None, len(ranks) // (_NUM_SAMPLED // 2)), ranks[-1]]


def _by_sizes(a: _Shards, b: _Shards) -> int:
    """An estimate without counting: several copies or terms share the elements evenly."""
    kept: dict[int, int] = {}
    for rank, place in itertools.chain(((rank, a.index.get(rank)) for rank, _ in b.sample), a.sample):
        other = b.index.get(rank)
        if place is not None and other is not None and rank not in kept:
            kept[rank] = overlap(a.regions[place], b.regions[other])
    received = max(b.sizes[place] * a.num_terms // b.num_terms - kept.get(rank, 0) for rank, place in b.sample)
    sent = max(a.sizes[place] * b.num_copies // a.num_copies - kept.get(rank, 0) for rank, place in a.sample)
    return max(received, sent)
