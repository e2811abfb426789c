"""Moves rows along split dims: slices, flips, joins and pads of a split dim without a gather.

A row map takes rows of some tensors to rows of others: ``Segment(0, 3, 1, 0, 0, 2)`` says that rows 3 and 4 of tensor 0
become rows 0 and 1 of result 0. It is linear: rows of a result without a source are zero. Its gradient is the same map
in the other direction, with a sum where a row was taken more than once. All other dims, and the axes of the placement
that do not split the dim, do not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from workbench.core.layout import Layout, Shape
from workbench.errors import ExplicitBoxingError
from workbench.tensors.boxing.uneven import Account
from workbench.tensors.global_tensor import local_torch
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.world import World

MAX_SEGMENTS = 512
"""A map of more segments costs more to plan than a gather."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Row ``start + i * step`` of tensor ``source`` becomes row ``first + i`` of result ``result``, ``i < length``."""

    source: int
    start: int
    step: int
    result: int
    first: int
    length: int


@dataclass(frozen=True, slots=True)
class Side:
    """A tensor of the map, with its layout and logical shape."""

    layout: Layout
    shape: Shape


Progression = tuple[int, int, int]
"""First local row, step and number of rows."""


@dataclass(frozen=True, slots=True)
class RowMove:
    """Rows from one rank's shard of a source to another's of a result."""

    from_rank: int
    to_rank: int
    source: int
    taken: Progression
    result: int
    put: Progression

    def reversed(self) -> RowMove:
        """The same rows in the other direction."""
        return RowMove(self.to_rank, self.from_rank, self.result, self.put, self.source, self.taken)


@dataclass(frozen=True)
class RowPlan:
    """Which rank sends which rows to which. ``adds``: several rows may arrive at one place, as in the gradient."""

    dim: int
    sources: tuple[Side, ...]
    results: tuple[Side, ...]
    moves: tuple[RowMove, ...]
    adds: bool = False

    @cached_property
    def transposed(self) -> RowPlan:
        """The plan of the gradient; its layouts are the duals."""
        back = tuple(move.reversed() for move in self.moves)
        plan = RowPlan(self.dim, _dual(self.results), _dual(self.sources), back, not self.adds)
        plan.__dict__["transposed"] = self
        return plan

    def account(self, itemsize: int) -> Account:
        """The bytes that each rank sends."""
        first, last = self.sources[0], self.results[0]
        sent: dict[int, int] = {}
        for move in self.moves:
            if move.from_rank != move.to_rank:
                side = self.results[move.result]
                sizes = side.layout.local_shape(side.shape, move.to_rank)
                row = math.prod(size for d, size in enumerate(sizes) if d != self.dim)
                sent[move.from_rank] = sent.get(move.from_rank, 0) + move.put[2] * row * itemsize
        return Account(first.layout, last.layout, first.shape, sent)


def _dual(sides: tuple[Side, ...]) -> tuple[Side, ...]:
    return tuple(Side(side.layout.dual(), side.shape) for side in sides)


@lru_cache(maxsize=1024)
def plan_rows(dim: int, segments: tuple[Segment, ...], sources: tuple[Side, ...], results: tuple[Side, ...]) -> RowPlan:
    """The moves of a row map between layouts. Layouts agree on axes that split ``dim`` on neither side."""
    placement = results[0].layout.placement
    moves = []
    for rank in placement:
        bounds = [side.layout.region(side.shape, rank)[dim] for side in results]
        for segment in segments:
            low, high = bounds[segment.result]
            wanted = (max(0, low - segment.first), min(segment.length, high - segment.first))
            if wanted[0] >= wanted[1]:
                continue
            source = sources[segment.source]
            for holder in source.layout.ranks_along(dim, rank):
                start, stop = source.layout.region(source.shape, holder)[dim]
                held = _steps_within(segment.start, segment.step, start, stop)
                i, end = max(wanted[0], held[0]), min(wanted[1], held[1])
                if i < end:
                    taken = (segment.start + i * segment.step - start, segment.step, end - i)
                    put = (segment.first + i - low, 1, end - i)
                    moves.append(RowMove(holder, rank, segment.source, taken, segment.result, put))
    return RowPlan(dim, sources, results, tuple(moves))


