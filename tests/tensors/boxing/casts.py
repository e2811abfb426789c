"""Boxings by the thousand: which ones, what a rank does for each, and what must have come out.

Values are small integers, exact in every dtype whatever the order of a sum, so every comparison is for equality (and
gradients are multiples of 24, since a seed is spread evenly over the copies of what it is the gradient of). The ranks
only box; what they return is compared with the oracle afterwards, in one place.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from tests.oracle import assert_holds, shard
from workbench.core.boxing import BoxingPlan
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Partial
from workbench.tensors.global_tensor import GlobalTensor, new_placeholder, spec_of, wrap
from workbench.tensors.world import World, current

ONEFLOW_SOURCES = ([2], [0, 1], [1, 2, 3], [0, 1, 2, 3], [[0, 1, 2, 3]], [[0, 1], [2, 3]])
ONEFLOW_TARGETS = ([1], [3], [2, 3], [0, 1, 3], [0, 1, 2, 3], [[2], [3]], [[0, 1], [2, 3]])
"""Placements of OneFlow's boxing tests: same, overlapping, disjoint, larger, smaller, one axis and two."""
ONEFLOW_SHAPES = ((12, 12), (18, 24), (17, 13, 19), (25, 33), (13, 17), (5, 7), (8, 0, 4))
GRIDS_OF_4 = [
    [0], [2], [0, 1], [1, 0], [1, 2, 3], [3, 1, 2, 0], [2, 3], [0, 1, 3], [0, 1, 2, 3],
    [[0, 1, 2, 3]], [[2], [3]], [[0, 1], [2, 3]], [[3, 0], [1, 2]], [[0, 2], [1, 3]],
    [[[0, 1], [2, 3]]], [[[0], [1]], [[2], [3]]], [[[3, 1]], [[0, 2]]],
]  # fmt: skip
GRIDS_OF_6 = [
    *GRIDS_OF_4, [5], [4, 5], [5, 3, 1], [0, 1, 2, 3, 4, 5], [5, 0, 4, 1, 3, 2], [[0, 1, 2], [3, 4, 5]],
    [[5, 0], [3, 1], [2, 4]], [[0, 1], [2, 3], [4, 5]], [[[0, 1, 2]], [[3, 4, 5]]],
    [[[0], [5]], [[1], [4]], [[2], [3]]],
]  # fmt: skip
GRIDS_OF_8 = [
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], [[[7, 2], [5, 0]], [[1, 4], [3, 6]]], [[0, 1, 2, 3], [4, 5, 6, 7]],
    [[[[0], [1]], [[2], [3]]], [[[4], [5]], [[6], [7]]]], [6, 1, 4], [0, 1, 2, 3, 4, 5, 6, 7], [[1, 3, 5, 7]],
    [[2, 6], [4, 0]],
]  # fmt: skip
SHAPES = ((), (1,), (7,), (2, 3), (5, 7), (8, 4), (1, 6), (3, 0), (0, 0), (2, 1, 5), (4, 2, 3), (6, 5, 4, 3))
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


@dataclass(frozen=True)
class Cast:
    """One boxing to try; ``strided`` lays the source's shards out with the dims in another order."""

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    strided: bool = False

    @property
    def is_differentiable(self) -> bool:
        """Whether it is linear, on numbers that have gradients."""
        entries = (*self.source.sbp, *self.target.sbp)
        return self.dtype.is_floating_point and not any(
            isinstance(entry, Partial) and entry.reduction != "sum" for entry in entries
        )

    @property
    def full(self) -> np.ndarray:
        """The logical tensor."""
        low, high = (0, 2) if self.dtype == torch.bool else (4, 9) if self.dtype == torch.uint8 else (-9, 10)
        kind = bool if self.dtype == torch.bool else np.int64
        return np.random.default_rng(len(repr(self))).integers(low, high, self.shape).astype(kind)


class Outcome(NamedTuple):
    """What one rank has of a cast afterwards; shards are None outside the placement they belong to."""

    shard: torch.Tensor | None
    grad: torch.Tensor | None
    second: torch.Tensor | None
    moved: int
    """Bytes that the transport has counted: sent, or read of other ranks' memory."""
    planned: int


