"""A boxing between two specs, compiled for this rank: everything that does not depend on values is made once.

A training step boxes between the same specs again and again, so the hot path looks up this object and runs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch

from workbench.core.boxing import BoxingPlan, Move, plan_boxing
from workbench.core.boxing_path import find_boxing_path
from workbench.core.layout import Region
from workbench.core.moves import gathered_regions
from workbench.core.placement import Placement
from workbench.core.rank_numbers import bytes_within_rank
from workbench.core.sbp import Partial
from workbench.core.tiling import num_elements
from workbench.errors import LayoutError
from workbench.kernels import blocks, launch
from workbench.kernels.blocks import slice_region
from workbench.tensors.global_tensor import Spec, new_placeholder, spec_of
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.world import World
from workbench.transport.base import Received, do_nothing
from workbench.transport.messaging.transfer_plan import ONE_SHOT_BYTES, TransferPlan, plan_transfer
from workbench.transport.reduction import reduce_into

_VIEW_RELATIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def without_view_relations() -> Any:
    """A context in which a part of a buffer is no view to autograd: results of an ``autograd.Function``, or of
    ``torch.no_grad``, that are made here can be written in place.
    """
    return torch._C._ExcludeDispatchKeyGuard(_VIEW_RELATIONS)


Pieces = list[tuple[Move, torch.Tensor]]


def assemble(plan: BoxingPlan, pieces: Pieces, target: Spec, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The new shard, in new memory; terms of a sum are added in the order of the placement, in at least 32 bits."""
    whole = tuple((0, size) for size in target.local_shape)
    if len(pieces) == 1 and pieces[0][0].destination_region == whole:
        return pieces[0][1].clone(memory_format=torch.contiguous_format)
    out = new_shard(target, dtype, device)
    assemble_many([(out, pieces)], plan.reduction, device)
    return out


def assemble_many(shards: Iterable[tuple[torch.Tensor, Pieces]], reduction: str | None, device: torch.device) -> None:
    """Put slices, or the sums of terms, into their places in new shards of one dtype."""
    places: list[torch.Tensor] = []
    terms: list[list[torch.Tensor]] = []
    for out, pieces in shards:
        of_region: dict[Region, list[torch.Tensor]] = {}
        for move, piece in pieces:
            of_region.setdefault(move.destination_region, []).append(piece)
        places += [slice_region(out, region) for region in of_region]
        terms += of_region.values()
    combine(places, terms, reduction, device)


def combine(
    places: list[torch.Tensor], terms: list[list[torch.Tensor]], reduction: str | None, device: torch.device
) -> None:
    """Fill each place with its one term, or with the reduction of its terms in their order."""
    flat = [term for of_place in terms for term in of_place]
    if launch.runs_on(device):
        blocks.move_blocks(places, flat, list(map(len, terms)), reduction or "none")
    elif reduction is None and places:
        torch._foreach_copy_(places, flat)
    else:
        for place, of_place in zip(places, terms, strict=True):
            reduce_into(of_place, place, reduction)


