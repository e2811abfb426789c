"""Boxings that share messages, and asynchronous boxings.

A fused boxing sends the slices of several tensors for a rank in one message: sixteen small tensors cost the latency of
one. An asynchronous boxing (``async_op``, as in torch.distributed) sends in the call and receives in the wait. Both are
one differentiable function. Its backward is the fused boxing of the gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from workbench.core.placement import Placement
from workbench.core.sbp import SbpLike
from workbench.errors import LayoutError
from workbench.tensors.boxing.box import box_to, check_differentiable
from workbench.tensors.boxing.bucketed import AT_A_TIME, BoxingWork, cut_into_buckets, limit_unfinished
from workbench.tensors.boxing.exchange import direct_exchange, without_view_relations
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
from workbench.tensors.tensor_state import spread_zero
from workbench.tensors.world import current

Pair = tuple[Spec, Spec]
"""Where a tensor comes from and where it goes."""


def to_global_many(
    tensors: Sequence[GlobalTensor],
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    *,
    async_op: bool = False,
) -> list[GlobalTensor] | Handle[list[GlobalTensor]]:
    """``x.to_global(placement, sbp)`` of several tensors at once: one message per pair of ranks for each dtype, and one
    more where some require a gradient and others do not.

    Numbers and gradients are those of boxing one by one. It saves time because small tensors share the cost of a
    message. All ranks of the world call it with the same tensors in the same order. If one of the results is used,
    every tensor that requires a gradient gets one; it is zero for unused results.

    Args:
        tensors: tensors of any shapes and layouts.
        placement, sbp: as for ``to_global``. Each tensor keeps its own for one that is left out.
        async_op: return a handle whose ``wait()`` returns the results. The tensors may be written before the wait,
            except those that have the layout already: they are results themselves, as in ``to_global``.

    Raises:
        LayoutError: no tensors, or one that is not a global tensor; or a maximum that requires a gradient.

    ``w, b = wb.to_global([layer.weight, layer.bias], sbp="B")`` gathers both in one exchange.
    """
    if not hasattr(type(tensors), "__iter__") or hasattr(type(tensors), "__array__"):
        call = 'wb.to_global(torch.as_tensor(x), placement=..., sbp="S(0)")'
        if isinstance(tensors, torch.nn.Module):
            call = 'wb.parallelize(module, "*: data"), or wb.to_global(module.parameters(), sbp="B") after it'
        raise LayoutError(
            f"to_global: a {type(tensors).__name__} is neither a tensor nor a list of global tensors. Write {call}."
        )
    tensors = list(tensors)  # model.parameters() can be read once
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
    """``GlobalTensor.to_global_async``."""
    many = box_many([tensor], [_target(tensor, placement, sbp)], True)
    return Handle(lambda: many.wait()[0])


def _target(tensor: GlobalTensor, placement: Placement | None, sbp: SbpLike | None) -> Spec:
    return spec_of(tensor._spec.world, tensor._layout_of(placement, sbp), tensor._spec.shape)


def box_many(
    tensors: Sequence[GlobalTensor], targets: Sequence[Spec], is_later: bool = False
) -> Handle[list[GlobalTensor]]:
    """Begin to box each tensor to the layout of its spec. All ranks of the world call it with the same layouts.

    ``is_later``: the tensors may be written before the wait.
    """
    context = current().context
    # Pipelines and recordings follow single boxings
    if context.running is not None or context.recorder is not None:
        done = [box_to(tensor, target) for tensor, target in zip(tensors, targets, strict=True)]
        return Handle(lambda: done)
    moving = [i for i, target in enumerate(targets) if target is not tensors[i]._spec]
    with local_torch():
        flags = [torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors]
    kinds = [(tensor.dtype, flag) for tensor, flag in zip(tensors, flags, strict=True)]
    buckets = list(cut_into_buckets(moving, kinds.__getitem__, lambda i: _num_bytes(tensors[i])))
    starts = [partial(_start_bucket, [tensors[i] for i in b], [targets[i] for i in b], is_later) for b in buckets]
    wait = limit_unfinished(starts, len(starts) if is_later else AT_A_TIME)

    def finish() -> list[GlobalTensor]:
        found = dict(zip(itertools.chain(*buckets), itertools.chain(*wait()), strict=True))
        return [found.get(i, tensor) for i, tensor in enumerate(tensors)]

    return Handle(finish)


def _num_bytes(tensor: GlobalTensor) -> int:
    """Bytes of the logical tensor, the same on all ranks."""
    return math.prod(tensor._spec.shape) * tensor.dtype.itemsize


def _start_bucket(tensors: list[GlobalTensor], targets: list[Spec], is_later: bool) -> Callable[[], list[GlobalTensor]]:
    pairs = [(tensor._spec, target) for tensor, target in zip(tensors, targets, strict=True)]
    tag = targets[0].world.context.next_tag()
    _trace(pairs, tensors[0].dtype, "forward", "to_global_many")
    linked: Any = None
    with local_torch():
        is_differentiable = torch.is_grad_enabled() and tensors[0].requires_grad
        if is_differentiable:
            for source, target in pairs:
                check_differentiable(source, target, "to_global_many")
        locals_ = [tensor.detach() for tensor in tensors]
        work = _start(pairs, [local.clone() for local in locals_] if is_later else locals_, tag)
        if is_differentiable:
            linked = _BoxMany.apply(pairs, tag, False, *tensors)

    def finish() -> list[GlobalTensor]:
        with local_torch(), torch.no_grad():
            results = work.finish()
            for out, result, target in zip(linked or (), results, targets, strict=False):
                if not target.is_placeholder:  # which has no data to fill
                    out.detach().copy_(result)
            return [wrap(result, target) for result, target in zip(linked or results, targets, strict=True)]

    return finish


def _start(pairs: Sequence[Pair], locals_: Sequence[torch.Tensor], tag: int) -> BoxingWork:
    """Send this rank's slices of the tensors of one bucket, which are of one dtype."""
    exchanges = [direct_exchange(source, target, locals_[0].dtype) for source, target in pairs]
    titles = "; ".join(dict.fromkeys(exchange.plan.title for exchange in exchanges))
    of_batch = exchanges[0].world.context.of_batch
    return BoxingWork(exchanges, locals_, tag, f"fused boxing of {len(exchanges)} tensors, {titles}{of_batch}")