def entries_for(shape: tuple[int, ...], reductions: tuple[str, ...]) -> list[str]:
    """What an axis may have for a tensor of this shape."""
    return [*(f"S({dim})" for dim in range(len(shape))), "B", *reductions]


@cache
def layouts_on(grid: str, shape: tuple[int, ...], reduction: str) -> tuple[Layout, ...]:
    """All layouts with at most one kind of reduction; ``grid`` is a text, because lists have no hash."""
    placement = Placement.of("cpu", eval(grid))
    choices = itertools.product(entries_for(shape, (reduction,)), repeat=placement.num_axes)
    return tuple(Layout.of(placement, list(sbp)) for sbp in choices)


def oneflow_grid() -> list[Cast]:
    """OneFlow's grid of casts between one- and two-axis placements on CPU, P destinations included."""
    found = []
    for source, target in itertools.product(ONEFLOW_SOURCES, ONEFLOW_TARGETS):
        for number, (a, b) in enumerate(
            itertools.product(layouts_on(str(source), (1, 1), "P"), layouts_on(str(target), (1, 1), "P"))
        ):
            for step in range(2 if len(a.sbp) + len(b.sbp) == 4 else 3):
                found.append(Cast(a, b, ONEFLOW_SHAPES[(number + 3 * step) % len(ONEFLOW_SHAPES)]))  # noqa: PERF401
    return found


def sampled(grids: list, count: int, seed: int) -> list[Cast]:
    """A seeded sample of everything: placements, entries, reductions, shapes, dtypes, strides."""
    chance, found = random.Random(seed), []
    while len(found) < count:
        shape, dtype = chance.choice(SHAPES), chance.choice(DTYPES)
        a, b = (
            chance.choice(layouts_on(str(chance.choice(grids)), shape, chance.choice(["P", "P", "P(max)", "P(min)"])))
            for _ in range(2)
        )
        found.append(Cast(a, b, shape, dtype, strided=chance.random() < 0.3))
    return found


def run_casts(casts: list[Cast], rank: int) -> list[Outcome]:
    """Every rank's part of every cast."""
    return [_run(cast, rank) for cast in casts]


def _run(cast: Cast, rank: int) -> Outcome:
    world = current()
    x = place(cast, cast.source, rank, seed=1, strided=cast.strided)
    if cast.is_differentiable:
        x.requires_grad_()
    plan = x.boxing_plan(placement=cast.target.placement, sbp=cast.target.sbp)
    counted = "read_bytes" if hasattr(world.transport, "read_bytes") else "sent_bytes"
    before = getattr(world.transport, counted)
    y = x.to_global(placement=cast.target.placement, sbp=cast.target.sbp)
    moved = getattr(world.transport, counted) - before
    assert y.shape == cast.shape and y.dtype == cast.dtype and y.layout_on_ranks == cast.target.normalized(cast.shape)
    grad = second = None
    if cast.is_differentiable:
        g = place(cast, cast.target.dual(), rank, seed=2, scale=24).requires_grad_()
        (grad,) = torch.autograd.grad(y, x, g, create_graph=True)
        v = place(cast, cast.source, rank, seed=3, scale=24)
        (second,) = torch.autograd.grad(grad, g, v)
        assert grad.layout_on_ranks == x.layout_on_ranks.dual() and second.layout_on_ranks == y.layout_on_ranks
    planned = sum(planned_bytes(step, world, counted) for step in getattr(plan, "steps", [plan]))
    return Outcome(held(y), held(grad), held(second), moved, planned)


def planned_bytes(plan: BoxingPlan, world: World, counted: str) -> int:
    """What a rank sends or reads. Sums over hosts go inside them, between first ranks, and back: two ranks on each of
    two hosts read each other's term, then the other host's sum, which they get from there or from the first rank.
    """
    planned = (plan.bytes_sent if counted == "sent_bytes" else plan.bytes_received).get(world.rank, 0)
    group = next((group for group in plan.groups if world.rank in group), ())
    if plan.kind != "all-reduce" or world.transport_name != "mixed" or len(group) <= 1:
        return planned
    hosts = [{0, 1} & {*group}, {2, 3} & {*group}]
    near = next(host for host in hosts if world.rank in host)
    if len(near) == len(group) or all(len(host) == 1 for host in hosts):
        return planned
    term = math.prod(plan.source.local_shape(plan.shape, world.rank)) * plan.itemsize
    widened = 2 if plan.reduction == "sum" and plan.itemsize == 2 else 1  # to be rounded once
    return term * widened * len(near)


