"""Whole parameters out of shards, and shards of gradients out of whole ones, as one differentiable function.

A gathering sends when it is made and receives in ``finish``. Made early, it has its data by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workbench.tensors.boxing.box import box_placeholder
from workbench.tensors.boxing.bucketed import BoxingWork
from workbench.tensors.boxing.exchange import direct_exchange
from workbench.tensors.global_tensor import GlobalTensor, local_torch, plain, wrap
from workbench.training.gradients.shard import Shard


def start_gather(shards: Sequence[Shard], parts: Sequence[torch.Tensor], tag: int) -> BoxingWork:
    """Start to gather shards. The whole local tensors are read-only, because ranks of one host may share their memory.

    Args:
        shards: what to gather; this rank holds a part of each.
        parts: this rank's parts, plain tensors.
        tag: of the messages; the same on all ranks of the shards' groups.
    """
    exchanges = [
        direct_exchange(shard.spec, shard.whole, part.dtype) for shard, part in zip(shards, parts, strict=True)
    ]
    header = f"gathering of parameters{exchanges[0].world.context.of_batch}"
    work = BoxingWork(exchanges, parts, tag, header, counts_as="parameters", shares_memory=True)
    _trace(shards, work, "S -> B", "all-gather", "parameters")
    return work


def scatter(shards: Sequence[Shard], terms: Sequence[torch.Tensor], tag: int) -> list[torch.Tensor]:
    """This rank's parts of the sums of whole local tensors; with groups of shards, of the sums inside its group."""
    exchanges = [
        direct_exchange(shard.whole.dual, shard.spec.dual, term.dtype)
        for shard, term in zip(shards, terms, strict=True)
    ]
    header = f"scattering of gradients{exchanges[0].world.context.of_batch}"
    work = BoxingWork(exchanges, terms, tag, header, counts_as="gradients")
    _trace(shards, work, "P -> S", "reduce-scatter", "gradients")
    return work.finish()


def _trace(shards: Sequence[Shard], work: BoxingWork, change: str, kind: str, what: str) -> None:
    """Count one exchange for each group of ranks and dtype."""
    tracer, kinds = work.world.context.tracer, dict[Any, list[int]]()
    if tracer is None:
        return
    for i, (shard, exchange) in enumerate(zip(shards, work.exchanges, strict=True)):
        kinds.setdefault((shard.of.term_ranks, exchange.dtype), []).append(i)
    for (group, dtype), numbers in kinds.items():
        shapes = [torch.empty(shards[i].of.local_shape, dtype=dtype, device="meta") for i in numbers]
        tracer.add_reduction(group, shapes, change, kind, sum(work.exchanges[i].bytes_sent for i in numbers), what)


def gather(
    parameters: Sequence[GlobalTensor], shards: Sequence[Shard], work: BoxingWork | None, tag: int, done: Any
) -> list[GlobalTensor]:
    """Whole global tensors, linked to the parameters that take gradients.

    Args:
        parameters: shards, some of them of other stages: these become placeholders of whole ones.
        shards: the ``Shard`` of each parameter.
        work: gathers the parameters that this rank holds, in their order; None if it holds none.
        tag: of the messages that bring gradients back; its lowest bit is clear.
        done: backward calls it once it has the gradients of all whole tensors.
    """
    with local_torch():
        wholes = iter(work.finish() if work is not None else ())
        learns = torch.is_grad_enabled()
        result: list[Any] = []
        linked: list[int] = []
        for number, (parameter, shard) in enumerate(zip(parameters, shards, strict=True)):
            if shard.spec.is_placeholder:
                result.append(box_placeholder(parameter, shard.of, tag))
                continue
            result.append(next(wholes))
            if learns and parameter.requires_grad:
                linked.append(number)
        if linked:
            context = _GatherContext([shards[i] for i in linked], tag | 1, done)
            made = _Gather.apply(context, [result[i] for i in linked], *(parameters[i] for i in linked))
            for i, whole in zip(linked, made, strict=True):
                result[i] = whole
        return [
            whole if shard.spec.is_placeholder else wrap(whole, shard.of)
            for whole, shard in zip(result, shards, strict=True)
        ]


class _GatherContext:
    """What the backward of a gathering needs."""

    def __init__(self, shards: Sequence[Shard], tag: int, done: Any) -> None:
        self.shards, self.tag, self.done = shards, tag, done


class _Gather(torch.autograd.Function):
    """Shards to whole tensors. Backward returns the gradients of the used ones as shards, in one exchange.

    All ranks that hold a parameter use it in the same calls, so they have the same gradients.
    """

    @staticmethod
    def forward(ctx: Any, context: _GatherContext, wholes: Sequence[torch.Tensor], *parts: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.context = context
        return tuple(wholes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        context: _GatherContext = ctx.context
        used = [i for i, grad in enumerate(grads) if grad is not None]
        found: list[Any] = [None] * len(grads)
        if used:
            chosen = _GatherContext([context.shards[i] for i in used], context.tag, None)
            for i, grad in zip(used, _Scatter.apply(chosen, *(grads[i] for i in used)), strict=True):
                found[i] = grad
        if context.done is not None:
            context.done()
        return (None, None, *found)


class _Scatter(torch.autograd.Function):
    """Whole gradients to shards. Its gradient is gathered, for gradients of gradients."""

    @staticmethod
    def forward(ctx: Any, context: _GatherContext, *terms: torch.Tensor) -> Any:
        ctx.context = context
        with local_torch():
            return tuple(scatter(context.shards, [plain(term) for term in terms], context.tag))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        context: _GatherContext = ctx.context
        with local_torch():
            wholes = start_gather(context.shards, [plain(grad) for grad in grads], context.tag).finish()
        if not torch.is_grad_enabled():
            return (None, *wholes)
        return (None, *_Gather.apply(_GatherContext(context.shards, context.tag, None), wholes, *grads))