def _trace(pairs: Sequence[Pair], dtype: torch.dtype, direction: str, function: str = "") -> None:
    tracer = pairs[0][0].world.context.tracer
    if tracer is not None:
        for source, target in pairs:
            plan = direct_exchange(source, target, dtype).plan
            tracer.add(tracer.site(function), direction, plan, dtype)


class _BoxMany(torch.autograd.Function):
    """The boxings of one bucket. Every rank of the world has the node, so backward reaches it on every rank.

    Its results have their values if ``is_now``; else room for them.
    """

    @staticmethod
    def forward(ctx: Any, pairs: Sequence[Pair], tag: int, is_now: bool, *locals_: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.boxing = pairs, tag, locals_[0].dtype
        if is_now:
            with without_view_relations():
                return tuple(_start(pairs, [local.detach() for local in locals_], tag).finish())
        return tuple(_room_for(target, locals_[0].dtype) for _, target in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pairs, tag, dtype = ctx.boxing
        if any(source.is_placeholder for source, _ in pairs):
            mark_placeholder_leaves(ctx)
        duals = [(target.dual, source.dual) for source, target in pairs]
        whole = [
            spread_zero(incoming.local_shape, dtype, incoming.world.device) if grad is None else grad
            for grad, (incoming, _) in zip(grads, duals, strict=True)
        ]
        results = _BoxMany.apply(duals, tag | 1, True, *whole)
        _trace(duals, dtype, "backward")
        keeps = torch.is_grad_enabled()
        found = [r if keeps or not out.is_placeholder else None for r, (_, out) in zip(results, duals, strict=True)]
        return (None, None, None, *found)


def _room_for(target: Spec, dtype: torch.dtype) -> torch.Tensor:
    if target.is_placeholder:
        return new_placeholder(target.shape, dtype, target.world.device)
    return torch.empty(target.local_shape, dtype=dtype, device=target.world.device)
