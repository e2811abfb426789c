"""Whole parameters out of shards, and shards of gradients out of whole ones, as one differentiable function.

A ``GatherWork`` gathers the shards of many parameters. It sends when it is made and receives in ``finish``. Made early,
it has its data by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from workbench.kernels.blocks import slice_region
from workbench.tensors.boxing.box import box_placeholder
from workbench.tensors.global_tensor import GlobalTensor, local_torch, plain, wrap
from workbench.tensors.world import World
from workbench.training.gradients.shard import Shard
from workbench.training.gradients.shard_exchange import start_gather, start_scatter

Finish = Callable[[], list[torch.Tensor]]


class GatherWork:
    """An exchange in progress that gathers shards; ``finish`` returns the whole tensors.

    Args:
        shards: what to gather; this rank holds a part of each.
        parts: this rank's parts, plain tensors.
        tag: of the messages; the same on all ranks of the shards' groups.
    """

    def __init__(self, world: World, shards: Sequence[Shard], parts: Sequence[torch.Tensor], tag: int) -> None:
        started = world.traffic.now()
        self.world, self._shards = world, shards
        self._parts = [part.contiguous() for part in parts]
        self._starts: list[tuple[list[int], Finish]] = []
        for numbers in _same_group_and_dtype(shards, parts):
            chosen = [shards[i] for i in numbers]
            sent, finish = _start(world, chosen, [self._parts[i] for i in numbers], tag)
            self._starts.append((numbers, finish))
            _trace(world, chosen, parts[numbers[0]].dtype, "S -> B", "all-gather", sent, "parameters")
            world.traffic.add("parameters", sent)
        world.traffic.end_exchange(started)

    def finish(self) -> list[torch.Tensor]:
        """Wait for the whole local tensors. They are read-only, because ranks of one host may share their memory."""
        started = self.world.traffic.now()
        wholes: dict[int, torch.Tensor] = {}
        for numbers, finish in self._starts:
            wholes |= zip(numbers, finish(), strict=True)
        self._parts, self._starts = [], []
        self.world.traffic.end_exchange(started)
        return [wholes[i] for i in range(len(wholes))]


def _start(world: World, shards: Sequence[Shard], parts: Sequence[torch.Tensor], tag: int) -> tuple[int, Finish]:
    """Send the parts that travel in one exchange. Returns the bytes sent to other ranks, and a function that waits for
    the whole tensors."""
    group = shards[0].group
    finish_shared: Finish = list
    start_shared = _shared_all_gather_of(world, group)
    if start_shared is not None:
        wholes, regions = [shard.of.local_shape for shard in shards], [shard.regions[world.rank] for shard in shards]
        header = f"gathering of {len(shards)} parameters, {parts[0].dtype}, in place"
        is_filled, finish_shared = start_shared(group, wholes, regions, parts, tag, header)
        if is_filled:
            return (len(group) - 1) * sum(part.nbytes for part in parts), finish_shared
    sent, finish_gather = start_gather(world, shards, parts, tag)

    def finish() -> list[torch.Tensor]:
        finish_shared()
        wholes = [allocate_whole(shard, part.dtype, world.device) for shard, part in zip(shards, parts, strict=True)]
        places = [slice_region(whole, shard.regions[world.rank]) for whole, shard in zip(wholes, shards, strict=True)]
        torch._foreach_copy_(places, list(parts))
        finish_gather(wholes)
        return wholes

    return sent, finish


def _shared_all_gather_of(world: World, group: tuple[int, ...]) -> Any:
    """See ``base.SharedBufferTransport``; None for ranks that have no memory in common.

    None also while a step is recorded: each gathering looks for free memory, and a replay cannot.
    """
    if len(group) == 1 or world.context.recorder is not None:
        return None
    transport: Any = world.transport
    for_ranks = getattr(transport, "for_ranks", None)
    return getattr(transport if for_ranks is None else for_ranks(group), "start_shared_all_gather", None)


def allocate_whole(shard: Shard, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a whole local tensor."""
    return torch.empty(shard.of.local_shape, dtype=dtype, device=device)


def _same_group_and_dtype(shards: Sequence[Shard], tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Positions of the shards that travel in one exchange: of one group and dtype, in the same order on all ranks."""
    kinds: dict[Any, list[int]] = {}
    for i, (shard, tensor) in enumerate(zip(shards, tensors, strict=True)):
        kinds.setdefault((shard.group, tensor.dtype), []).append(i)
    return list(kinds.values())


def scatter(world: World, shards: Sequence[Shard], terms: Sequence[torch.Tensor], tag: int) -> list[torch.Tensor]:
    """This rank's parts of the sums of whole local tensors."""
    started = world.traffic.now()
    under_way = []
    for numbers in _same_group_and_dtype(shards, terms):
        chosen = [shards[i] for i in numbers]
        header = f"scattering of {len(numbers)} gradients, {terms[numbers[0]].dtype}"
        sent, finish = start_scatter(world, chosen, [terms[i] for i in numbers], tag, header)
        under_way.append((numbers, finish))
        _trace(world, chosen, terms[numbers[0]].dtype, "P -> S", "reduce-scatter", sent, "gradients")
        world.traffic.add("gradients", sent)
    found: dict[int, torch.Tensor] = {}
    for numbers, finish in under_way:
        found |= dict(zip(numbers, finish(), strict=True))
    world.traffic.end_exchange(started)
    return [found[i] for i in range(len(shards))]


def _trace(world: World, shards: list[Shard], dtype: torch.dtype, change: str, kind: str, sent: int, what: str) -> None:
    if world.context.tracer is not None:
        shapes = [torch.empty(shard.of.local_shape, dtype=dtype, device="meta") for shard in shards]
        world.context.tracer.add_reduction(shards[0].group, shapes, change, kind, sent, what)


def gather(
    parameters: Sequence[GlobalTensor], shards: Sequence[Shard], work: GatherWork | None, tag: int, done: Any
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
            context = _GatherContext(shards[linked[0]].of.world, [shards[i] for i in linked], tag | 1, done)
            made = _Gather.apply(context, [result[i] for i in linked], *(parameters[i] for i in linked))
            for i, whole in zip(linked, made, strict=True):
                result[i] = whole
        return [
            whole if shard.spec.is_placeholder else wrap(whole, shard.of)
            for whole, shard in zip(result, shards, strict=True)
        ]


class _GatherContext:
    """What the backward of a gathering needs."""

    def __init__(self, world: World, shards: Sequence[Shard], tag: int, done: Any) -> None:
        self.world, self.shards, self.tag, self.done = world, shards, tag, done


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
            chosen = _GatherContext(context.world, [context.shards[i] for i in used], context.tag, None)
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
            return tuple(scatter(context.world, context.shards, [plain(term) for term in terms], context.tag))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        context: _GatherContext = ctx.context
        with local_torch():
            work = GatherWork(context.world, context.shards, [plain(grad) for grad in grads], context.tag)
            wholes = work.finish()
        if not torch.is_grad_enabled():
            return (None, *wholes)
        return (None, *_Gather.apply(_GatherContext(context.world, context.shards, context.tag, None), wholes, *grads))
