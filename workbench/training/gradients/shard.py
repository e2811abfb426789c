"""Shards of parameters that several ranks hold alike: what each of them keeps under ZeRO.

A shard is a layout: the axes on which a parameter is whole become one axis, the last, that splits one of its dims. So a
shard is a part of what the rank holds of the parameter, and boxings, checkpoints and norms know what to do with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from workbench.core.layout import Layout, Region, Shape, balanced_bounds
from workbench.core.placement import Placement
from workbench.core.sbp import Broadcast, Partial, Split, split
from workbench.tensors.global_tensor import GlobalTensor, Spec, spec_of

_EVEN_ENOUGH = 1.05
"""A dim may be split where the largest part is at most so many times the mean."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a parameter that this rank's optimizer works on.

    Attributes:
        of: what the parameter was when the shard was chosen; a shard of anything else is void.
        spec: layout of the shards.
        group: the ranks that hold this rank's part of the parameter, in the order in which terms are added.
        regions: by rank of the group, where its shard lies in the local parameter.
        shapes, sizes: by rank of the group, the shape of its shard, and how many elements that is.
    """

    of: Spec
    spec: Spec
    group: tuple[int, ...]
    regions: dict[int, Region]
    shapes: dict[int, tuple[int, ...]]
    sizes: dict[int, int]

    def renumbered(self, of: Spec, spec: Spec, number: Callable[[int], int]) -> Shard:
        """The same shard in a world that gives its ranks other numbers, and so other layouts."""
        if not self.group or spec.is_placeholder:
            return Shard(of, spec, (), {}, {}, {})
        by_rank = [
            {number(rank): known[rank] for rank in self.group} for known in (self.regions, self.shapes, self.sizes)
        ]
        return Shard(of, spec, tuple(map(number, self.group)), *by_rank)  # type: ignore[arg-type]


def shard_of(parameter: GlobalTensor) -> Shard | None:
    """The shard that was chosen for a parameter; None where its optimizer works on all that the rank holds."""
    shard: Shard | None = parameter.__dict__.get("_shard")
    return shard if shard is not None and shard.of is parameter._spec else None


def state_spec(parameter: GlobalTensor) -> Spec:
    """Layout and shape of an optimizer's per-element state of a parameter."""
    shard = shard_of(parameter)
    return parameter._spec if shard is None else shard.spec


def sharded(layout: Layout, shape: Shape, turn: int = 0) -> Layout | None:
    """``layout`` with its copies cut into shards; None where nothing is held twice or there is no dim to split.

    The first shards are the larger ones where a dim does not divide evenly; ``turn`` says by how many places the ranks
    go round, so that these fall on other ranks.

    >>> str(sharded(Layout.of(Placement.of("cpu", [[0, 1], [2, 3]]), ["B", "S(0)"]), (8, 5)))
    '(S(0), S(0)) on cpu:[[0, 2], [1, 3]]'
    """
    sizes = layout.placement.shape
    copies = [axis for axis, entry in enumerate(layout.sbp) if isinstance(entry, Broadcast)]
    parts = [axis for axis in range(len(sizes)) if axis not in copies]
    count = math.prod(sizes[axis] for axis in copies)
    if count == 1 or not shape or any(isinstance(entry, Partial) for entry in layout.sbp):
        return None
    grid: list[int] = []
    for part in itertools.product(*(range(sizes[axis]) for axis in parts)):
        ranks = [
            layout.placement.rank_at(
                [dict(zip(parts + copies, part + copy, strict=True))[a] for a in range(len(sizes))]
            )
            for copy in itertools.product(*(range(sizes[axis]) for axis in copies))
        ]
        grid += ranks[-turn % count :] + ranks[: -turn % count]
    placement = Placement(layout.placement.device_type, tuple(grid), (*(sizes[axis] for axis in parts), count))
    return Layout(placement, (*(layout.sbp[axis] for axis in parts), split(_dim_to_split(layout, shape, count))))


def _dim_to_split(layout: Layout, shape: Shape, count: int) -> int:
    """The first dim where it divides evenly enough (its shards are contiguous), else the one that does best."""
    costs = []
    for dim, size in enumerate(shape):
        parts = math.prod(s for s, e in zip(layout.placement.shape, layout.sbp, strict=True) if e == Split(dim))
        held = max(1, size // parts)
        costs.append(-(-held // count) * count / held)
    return 0 if costs[0] <= _EVEN_ENOUGH else costs.index(min(costs))


def choose_shards(parameters: Iterable[GlobalTensor]) -> None:
    """Give every parameter that several ranks hold alike its shard, so that all ranks hold about the same.

    The choice follows from layouts and shapes alone: all ranks of the world make the same one.
    """
    loads: dict[tuple[int, ...], list[int]] = {}
    for parameter in sorted(parameters, key=lambda p: -math.prod(p._spec.shape)):
        layout = _balanced(parameter._spec, loads)
        if layout is not None:
            parameter.__dict__["_shard"] = _shard(parameter._spec, layout)


def _balanced(spec: Spec, loads: dict[tuple[int, ...], list[int]]) -> Layout | None:
    """The shards whose ranks have least so far; loads are counted by the places of the first group of copies."""
    layout = sharded(spec.layout, spec.shape)
    if layout is None:
        return None
    count, entry = layout.placement.shape[-1], layout.sbp[-1]
    assert isinstance(entry, Split)
    row = math.prod(spec.shape) // max(1, spec.shape[entry.dim])
    pieces = [(stop - start) * row for start, stop in balanced_bounds(spec.shape[entry.dim], count)]
    load = loads.setdefault((*layout.placement.grid, count), [0] * count)

    def after(turn: int) -> list[int]:
        return [load[place] + pieces[(place + turn) % count] for place in range(count)]

    turn = min(range(count), key=lambda turn: (max(after(turn)), turn))
    load[:] = after(turn)
    return sharded(spec.layout, spec.shape, turn)


def _shard(spec: Spec, layout: Layout) -> Shard:
    state = spec_of(spec.world, layout, spec.shape)
    if spec.is_placeholder:
        return Shard(spec, state, (), {}, {}, {})
    corner = [start for start, _ in spec.layout.region(spec.shape, spec.world.rank)]
    regions = {
        rank: tuple(
            (start - at, stop - at) for at, (start, stop) in zip(corner, layout.region(spec.shape, rank), strict=True)
        )
        for rank in spec.term_ranks
    }
    shapes = {rank: tuple(stop - start for start, stop in region) for rank, region in regions.items()}
    sizes = {rank: math.prod(shape) for rank, shape in shapes.items()}
    return Shard(spec, state, spec.term_ranks, regions, shapes, sizes)
