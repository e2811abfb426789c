"""Boxings that share messages, and asynchronous boxings.

A fused boxing sends the slices of several tensors for a rank in one message: sixteen small tensors cost the latency of
one. An asynchronous boxing (``async_op``, as in torch.distributed) sends in the call and receives in the wait. Both are
one differentiable function. Its backward is the fused boxing of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from workbench.core.boxing import BoxingPlan, plan_boxing
from workbench.core.placement import Placement
from workbench.core.sbp import SbpLike
from workbench.errors import LayoutError
from workbench.kernels.blocks import slice_region
from workbench.tensors.boxing.assembly import assemble, region_shape, without_view_relations
from workbench.tensors.boxing.box import box_to, check_differentiable
from workbench.tensors.boxing.handle import Handle
from workbench.tensors.global_tensor import (
    GlobalTensor,
    Spec,
    local_torch,
    new_placeholder,
    spec_of,
    wrap,
)
from workbench.tensors.leaf_gradients import mark_placeholder_leaves
from workbench.tensors.placeholder_storage import spread_zero
from workbench.tensors.world import World
from workbench.transport.base import PeerTensor, pack

BUCKET_BYTES = 25 * 2**20
"""Logical bytes of the tensors that share one exchange, as for gradients."""

Pair = tuple[Spec, Spec]
"""Where a tensor comes from and where it goes."""


def to_global_many(
    tensors: Sequence[GlobalTensor],
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    *,
    async_op: bool = False,
) -> list[GlobalTensor] | Handle[list[GlobalTensor]]:
    """``x.to_global(placement, sbp)`` of several tensors at once: one message per pair of ranks for each dtype.

    Numbers and gradients are those of boxing one by one. It saves time because small tensors share the cost of a
    message. All ranks of the world call it with the same tensors in the same order. If one of the results is used,
    every tensor gets a gradient; it is zero for unused results.

    Args:
        tensors: tensors of any shapes and layouts.
        placement, sbp: as for ``to_global``. Each tensor keeps its own for one that is left out.
        async_op: return a handle whose ``wait()`` returns the results. The tensors may be written before the wait,
            except those that have the layout already: they are results themselves, as in ``to_global``.

    Raises:
        LayoutError: no tensors, or one that is not a global tensor; or a maximum that requires a gradient.

    ``w, b = wb.to_global([layer.weight, layer.bias], sbp="B")`` gathers both in one exchange.
    """
    if not tensors:
        raise LayoutError("to_global: 0 tensors were given, it takes 1 or more. Leave the call out.")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, GlobalTensor):
            raise LayoutError(
                f"to_global: tensor {i} of {len(tensors)} is a {type(tensor).__name__}. All must be global "
                "tensors; make one first: wb.to_global(tensor, placement=..., sbp=...)."
            )
    handle = box_many(tensors, [_target(tensor, placement, sbp) for tensor in tensors], async_op)
    return handle if async_op else handle.wait()


def to_global_async(
    tensor: GlobalTensor, placement: Placement | None = None, sbp: SbpLike | None = None
) -> Handle[GlobalTensor]:
    """``to_global`` that sends now and receives in the handle's ``wait()``. All ranks of the world call both.

    It sends the present values, so the tensor may be written before the wait. The result has a gradient like that of
    any boxing. If the tensor has the layout already, nothing is sent. The result is then the tensor itself, as in
    ``to_global``, and shows later writes.

    ``handle = x.to_global_async(sbp="B"); y = f(z); x = handle.wait()`` computes ``y`` while data is in transit.
    """
    many = box_many([tensor], [_target(tensor, placement, sbp)], True)
    return Handle(lambda: many.wait()[0])


def _target(tensor: GlobalTensor, placement: Placement | None, sbp: SbpLike | None) -> Spec:
    return spec_of(tensor._spec.world, tensor._layout_of(placement, sbp), tensor._spec.shape)


def box_many(tensors: Sequence[GlobalTensor], targets: Sequence[Spec], is_later: bool) -> Handle[list[GlobalTensor]]:
    """Begin to box each tensor to the layout of its spec. All ranks of the world call it with the same layouts.

    ``is_later``: the tensors may be written before the wait.
    """
    world = tensors[0]._spec.world
    # Pipelines and recordings follow single boxings
    if world.context.running is not None or world.context.recorder is not None:
        done = [box_to(tensor, target) for tensor, target in zip(tensors, targets, strict=True)]
        return Handle(lambda: done)
    moving = [i for i, target in enumerate(targets) if target is not tensors[i]._spec]
    finishers = [
        _start_bucket([tensors[i] for i in bucket], [targets[i] for i in bucket], is_later)
        for bucket in _cut(tensors, moving)
    ]

    def finish() -> list[GlobalTensor]:
        boxed = [result for finisher in finishers for result in finisher()]
        order = [i for bucket in _cut(tensors, moving) for i in bucket]
        found = dict(zip(order, boxed, strict=True))
        return [found.get(i, tensor) for i, tensor in enumerate(tensors)]

    return Handle(finish)


def _cut(tensors: Sequence[GlobalTensor], moving: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of the tensors that share an exchange: of one dtype, up to ``BUCKET_BYTES``; the same on all ranks."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i in moving:
        by_dtype.setdefault(tensors[i].dtype, []).append(i)
    for dtype, members in by_dtype.items():
        bucket: list[int] = []
        size = 0
        for i in members:
            bucket.append(i)
            size += math.prod(tensors[i]._spec.shape) * dtype.itemsize
            if size >= BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def _start_bucket(tensors: list[GlobalTensor], targets: list[Spec], is_later: bool) -> Callable[[], list[GlobalTensor]]:
    pairs = [(tensor._spec, target) for tensor, target in zip(tensors, targets, strict=True)]
    world, dtype = pairs[0][0].world, tensors[0].dtype
    work = _BoxingWork(pairs, world, dtype, world.context.next_tag(), is_later)
    if world.context.tracer is not None:
        site = world.context.tracer.site("to_global_many")
        for plan in work.plans:
            world.context.tracer.add(site, "forward", plan, dtype)
    with local_torch():
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            for source, target in pairs:
                check_differentiable(source, target, "to_global_many")
            linked = _BoxMany.apply(work, False, *tensors)

            def fill() -> list[GlobalTensor]:
                with local_torch(), torch.no_grad():
                    for out, result, target in zip(linked, work.finish(), targets, strict=True):
                        if target.is_placeholder:  # a placeholder has no data to fill
                            continue
                        out.detach().copy_(result)
                    return [wrap(out, target) for out, target in zip(linked, targets, strict=True)]

            return fill
        work.start(tensors)

    def finish() -> list[GlobalTensor]:
        with local_torch():
            return [wrap(result, target) for result, target in zip(work.finish(), targets, strict=True)]

    return finish


class _BoxingWork:
    """One exchange of several tensors of one dtype: a message per pair of ranks, and one sum per group of ranks."""

    def __init__(self, pairs: Sequence[Pair], world: World, dtype: torch.dtype, tag: int, is_later: bool) -> None:
        self.pairs, self.world, self.dtype, self.tag = list(pairs), world, dtype, tag
        self.is_later = is_later
        self.plans = [plan_boxing(s.layout, t.layout, s.shape, dtype.itemsize) for s, t in pairs]
        self._locals: list[torch.Tensor] = []
        self._sums: list[tuple[list[int], Callable[[], torch.Tensor]]] = []
        self._wait: Callable[[], None] = lambda: None
        self._arrived: dict[int, torch.Tensor] = {}

    def start(self, locals_: Sequence[torch.Tensor]) -> None:
        """Send this rank's slices for other ranks."""
        started, rank = self.world.traffic.now(), self.world.rank
        self._locals = [local.clone() for local in locals_] if self.is_later else list(locals_)
        header = f"fused boxing of {len(self.plans)} tensors, {self._words()}, {str(self.dtype).removeprefix('torch.')}"
        self._start_sums(header)
        parts: dict[int, list[torch.Tensor]] = {}
        numels: dict[int, int] = {}
        for plan, local in self._exchanged(self._locals):
            for move in plan.moves_from(rank):
                if move.destination != rank and move.num_elements:
                    parts.setdefault(move.destination, []).append(slice_region(local, move.source_region))
            for move in plan.moves_to(rank):
                if move.source != rank:
                    numels[move.source] = numels.get(move.source, 0) + move.num_elements
        sends: list[PeerTensor] = [(destination, pack(slices)) for destination, slices in parts.items()]
        self._arrived = {
            source: torch.empty(numel, dtype=self.dtype, device=self.world.device)
            for source, numel in numels.items()
            if numel
        }
        if sends or self._arrived:
            transport: Any = self.world.transport  # see ``base.AsyncTransport``
            self._wait = transport.start_exchange(sends, list(self._arrived.items()), self.tag, header)
        self.world.traffic.end_exchange(started)

    def finish(self) -> list[torch.Tensor]:
        """The new shards, in new memory."""
        started, rank = self.world.traffic.now(), self.world.rank
        results = self._finish_sums()
        self._wait()
        read = dict.fromkeys(self._arrived, 0)
        for i, (plan, (_, target)) in enumerate(zip(self.plans, self.pairs, strict=True)):
            if i in results:
                continue
            pieces = []
            for move in plan.moves_to(rank):
                if move.source == rank:
                    piece = slice_region(self._locals[i], move.source_region)
                else:
                    flat = self._arrived.get(move.source, self._locals[i].new_empty(0))
                    start = read.get(move.source, 0)
                    piece = flat[start : start + move.num_elements].view(region_shape(move.source_region))
                    read[move.source] = start + move.num_elements
                pieces.append((move, piece))
            if target.is_placeholder:
                results[i] = new_placeholder(target.shape, self.dtype, self.world.device)
            else:
                results[i] = assemble(plan, pieces, target, self.dtype, self.world.device)
        sent = sum(plan.bytes_sent.get(rank, 0) for plan in self.plans)
        self.world.traffic.add("fused", sent, started)
        self._locals, self._arrived = [], {}
        return [results[i] for i in range(len(self.plans))]

    def _words(self) -> str:
        """Short titles of the plans, which distinguish this exchange from others."""
        titles = dict.fromkeys(plan.title for plan in self.plans)
        return "; ".join(titles)

    def _exchanged(self, locals_: Sequence[torch.Tensor]) -> Iterator[tuple[BoxingPlan, torch.Tensor]]:
        return ((p, local) for p, local in zip(self.plans, locals_, strict=True) if p.kind != "all-reduce")

    def _start_sums(self, header: str) -> None:
        members: dict[tuple[tuple[int, ...], str], list[int]] = {}
        for i, plan in enumerate(self.plans):
            group = next((group for group in plan.groups if self.world.rank in group), None)
            if plan.kind == "all-reduce" and group is not None:
                members.setdefault((group, plan.reduction or "sum"), []).append(i)
        for (group, reduction), numbers in members.items():
            terms = [self._locals[i] for i in numbers]
            transport = self.world.transport
            self._sums.append((numbers, transport.start_all_reduce(terms, group, reduction, self.tag, header)))

    def _finish_sums(self) -> dict[int, torch.Tensor]:
        results: dict[int, torch.Tensor] = {}
        for numbers, wait in self._sums:
            shapes = [self.pairs[i][1].local_shape for i in numbers]
            flats = wait().split([self._locals[i].numel() for i in numbers])
            results |= {i: flat.reshape(shape).clone() for i, flat, shape in zip(numbers, flats, shapes, strict=True)}
        self._sums = []
        for i, (plan, (_, target)) in enumerate(zip(self.plans, self.pairs, strict=True)):
            if plan.kind == "all-reduce" and i not in results:  # this rank has no term and needs no sum
                results[i] = new_placeholder(target.shape, self.dtype, self.world.device)
        return results