def packed(sends: list[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
    """The slices to send, packed by one kernel where one runs; else unchanged."""
    slices = [piece for _, piece in sends]
    if not sends or not launch.can_launch(slices[0]) or all(piece.is_contiguous() for piece in slices):
        return sends
    return [(rank, piece) for (rank, _), piece in zip(sends, blocks.pack(slices), strict=True)]


def new_shard(target: Spec, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that the slices fill; where other ranks' terms do, it holds what changes nothing under the reduction."""
    reduction = next((entry.reduction for entry in target.layout.sbp if isinstance(entry, Partial)), None)
    if reduction is None:
        return torch.empty(target.local_shape, dtype=dtype, device=device)
    if reduction == "sum":
        return torch.zeros(target.local_shape, dtype=dtype, device=device)
    return torch.full(target.local_shape, launch.identity_element(dtype, reduction), dtype=dtype, device=device)


def region_shape(region: Region) -> tuple[int, ...]:
    """Sizes of a region."""
    return tuple(stop - start for start, stop in region)


def exchange_between(source: Spec, target: Spec, dtype: torch.dtype) -> Exchange | PathExchange:
    """The exchange from ``source`` to ``target`` for this dtype, or several in a row if they are faster."""
    key = (target, dtype)
    found: Exchange | PathExchange | None = source.exchanges.get(key)
    if found is None:
        cost = source.world.transport.cost
        plan = find_boxing_path(source.layout, target.layout, source.shape, dtype.itemsize, cost)
        if isinstance(plan, BoxingPlan):
            found = Exchange(plan, source, target, dtype)
        else:
            found = PathExchange(plan.steps, source, target, dtype)
        source.exchanges[key] = found
    return found


def direct_exchange(source: Spec, target: Spec, dtype: torch.dtype) -> Exchange:
    """The exchange from ``source`` to ``target`` in one step, for those that share their messages with others."""
    key = (target, dtype, "direct")
    found: Exchange | None = source.exchanges.get(key)
    if found is None:
        plan = plan_boxing(source.layout, target.layout, source.shape, dtype.itemsize)
        found = source.exchanges[key] = Exchange(plan, source, target, dtype)
    return found


class PathExchange:
    """The exchanges of a path, one after the other. Messages of one tag arrive in the order of the steps."""

    def __init__(self, steps: tuple[BoxingPlan, ...], source: Spec, target: Spec, dtype: torch.dtype) -> None:
        between = [spec_of(source.world, step.destination, source.shape) for step in steps[:-1]]
        specs = [source, *between, target]
        self._exchanges = [
            Exchange(step, *pair, dtype) for step, pair in zip(steps, itertools.pairwise(specs), strict=True)
        ]

    def run(self, local: torch.Tensor, tag: int) -> torch.Tensor:
        """This rank's new shard, in memory of its own; a placeholder outside the destination."""
        for exchange in self._exchanges:
            local = exchange.run(local, tag)
        return local


class Exchange:
    """One plan, seen from one rank, for tensors of one dtype.

    Attributes:
        target, dtype: of the new shard.
        moves_to, moves_from: the slices for this rank, and those of its own shard.
        group: the ranks that make an all-reduce with this one; else empty.
        bytes_sent: bytes that this rank sends to others.
        own_slice: the place of the new shard in the old one, if the boxing is a slice.
    """

    def __init__(self, plan: BoxingPlan, source: Spec, target: Spec, dtype: torch.dtype) -> None:
        world = source.world
        check_devices(world, source.layout.placement, target.layout.placement)
        self.plan, self.target, self.dtype, self.world = plan, target, dtype, world
        self._is_placeholder, self._is_local = source.is_placeholder and target.is_placeholder, plan.is_local
        self._title = f"{plan.title}, {str(dtype).removeprefix('torch.')}"
        self.bytes_sent = plan.bytes_sent.get(world.rank, 0) - bytes_within_rank(plan, world.rank, world.rank_of)
        self.moves_to, self.moves_from = plan.moves_to(world.rank), plan.moves_from(world.rank)
        self._wanted = [(m.source, region_shape(m.source_region)) for m in self.moves_to if m.source != world.rank]
        is_slice = plan.kind == "slice" and self.moves_to and not self._is_placeholder
        self.own_slice: Region | None = self.moves_to[0].source_region if is_slice else None
        self.group = next((group for group in plan.groups if world.rank in group), ())

    @property
    def _header(self) -> str:
        return self._title + self.world.context.of_batch

    @cached_property
    def gathered(self) -> dict[int, Region]:
        """See ``gathered_regions``."""
        plan = self.plan
        return gathered_regions(plan.source, plan.destination, plan.shape, self.world.rank)

    @cached_property
    def scattered(self) -> dict[int, Region]:
        """The same for a sum, the reverse of a gathering: by rank, the places of the shards in this rank's term."""
        plan = self.plan
        reductions = {
            entry.reduction for entry in (*plan.source.sbp, *plan.destination.sbp) if isinstance(entry, Partial)
        }
        if reductions != {"sum"} or self.dtype.is_complex:  # which NCCL lacks
            return {}
        return gathered_regions(plan.destination.dual(), plan.source.dual(), plan.shape, self.world.rank)

    def run(self, local: torch.Tensor, tag: int) -> torch.Tensor:
        """This rank's new shard, in memory of its own; a placeholder outside the destination."""
        with hidden_from_modes():
            return self._run(local, tag)

    def start(self, local: torch.Tensor, tag: int) -> Callable[[], torch.Tensor]:
        """Send this rank's slices. The returned function receives the others' and returns the new shard, in memory of
        its own. Do not write to ``local`` before. Of a rank that holds a part before and after.
        """
        world = self.world
        with hidden_from_modes():
            started = world.traffic.now()
            finish = self._start(local, tag)
            world.traffic.add(self.plan.kind, self.bytes_sent, started)

        def end() -> torch.Tensor:
            with hidden_from_modes():
                started = world.traffic.now()
                result = finish()
                world.traffic.end_exchange(started)
                return result

        return end

    def _start(self, local: torch.Tensor, tag: int) -> Callable[[], torch.Tensor]:
        if self._gathering:
            return self._start_gather(local)
        if self.plan.kind != "all-reduce":
            return self._start_pieces(local, tag)
        start = self.world.transport.start_all_reduce
        wait = start([local], self.group, self.plan.reduction or "sum", tag, self._header)
        return lambda: wait().view(self.target.local_shape)

    def _run(self, local: torch.Tensor, tag: int) -> torch.Tensor:
        world = self.world
        if self.own_slice is not None:
            return slice_region(local, self.own_slice).clone(memory_format=torch.contiguous_format)
        if self._is_placeholder:
            return self._placeholder()
        if self._is_local:
            return self._start_pieces(local, tag)()
        if local.device != world.device:  # an optimizer's state in host memory
            local = local.to(world.device)
        started = world.traffic.now()
        result = self._run_on_transport(local, tag)
        world.traffic.add(self.plan.kind, self.bytes_sent, started)
        return result

    @cached_property
    def _transfer_plan(self) -> TransferPlan | None:
        """The plan for ranks that access one another's memory. None if this exchange does not use one."""
        plan, world, target = self.plan, self.world, self.target
        ranks = {*plan.source.placement, *plan.destination.placement}
        if self._is_placeholder or target.layout.has_partial or not world.transport.shares_memory(ranks):
            return None
        transfer_plan = plan_transfer(plan, world.rank, self.dtype)
        return None if plan.kind == "all-reduce" and transfer_plan.shard_bytes > ONE_SHOT_BYTES else transfer_plan

    @cached_property
    def _gathering(self) -> dict[int, Region]:
        """``gathered`` in ascending order, if it is one call of the transport for equal parts; else empty."""
        regions = dict(sorted(self.gathered.items())) if self.world.transport.has_collectives else {}
        return regions if len(set(map(num_elements, regions.values()))) == 1 else {}

    @cached_property
    def _gathers_in_order(self) -> bool:
        """Whether the parts lie in the new shard as they are gathered, one after the other."""
        shape, regions = self.target.local_shape, list(self._gathering.values())
        has_rows = all(region_shape(region)[1:] == shape[1:] for region in regions)
        return has_rows and regions == sorted(regions)

    def _start_gather(self, local: torch.Tensor) -> Callable[[], torch.Tensor]:
        regions = self._gathering
        sizes = [num_elements(region) for region in regions.values()]
        part = local.detach().contiguous().view(-1)
        wait = self.world.transport.start_all_gather(part, sizes, tuple(regions), self._header)

        def finish() -> torch.Tensor:
            flat = wait()
            if self._gathers_in_order:
                return flat.view(self.target.local_shape)
            shard = torch.empty(self.target.local_shape, dtype=self.dtype, device=self.world.device)
            places = [slice_region(shard, region) for region in regions.values()]
            parts = zip(flat.split(sizes), places, strict=True)
            combine(places, [[part.view(place.shape)] for part, place in parts], None, self.world.device)
            return shard

        return finish

    def _run_on_transport(self, local: torch.Tensor, tag: int) -> torch.Tensor:
        if self._gathering:
            return self._start_gather(local)()
        transport, transfer_plan = self.world.transport, self._transfer_plan
        if transfer_plan is not None:
            result = transport.execute(transfer_plan, local, tag, self._header)
            return self._placeholder() if result is None else result
        if self.plan.kind == "all-reduce":
            return transport.all_reduce(local, self.group, self.plan.reduction or "sum", tag, self._header)
        return self._start_pieces(local, tag)()

    def _start_pieces(self, local: torch.Tensor, tag: int) -> Callable[[], torch.Tensor]:
        rank = self.world.rank
        receive: Callable[[], Received] = lambda: ([], do_nothing)  # noqa: E731
        sends = [
            (m.destination, slice_region(local, m.source_region)) for m in self.moves_from if m.destination != rank
        ]
        if sends or self._wanted:
            transport = self.world.transport
            sends = sends if transport.accepts_strided else packed(sends)
            receive = transport.start_exchange_in_place(sends, self._wanted, self.dtype, tag, self._header)

        def finish() -> torch.Tensor:
            received, release = receive()
            if self.target.is_placeholder:
                return self._placeholder()
            others = iter(received)
            pieces = [
                (move, next(others) if move.source != rank else slice_region(local, move.source_region))
                for move in self.moves_to
            ]
            result = assemble(self.plan, pieces, self.target, self.dtype, self.world.device)
            release()
            return result

        return finish

    def _placeholder(self) -> torch.Tensor:
        return new_placeholder(self.target.shape, self.dtype, self.world.device)


def check_devices(world: World, *placements: Placement) -> None:
    """Raise ``LayoutError`` if this rank is in a placement on devices of another type than its own."""
    for placement in placements:
        if placement.device_type != world.device.type and world.rank in placement:
            raise LayoutError(
                f"{placement}: rank {world.rank} works on {world.device}, not on {placement.device_type}. "
                f'Use placement("{world.device.type}", ...).'
            )
