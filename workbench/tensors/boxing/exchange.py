"""A boxing between two specs, compiled for this rank: everything that does not depend on values is made once.

A training step boxes between the same specs again and again, so the hot path looks up this object and runs it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from workbench.core.boxing import BoxingPlan
from workbench.core.boxing_path import find_boxing_path
from workbench.core.layout import Region
from workbench.core.placement import Placement
from workbench.errors import LayoutError
from workbench.kernels.blocks import slice_region
from workbench.tensors.boxing.assembly import assemble, packed, region_shape
from workbench.tensors.global_tensor import Spec, new_placeholder, spec_of
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.world import World
from workbench.transport.messaging.transfer_plan import ONE_SHOT_BYTES, TransferPlan, plan_transfer

_MAX_CACHED = 256
"""The number of exchanges that a spec remembers. Shapes that differ at every step must not fill the memory."""


def exchange_between(source: Spec, target: Spec, dtype: torch.dtype) -> Exchange | PathExchange:
    """The exchange from ``source`` to ``target`` for this dtype, or several in a row if they are faster."""
    key = (target, dtype)
    found: Exchange | PathExchange | None = source.exchanges.get(key)
    if found is None:
        cost = source.world.transport.cost
        plan = find_boxing_path(source.layout, target.layout, source.shape, dtype.itemsize, cost)
        if len(source.exchanges) >= _MAX_CACHED:
            source.exchanges.clear()
        if isinstance(plan, BoxingPlan):
            found = Exchange(plan, source, target, dtype)
        else:
            found = PathExchange(plan.steps, source, target, dtype)
        source.exchanges[key] = found
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
        own_slice: the place of the new shard in the old one, if the boxing is a slice.
    """

    def __init__(self, plan: BoxingPlan, source: Spec, target: Spec, dtype: torch.dtype) -> None:
        world = source.world
        _check_devices(world, source.layout.placement, target.layout.placement)
        self.plan, self._target, self._dtype, self._world = plan, target, dtype, world
        self._is_placeholder, self._is_local = source.is_placeholder and target.is_placeholder, plan.is_local
        self._header = f"{plan.title}, {str(dtype).removeprefix('torch.')}"
        self._bytes_sent = plan.bytes_sent.get(world.rank, 0)
        self._to, self._from = plan.moves_to(world.rank), plan.moves_from(world.rank)
        self._wanted = [(m.source, region_shape(m.source_region)) for m in self._to if m.source != world.rank]
        is_slice = plan.kind == "slice" and self._to and not self._is_placeholder
        self.own_slice: Region | None = self._to[0].source_region if is_slice else None
        self._ranks = frozenset((*plan.source.placement, *plan.destination.placement))
        self._group = next((group for group in plan.groups if world.rank in group), ())
        self._transfer_plan = self._make_transfer_plan()

    def run(self, local: torch.Tensor, tag: int) -> torch.Tensor:
        """This rank's new shard, in memory of its own; a placeholder outside the destination."""
        with hidden_from_modes():
            return self._run(local, tag)

    def _run(self, local: torch.Tensor, tag: int) -> torch.Tensor:
        world = self._world
        if self.own_slice is not None:
            return slice_region(local, self.own_slice).clone(memory_format=torch.contiguous_format)
        if self._is_placeholder:
            return new_placeholder(self._target.shape, self._dtype, world.device)
        if self._is_local:
            return self._exchange_pieces(local, tag)
        started = world.traffic.now()
        result = self._run_on_transport(local, tag)
        world.traffic.add(self.plan.kind, self._bytes_sent, started)
        return result

    def _make_transfer_plan(self) -> TransferPlan | None:
        """The plan for transports whose ranks read one another's memory. None if this exchange does not use one."""
        plan, world = self.plan, self._world
        if self._is_placeholder or self._is_local or self._target.layout.has_partial or world.device.type != "cpu":
            return None
        transfer_plan = plan_transfer(plan, world.rank, self._dtype, self._header)
        return None if plan.kind == "all-reduce" and transfer_plan.shard_bytes > ONE_SHOT_BYTES else transfer_plan

    def _run_on_transport(self, local: torch.Tensor, tag: int) -> torch.Tensor:
        transport = self._transport()
        # See ``base.PeerAccessTransport``.
        execute = getattr(transport, "execute", None) if self._transfer_plan is not None else None
        if execute is not None:
            result = execute(self._transfer_plan, local, tag)
            return self._placeholder() if result is None else result
        if self.plan.kind == "all-reduce":
            return transport.all_reduce(local, self._group, self.plan.reduction or "sum", tag, self._header)
        return self._exchange_pieces(local, tag)

    def _transport(self) -> Any:
        """The world's transport. In a world of several hosts, ranks of one host use their own (``mixed``)."""
        transport: Any = self._world.transport
        for_ranks = getattr(transport, "for_ranks", None)
        return transport if for_ranks is None else for_ranks(self._ranks)

    def _exchange_pieces(self, local: torch.Tensor, tag: int) -> torch.Tensor:
        rank, release = self._world.rank, None
        received: list[torch.Tensor] = []
        sends = [(m.destination, slice_region(local, m.source_region)) for m in self._from if m.destination != rank]
        if sends or self._wanted:
            transport = self._transport()
            sends = sends if getattr(transport, "accepts_strided", False) else packed(sends)
            received, release = transport.exchange_in_place(sends, self._wanted, self._dtype, tag, self._header)
        if self._target.is_placeholder:
            return self._placeholder()
        others = iter(received)
        pieces = [
            (move, next(others) if move.source != rank else slice_region(local, move.source_region))
            for move in self._to
        ]
        result = assemble(self.plan, pieces, self._target, self._dtype, self._world.device)
        if release is not None:
            release()
        return result

    def _placeholder(self) -> torch.Tensor:
        return new_placeholder(self._target.shape, self._dtype, self._world.device)


def _check_devices(world: World, *placements: Placement) -> None:
    for placement in placements:
        if placement.device_type != world.device.type and world.rank in placement:
            raise LayoutError(
                f"{placement}: rank {world.rank} works on {world.device}, not on {placement.device_type}. "
                f'Use placement("{world.device.type}", ...).'
            )