class _BoxMany(torch.autograd.Function):
    """The boxings of one bucket. Every rank of the world has the node, so backward reaches it on every rank."""

    @staticmethod
    def forward(ctx: Any, work: _BoxingWork, is_now: bool, *locals_: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.work = (work.pairs, work.world, work.dtype, work.tag)
        work.start([local.detach() for local in locals_])
        if is_now:
            with without_view_relations():
                return tuple(work.finish())
        return tuple(_room_for(target, work) for _, target in work.pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pairs, world, dtype, tag = ctx.work
        if any(source.is_placeholder for source, _ in pairs):
            mark_placeholder_leaves(ctx)
        duals = [(target.dual, source.dual) for source, target in pairs]
        whole = [
            spread_zero(incoming.local_shape, dtype, world.device) if grad is None else grad
            for grad, (incoming, _) in zip(grads, duals, strict=True)
        ]
        work = _BoxingWork(duals, world, dtype, tag | 1, False)
        results = _BoxMany.apply(work, True, *whole)
        if world.context.tracer is not None:
            for plan in work.plans:
                world.context.tracer.add(world.context.tracer.site(), "backward", plan, dtype)
        keeps = torch.is_grad_enabled()
        found = [r if keeps or not out.is_placeholder else None for r, (_, out) in zip(results, duals, strict=True)]
        return (None, None, *found)


def _room_for(target: Spec, work: _BoxingWork) -> torch.Tensor:
    if target.is_placeholder:
        return new_placeholder(target.shape, work.dtype, work.world.device)
    return torch.empty(target.local_shape, dtype=work.dtype, device=work.world.device)
