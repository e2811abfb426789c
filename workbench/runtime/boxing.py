"""Executes a boxing plan on this rank, as one differentiable function.

The backward of ``a -> b`` is the boxing ``dual(b) -> dual(a)``: all-gather <-> reduce-scatter, slice <-> zero-fill,
all-reduce <-> all-reduce, all-to-all <-> all-to-all; double backward follows because it is a boxing again.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from workbench.core.boxing import BoxingPlan, describe_sbp_change, plan_boxing
from workbench.core.layout import Layout, Region
from workbench.core.placement import Placement
from workbench.core.sbp import Partial
from workbench.errors import LayoutError
from workbench.runtime.assembling import assemble, region_shape, slice_region
from workbench.runtime.explicit import Need, check_explicit
from workbench.runtime.tensor import (
    GlobalTensor,
    Spec,
    ghost_storage,
    label,
    local_torch,
    mark_ghost_leaves,
    spec_of,
)
from workbench.runtime.world import World


def box(tensor: GlobalTensor, layout: Layout, function: str = "") -> GlobalTensor:
    """``tensor`` in another layout; on ranks outside the new placement, a ghost. All ranks of the world call it.

    The result owns its storage, unless the layout is the one the tensor has: then it is the tensor itself.
    ``function`` is named by traces as what needed the boxing.
    """
    source = tensor._spec
    target = spec_of(source.world, layout, source.shape)
    if target is source:
        return tensor
    tag = source.world.next_tag()
    if source.world.running is not None:
        source.world.running.add_edge(source, target, function)
    site = _trace_forward(tensor, source, target, function) if source.world.tracer is not None else None
    with local_torch():
        if torch.is_grad_enabled() and tensor.requires_grad:
            _check_differentiable(source, target, function)
            return label(_Box.apply(tensor, source, target, tag, site), target)
        place = _place_in_own_shard(source, target)
        if place is not None:
            return label(slice_region(tensor, place).clone(memory_format=torch.contiguous_format), target)
        return label(_run(tensor, source, target, tag), target)


def _trace_forward(tensor: GlobalTensor, source: Spec, target: Spec, function: str) -> Any:
    tracer = source.world.tracer
    site = tracer.site(function)
    in_backward = torch._C._current_graph_task_id() >= 0  # the gradient of a plain tensor that had entered
    tracer.add(site, "backward" if in_backward else "forward", _plan(source, target.layout, tensor), tensor.dtype)
    return site


def _check_differentiable(source: Spec, target: Spec, function: str) -> None:
    """A maximum of terms has no gradient that is linear; say so where the layout is made, not deep in backward."""
    for entry in (*source.layout.sbp, *target.layout.sbp):
        if isinstance(entry, Partial) and entry.reduction != "sum":
            raise LayoutError(
                f"{function or 'to_global'}: boxing {describe_sbp_change(source.layout, target.layout)} of "
                f"{tuple(source.shape)}, a tensor that requires a gradient. {entry} is not differentiable: only sums "
                f"are linear. Write x.detach().to_global(...), or take x.to_global(sbp=wb.sbp.broadcast) and "
                f"torch.a{entry.reduction}, which has a gradient."
            )


def _place_in_own_shard(source: Spec, target: Spec) -> Region | None:
    """Where this rank's new shard lies in the one it has, if the boxing is a slice; looked up once per pair of specs.

    A batch that enters a step takes this way at every step, so it must not cost a plan.
    """
    try:
        return source.slices[target]
    except KeyError:
        pass
    _check_devices(source.world, source.layout.placement, target.layout.placement)
    plan = plan_boxing(source.layout, target.layout, source.shape, 1)
    moves = plan.moves_to(source.world.rank) if plan.kind == "slice" and not source.is_ghost else ()
    place = source.slices[target] = moves[0].source_region if moves and not target.is_ghost else None
    return place


def box_implicitly(tensor: GlobalTensor, layout: Layout, function: str) -> GlobalTensor:
    """The boxing that an operation needs and nobody wrote; remembered by its source, so that q, k and v pay once.

    The form is held strongly by the source: a weak memo would make communication depend on one rank's garbage
    collector.
    """
    source = tensor._spec
    if source.layout == layout:
        return tensor
    if not source.world.implicit_boxing_allowed:
        check_explicit(function, [Need("an operand", tensor, layout)])
    with local_torch():
        # A leaf's form would keep the leaf alive through autograd, and the leaf its form.
        # A tensor of inference mode has no version that tells whether it was written since.
        remembers = not (tensor._is_param or (tensor.is_leaf and tensor.requires_grad) or tensor.is_inference())
        version = tensor._version if remembers else 0
        key = (layout, version, torch.is_grad_enabled(), tensor.requires_grad, tensor.dtype)
    if not remembers:
        return box(tensor, layout, function)
    forms: dict[Any, GlobalTensor] = tensor.__dict__.setdefault("_forms", {})
    form = forms.get(key)
    if form is None:
        forms.clear()
        form = forms[key] = box(tensor, layout, function)
    return form


def _plan(source: Spec, layout: Layout, local: torch.Tensor) -> BoxingPlan:
    with local_torch():
        return plan_boxing(source.layout, layout, source.shape, local.element_size())


class _Box(torch.autograd.Function):
    """Boxing between two specs; every rank of the world has the node, so backward reaches it on every rank."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, source: Spec, target: Spec, tag: int, site: Any = None) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.boxing = (source, target, tag, local.dtype, local.device, site)
        return _run(local, source, target, tag)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        source, target, tag, dtype, device, site = ctx.boxing
        if source.is_ghost:
            mark_ghost_leaves(ctx)
        incoming, outgoing = target.dual, source.dual
        grad = grads[0]
        if grad is None:  # a ghost's gradient, or none at all: either way this rank contributes nothing
            grad = ghost_storage(incoming.local_shape, dtype, device)
        tracer = source.world.tracer
        if tracer is not None:
            plan = plan_boxing(incoming.layout, outgoing.layout, incoming.shape, grad.element_size())
            tracer.add(site or tracer.site(), "backward", plan, dtype)
        result = _Box.apply(grad, incoming, outgoing, tag | 1, site)
        # A ghost has no gradient to keep, and autograd would clone one for a leaf into full storage; only a gradient
        # that is differentiated again must be linked to this boxing.
        is_lost = outgoing.is_ghost and not torch.is_grad_enabled()
        return (None if is_lost else result), None, None, None, None