def place(cast: Cast, layout: Layout, rank: int, seed: int, scale: int = 1, strided: bool = False) -> GlobalTensor:
    """A global tensor made of the oracle's shards of ``scale`` times the cast's values."""
    spec = spec_of(current(), layout, cast.shape)
    if spec.is_placeholder:
        return wrap(new_placeholder(spec.shape, cast.dtype, torch.device("cpu")), spec)
    local = torch.from_numpy(np.array(shards(cast, layout, seed, scale)[rank])).reshape(spec.local_shape).to(cast.dtype)
    if strided:
        reverse = tuple(reversed(range(local.dim())))
        local = torch.stack([local.permute(reverse)] * 2, dim=-1).contiguous()[..., 1].permute(reverse)
    return wrap(local, spec)


@lru_cache(maxsize=16)
def shards(cast: Cast, layout: Layout, seed: int, scale: int) -> dict[int, np.ndarray]:
    """What the oracle gives every rank; made once for all simulated ranks."""
    return shard(scale * cast.full if scale > 1 else cast.full, layout, seed)


def held(tensor: GlobalTensor | None) -> torch.Tensor | None:
    """A rank's own memory of a tensor, which nobody else may share; None outside the placement."""
    return None if tensor is None or tensor.is_placeholder else tensor.to_local().detach().clone()


def check_casts(casts: list[Cast], by_rank: list[list[Outcome]]) -> None:
    """Compare with the oracle: shards, gradients (the dual layout), gradients of gradients, bytes."""
    for number, cast in enumerate(casts):
        outcomes = {rank: outcomes[number] for rank, outcomes in enumerate(by_rank)}
        try:
            check(cast, outcomes)
        except AssertionError as error:
            error.add_note(f"cast {number}: {cast}")
            raise


def check(cast: Cast, outcomes: dict[int, Outcome]) -> None:
    """One cast, from all ranks' outcomes."""
    full = cast.full
    _assert_shards(full, cast.target, {rank: outcome.shard for rank, outcome in outcomes.items()})
    if cast.is_differentiable:
        _assert_shards(24 * full, cast.source.dual(), {rank: outcome.grad for rank, outcome in outcomes.items()})
        _assert_shards(24 * full, cast.target, {rank: outcome.second for rank, outcome in outcomes.items()})
    for rank, outcome in outcomes.items():
        assert outcome.moved == outcome.planned, f"rank {rank} moved {outcome.moved}, planned {outcome.planned}"


def _assert_shards(full: np.ndarray, layout: Layout, shards: dict[int, torch.Tensor | None]) -> None:
    missing = {rank for rank, part in shards.items() if part is None}
    assert missing == set(shards) - set(layout.placement), (layout, missing)
    parts = {rank: part for rank, part in shards.items() if part is not None}
    kind = bool if full.dtype == bool else np.float64
    arrays = {rank: part.to(torch.bool if kind is bool else torch.float64).numpy() for rank, part in parts.items()}
    if any(part.dtype == torch.uint8 for part in parts.values()):  # terms of a sum may have gone below zero
        arrays = {rank: part.numpy() for rank, part in parts.items()}
    if any(isinstance(entry, Partial) for entry in layout.sbp):
        arrays = {rank: array.astype(np.uint8) if kind is bool else array for rank, array in arrays.items()}
        layout = _or_is_max(layout) if kind is bool else layout
    assert_holds(arrays, layout, full.astype(next(iter(arrays.values())).dtype), atol=0)


def _or_is_max(layout: Layout) -> Layout:
    entries = (Partial("max") if entry == Partial("sum") else entry for entry in layout.sbp)
    return layout.with_sbp(tuple(entries))


__all__ = ["Cast", "Outcome", "check_casts", "oneflow_grid", "run_casts", "sampled"]
