"""Shards of parameters that several ranks hold: the part that each of them keeps under ZeRO.

A shard is a layout: the axes on which a parameter is whole become one axis, the last, that splits one of its dims. A
shard is thus a part of the rank's part of the parameter, and boxings, checkpoints and norms can handle it. With groups
of shards they become two axes, B over the groups and S inside a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.core.layout import Layout, Region, Shape, balanced_bounds
from workbench.core.placement import Placement
from workbench.core.sbp import Broadcast, Partial, Split, broadcast, split
from workbench.core.shard_groups import num_groups
from workbench.tensors.global_tensor import GlobalTensor, Spec, spec_of

_EVEN_ENOUGH = 1.05
"""A dim may be split if its largest part is at most this many times the mean."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a parameter on which this rank's optimizer works.

    Attributes:
        of: the parameter's spec when the shard was chosen; with another spec the shard is void.
        spec: layout of the shards.
        region: the place of this rank's shard in its local parameter; empty if it holds none.
        whole: the same as ``of`` on this rank. With several groups it lies on the placement of the shards, so that
            boxings between the two stay inside a group.
    """

    of: Spec
    spec: Spec
    region: Region
    whole: Spec

    @classmethod
    def from_specs(cls, of: Spec, spec: Spec, region: Region) -> Shard:
        """The shard of a parameter with the spec ``of``."""
        if spec.layout.num_replicas == 1:
            return cls(of, spec, region, of)
        whole = spec.layout.with_sbp((*spec.layout.sbp[:-1], broadcast))
        return cls(of, spec, region, spec_of(spec.world, whole, spec.shape))


def shard_of(parameter: GlobalTensor) -> Shard | None:
    """The shard of a parameter; None if its optimizer works on the rank's whole part."""
    shard: Shard | None = parameter._optimizer_shard
    return shard if shard is not None and shard.of is parameter._spec else None


def state_spec(parameter: GlobalTensor) -> Spec:
    """Layout and shape of an optimizer's per-element state of a parameter."""
    shard = shard_of(parameter)
    return parameter._spec if shard is None else shard.spec


def spec_like(spec: Spec, shape: Shape) -> Spec:
    """``spec`` for state of another shape, split along dims that have the parameter's size: moments of rows are split
    like the rows.
    """
    if tuple(shape) == tuple(spec.shape):
        return spec
    kept = [
        entry
        if isinstance(entry, Split) and shape[entry.dim : entry.dim + 1] == (spec.shape[entry.dim],)
        else broadcast
        for entry in spec.layout.sbp
    ]
    return spec_of(spec.world, spec.layout.with_sbp(tuple(kept)), shape)


def is_first_holder(spec: Spec) -> bool:
    """Whether this rank is the first of those with the same part."""
    place = spec.layout.placement.coordinates(spec.world.rank)
    return all(at == 0 for at, entry in zip(place, spec.layout.sbp, strict=True) if not isinstance(entry, Split))


def sharded(layout: Layout, shape: Shape, turn: int = 0, groups: int = 1) -> Layout | None:
    """``layout`` with its copies split into shards; None if there are no copies or no dim to split.

    The first shards are larger if a dim does not divide evenly. ``turn`` rotates the ranks of a group by this many
    places, so that other ranks get the larger shards. The copies are cut into ``groups`` of consecutive ranks, or more
    if their number needs it.

    >>> str(sharded(Layout.of(Placement.of("cpu", [[0, 1], [2, 3]]), ["B", "S(0)"]), (8, 5)))
    '(S(0), S(0)) on cpu:[[0, 2], [1, 3]]'
    >>> str(sharded(Layout.of(Placement.of("cpu", [0, 1, 2, 3]), "B"), (8, 5), groups=2))
    '(B, S(0)) on cpu:[[0, 1], [2, 3]]'
    """
    sizes = layout.placement.shape
    copies = [axis for axis, entry in enumerate(layout.sbp) if isinstance(entry, Broadcast)]
    parts = [axis for axis in range(len(sizes)) if axis not in copies]
    copies_of_each = math.prod(sizes[axis] for axis in copies)
    groups = num_groups(copies_of_each, groups)
    count = copies_of_each // groups
    if count == 1 or not shape or any(isinstance(entry, Partial) for entry in layout.sbp):
        return None
    ranks = np.array(layout.placement.grid).reshape(sizes).transpose(parts + copies).reshape(-1, count)
    grid = np.roll(ranks, turn, axis=1).flatten().tolist()
    shape_of_grid = (*(sizes[axis] for axis in parts), *([groups] if groups > 1 else []), count)
    placement = Placement(layout.placement.device_type, tuple(grid), shape_of_grid)
    kept = (*(layout.sbp[axis] for axis in parts), *([broadcast] if groups > 1 else []))
    return Layout(placement, (*kept, split(_dim_to_split(layout, shape, count))))


def _dim_to_split(layout: Layout, shape: Shape, count: int) -> int:
    """The first dim if it divides evenly enough (its shards are contiguous), else the dim that divides best."""
    costs = []
    for dim, size in enumerate(shape):
        parts = math.prod(s for s, e in zip(layout.placement.shape, layout.sbp, strict=True) if e == Split(dim))
        held = max(1, size // parts)
        costs.append(-(-held // count) * count / held)
    return 0 if costs[0] <= _EVEN_ENOUGH else costs.index(min(costs))


def choose_shards(parameters: Sequence[GlobalTensor], groups: Sequence[int]) -> None:
    """Choose the shard of each parameter that several ranks hold, see ``shard_layouts``."""
    layouts = shard_layouts([parameter._spec for parameter in parameters], groups)
    for parameter, layout in zip(parameters, layouts, strict=True):
        if layout is not None:
            parameter._optimizer_shard = _shard(parameter._spec, layout)


def shard_layouts(specs: Sequence[Spec], groups: Sequence[int]) -> list[Layout | None]:
    """The layouts of the shards of parameters with these specs, so that all ranks hold about the same.

    None for a parameter that one rank holds, or that has no dim to split. ``groups``: into how many groups the ranks of
    each parameter are cut; each group has all shards.

    The choice depends on layouts and shapes only: all ranks of the world make the same one.
    """
    loads: dict[tuple[int, ...], list[int]] = {}
    largest_first = sorted(range(len(specs)), key=lambda number: -math.prod(specs[number].shape))
    chosen = {number: _balanced(specs[number], loads, groups[number]) for number in largest_first}
    return [chosen[number] for number in range(len(specs))]


def _balanced(spec: Spec, loads: dict[tuple[int, ...], list[int]], groups: int) -> Layout | None:
    """The shards whose ranks have the least so far. Loads are counted by the places of the first group of copies."""
    layout = sharded(spec.layout, spec.shape, groups=groups)
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
    return sharded(spec.layout, spec.shape, turn, groups)


def _shard(spec: Spec, layout: Layout) -> Shard:
    state = spec_of(spec.world, layout, spec.shape)
    if spec.is_placeholder:
        return Shard.from_specs(spec, state, ())
    corner = [start for start, _ in spec.layout.region(spec.shape, spec.world.rank)]
    own = zip(corner, layout.region(spec.shape, spec.world.rank), strict=True)
    return Shard.from_specs(spec, state, tuple((start - at, stop - at) for at, (start, stop) in own))