def _steps_within(first: int, step: int, start: int, stop: int) -> tuple[int, int]:
    """The i with ``start <= first + i * step < stop``, as a half-open interval."""
    if step > 0:
        return -((first - start) // step), -((first - stop) // step)
    return (first - stop) // -step + 1, (first - start) // -step + 1


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: RowPlan, world: World, tag: int, site: Any, *locals_: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.map = (plan, world, tag, site, locals_[0].dtype)
        return tuple(_run(plan, world, tag, locals_))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        plan, world, tag, site, dtype = ctx.map
        back = plan.transposed
        if world.context.tracer is not None:
            world.context.tracer.add(
                site or world.context.tracer.site(), "backward", back.account(dtype.itemsize), dtype
            )
        filled = [
            torch.zeros(side.layout.local_shape(side.shape, world.rank), dtype=dtype, device=world.device)
            if grad is None
            else grad
            for grad, side in zip(grads, back.sources, strict=True)
        ]
        return (None, None, None, None, *_Rows.apply(back, world, tag | 1, site, *filled))


def move_rows(plan: RowPlan, world: World, locals_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The local shards of the results. All ranks of the placement call it; other ranks only draw a tag."""
    if not world.context.implicit_boxing_allowed and any(move.from_rank != move.to_rank for move in plan.moves):
        first, last = plan.sources[0], plan.results[0]
        raise ExplicitBoxingError(
            f"rows of {tuple(first.shape)} in {first.layout} have to move to {tuple(last.shape)} in {last.layout}, a "
            f"boxing that the code does not write. Under wb.debug.explicit_boxing() write "
            f"x.to_global(sbp={last.layout.broadcast().sbp}) first."
        )
    tag = world.context.next_tag()
    site, dtype = None, locals_[0].dtype
    if world.context.tracer is not None:
        site = world.context.tracer.site()
        world.context.tracer.add(site, "forward", plan.account(dtype.itemsize), dtype)
    with local_torch():
        if torch.is_grad_enabled() and any(shard.requires_grad for shard in locals_):
            return list(_Rows.apply(plan, world, tag, site, *locals_))
        return _run(plan, world, tag, locals_)


def _run(plan: RowPlan, world: World, tag: int, locals_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with hidden_from_modes():
        return _exchange(plan, world, tag, locals_)


def _exchange(plan: RowPlan, world: World, tag: int, locals_: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    rank, started = world.rank, world.traffic.now()
    results = [
        torch.zeros(side.layout.local_shape(side.shape, rank), dtype=locals_[0].dtype, device=world.device)
        for side in plan.results
    ]
    outgoing: dict[int, list[torch.Tensor]] = {}
    arriving: dict[int, list[RowMove]] = {}
    for move in plan.moves:
        if move.from_rank == rank != move.to_rank:
            outgoing.setdefault(move.to_rank, []).append(_rows(locals_[move.source], plan.dim, move.taken).reshape(-1))
        elif move.to_rank == rank:
            arriving.setdefault(move.from_rank, []).append(move)
    sends = [(other, torch.cat(pieces)) for other, pieces in outgoing.items()]
    buffers = {
        other: torch.empty(
            sum(_rows(results[move.result], plan.dim, move.put).numel() for move in moves),
            dtype=locals_[0].dtype,
            device=world.device,
        )
        for other, moves in arriving.items()
        if other != rank
    }
    sends = [(other, message) for other, message in sends if message.numel()]
    receives = [(other, buffer) for other, buffer in buffers.items() if buffer.numel()]
    if sends or receives:
        header = f"moving rows of dim {plan.dim} from {plan.sources[0].layout} to {plan.results[0].layout}"
        world.transport.exchange(sends, receives, tag, header + world.context.of_batch)
        sent = sum(message.numel() * message.element_size() for _, message in sends)
        world.traffic.add("rows", sent, started)
    for other, moves in sorted(arriving.items()):
        position = 0
        for move in moves:
            place = _rows(results[move.result], plan.dim, (*move.put[:1], abs(move.put[1]), move.put[2]), move.put[1])
            piece = _piece(move, place, locals_, buffers.get(other), position, plan.dim)
            position += place.numel()
            if move.put[1] < 0:
                piece = piece.flip(plan.dim)
            place.add_(piece) if plan.adds else place.copy_(piece)
    return results


def _piece(
    move: RowMove,
    place: torch.Tensor,
    locals_: Sequence[torch.Tensor],
    buffer: torch.Tensor | None,
    position: int,
    dim: int,
) -> torch.Tensor:
    if buffer is None:
        return _rows(locals_[move.source], dim, move.taken)
    return buffer[position : position + place.numel()].view(place.shape)


def _rows(tensor: torch.Tensor, dim: int, rows: Progression, direction: int = 0) -> torch.Tensor:
    """The rows of an arithmetic progression. For a negative ``direction`` it is a view of them in ascending order."""
    first, step, count = rows
    if direction < 0:
        first -= step * (count - 1)
    if step > 0:
        return tensor[(slice(None),) * dim + (slice(first, first + step * (count - 1) + 1, step),)]
    lowest = first + step * (count - 1)
    return tensor[(slice(None),) * dim + (slice(lowest, first + 1, -step),)].flip(dim)