def _run(local: torch.Tensor, source: Spec, target: Spec, tag: int) -> torch.Tensor:
    _check_devices(source.world, source.layout.placement, target.layout.placement)
    plan = plan_boxing(source.layout, target.layout, source.shape, local.element_size())
    return run_plan(plan, local, source.world, target, tag)


def run_plan(plan: BoxingPlan, local: torch.Tensor, world: World, target: Spec, tag: int) -> torch.Tensor:
    """This rank's part of ``plan``: its new shard, or a ghost outside the destination."""
    rank = world.rank
    involved = rank in plan.source.placement or rank in plan.destination.placement
    if not involved:
        return ghost_storage(target.shape, local.dtype, world.device)
    if plan.is_local:
        moves = plan.moves_to(rank)
        if plan.kind == "slice" and moves:
            return slice_region(local, moves[0].source_region).clone(memory_format=torch.contiguous_format)
        return _exchange(plan, local, world, target, tag, "")
    started = time.perf_counter()
    header = f"{plan.title}, {str(local.dtype).removeprefix('torch.')}"
    if plan.kind == "all-reduce":
        result = _all_reduce(plan, local, world, tag, header)
    else:
        result = _exchange(plan, local, world, target, tag, header)
    world.traffic.add(plan.kind, plan.bytes_sent.get(rank, 0), time.perf_counter() - started)
    return result


def _all_reduce(plan: BoxingPlan, local: torch.Tensor, world: World, tag: int, header: str) -> torch.Tensor:
    group = next(group for group in plan.groups if world.rank in group)
    return world.transport.all_reduce(local, group, plan.reduction or "sum", tag, header)


def _exchange(plan: BoxingPlan, local: torch.Tensor, world: World, target: Spec, tag: int, header: str) -> torch.Tensor:
    rank = world.rank
    arriving = plan.moves_to(rank)
    wanted = [(move.source, region_shape(move.source_region)) for move in arriving if move.source != rank]
    sends = [
        (m.destination, slice_region(local, m.source_region)) for m in plan.moves_from(rank) if m.destination != rank
    ]
    borrowed: list[torch.Tensor] = []
    release = None
    if sends or wanted:
        borrowed, release = world.transport.borrow(sends, wanted, local.dtype, tag, header)
    if target.is_ghost:
        return ghost_storage(target.shape, local.dtype, world.device)
    others = iter(borrowed)
    pieces = [
        (move, next(others) if move.source != rank else slice_region(local, move.source_region)) for move in arriving
    ]
    result = assemble(plan, pieces, target, local.dtype, world.device)
    if release is not None:
        release()
    return result


def _check_devices(world: World, *placements: Placement) -> None:
    for placement in placements:
        if placement.device_type != world.device.type and world.rank in placement:
            raise LayoutError(
                f"{placement}: rank {world.rank} works on {world.device}, not on {placement.device_type}. "
                f'Use placement("{world.device.type}", ...).'
            )
