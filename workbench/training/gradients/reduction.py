"""Sums of gradients in flat buckets, shared by all that need them before an optimizer's step.

A parameter's ``.grad`` keeps one term of a sum on each rank. It is never reduced in place, so it can accumulate
further. The reduced gradient (the whole sum, or under ZeRO this rank's shard of it) is kept separately, with the
version of the gradient that went in. Clipping, unscaling and the step use the same sums. A gradient that has changed
since is reduced again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch

from workbench.kernels.blocks import slice_region
from workbench.tensors.global_tensor import GlobalTensor, local_torch, plain
from workbench.tensors.gradient_state import forget_sum, gradient_state
from workbench.tensors.leaf_gradients import read_grad
from workbench.tensors.world import World
from workbench.training.gradients.shard import Shard, shard_of
from workbench.training.gradients.shard_exchange import start_gather, start_scatter

BUCKET_BYTES = 25 * 2**20
"""Bytes of a flat bucket of gradients, approximately."""
_BUCKETS_UNDER_WAY = 2
"""The most buckets in exchange at once. More would only need memory for copies of gradients."""

Sums = dict[GlobalTensor, torch.Tensor]
Finish = Callable[[], Sums]


class Term(NamedTuple):
    """A local tensor that is one term of a sum: the owner of the sum, the ranks with terms, and the wanted shard."""

    owner: GlobalTensor
    local: torch.Tensor
    group: tuple[int, ...]
    shard: Shard | None = None


class _Stamped(NamedTuple):
    """A sum (or how to get it), the gradient that it was made of, and the number of rebuilds of the world before."""

    address: int
    version: int
    num_rebuilds: int
    finish: Finish


def start_reduction(parameters: Iterable[GlobalTensor]) -> Finish:
    """Start to sum the terms of the parameters' gradients over the axes on which a parameter is broadcast.

    All ranks of the parameters' placements call it with the same parameters in the same order. Placeholders and
    parameters without a gradient are left out. Sums that exist already are used.

    Returns:
        A function that waits for the sums and gives each parameter's local gradient in the layout of the optimizer's
        state: the parameter's own, or its shard's.
    """
    known: dict[GlobalTensor, Finish] = {}
    result: Sums = {}
    fresh: list[Term] = []
    with local_torch():
        for parameter in parameters:
            grad = read_grad(parameter)
            if grad is None:
                scattered = parameter._gradient.shard
                if scattered is not None:
                    result[parameter] = plain(scattered)
                continue
            stamped: _Stamped | None = parameter._gradient.sum
            if stamped is not None and _is_current(stamped, parameter, grad):
                known[parameter] = stamped.finish
            elif len(parameter._spec.term_ranks) == 1:
                result[parameter] = plain(grad)
            else:
                fresh.append(Term(parameter, plain(grad), parameter._spec.term_ranks, shard_of(parameter)))
    finish_fresh = start_sums(fresh)

    def finish() -> Sums:
        result.update((parameter, finish_known()[parameter]) for parameter, finish_known in known.items())
        sums = finish_fresh()
        keep(fresh, lambda: sums)
        return {**result, **sums}

    return finish


def _stamp(parameter: GlobalTensor, grad: torch.Tensor, finish: Finish) -> _Stamped:
    """After the world was rebuilt a sum counts no more: other ranks may not have made it."""
    return _Stamped(grad.data_ptr(), grad._version, parameter._spec.world.num_rebuilds, finish)


def _is_current(stamped: _Stamped, parameter: GlobalTensor, grad: torch.Tensor) -> bool:
    return stamped == _stamp(parameter, grad, stamped.finish)


def keep(terms: Iterable[Term], finish: Finish) -> None:
    """Keep the sums of the present gradients until the gradients change or a step uses them."""
    for owner, local, _, _ in terms:
        gradient_state(owner).sum = _stamp(owner, local, finish)


def change_gradients(
    parameters: Iterable[GlobalTensor],
    change: Callable[[list[torch.Tensor]], Any],
    of_sums: Callable[..., Any] | None = None,
) -> None:
    """Change gradients in place by a linear function, and also the sums that were made of them.

    Args:
        change: changes a list of local tensors in place.
        of_sums: the change of sums, if it differs.
    """
    terms: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    stamps: list[tuple[GlobalTensor, torch.Tensor, Finish]] = []
    with torch.no_grad(), local_torch():
        for parameter in parameters:
            grad = read_grad(parameter)
            if grad is None:
                scattered = parameter._gradient.shard
                sums += [] if scattered is None else [plain(scattered)]
                continue
            stamped: _Stamped | None = parameter._gradient.sum
            if stamped is not None and _is_current(stamped, parameter, grad):
                sums.append(stamped.finish()[parameter])
                stamps.append((parameter, grad, stamped.finish))
                terms.append(plain(grad))
            elif len(parameter._spec.term_ranks) == 1:
                sums.append(plain(grad))
            else:
                terms.append(plain(grad))
        change(terms)
        (of_sums or change)(sums)
        for parameter, grad, finish in stamps:
            gradient_state(parameter).sum = _stamp(parameter, grad, finish)


def forget_sums(parameters: Iterable[GlobalTensor]) -> None:
    """Drop the sums after a step."""
    for parameter in parameters:
        forget_sum(parameter)


def start_sums(terms: Iterable[Term]) -> Finish:
    """Start to sum local tensors, each over a group of ranks, in flat buckets.

    Returns:
        A function that waits for the sums and gives each by its owner.
    """
    result: Sums = {}
    waiting: deque[list[Term]] = deque()
    alone, shared = _partition(terms)
    result.update((term.owner, term.local) for term in alone)
    # All ranks follow the order of the parameters. Otherwise two ranks could wait for each other's later buckets.
    waiting.extend(cut_into_buckets(shared, BUCKET_BYTES))
    started = deque(start_bucket(waiting.popleft()) for _ in range(min(_BUCKETS_UNDER_WAY, len(waiting))))

    def finish() -> Sums:
        while started:
            result.update(started.popleft()())
            if waiting:
                started.append(start_bucket(waiting.popleft()))
        return result

    return finish


def _partition(terms: Iterable[Term]) -> tuple[list[Term], list[Term]]:
    listed = list(terms)
    return [term for term in listed if len(term.group) == 1], [term for term in listed if len(term.group) > 1]


def cut_into_buckets(terms: Sequence[Term], bucket_bytes: int) -> Iterator[list[Term]]:
    """Terms of one group and dtype, in their order, in buckets that are full at ``bucket_bytes``."""
    kinds: dict[Any, list[Term]] = {}
    for term in terms:
        kinds.setdefault((term.group, term.local.dtype, term.shard is not None), []).append(term)
    for members in kinds.values():
        bucket: list[Term] = []
        size = 0
        for term in members:
            bucket.append(term)
            size += term.local.numel() * term.local.element_size()
            if size >= bucket_bytes:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def start_bucket(bucket: list[Term]) -> Finish:
    """Start one exchange for all terms of a bucket. The terms may not change until the returned function was called."""
    return _start_all_reduce(bucket) if bucket[0].shard is None else _start_scatter(bucket)


def _start_all_reduce(bucket: list[Term]) -> Finish:
    world, group = bucket[0].owner._spec.world, bucket[0].group
    started = world.traffic.now()
    locals_ = [term.local for term in bucket]
    num_bytes = sum(local.nbytes for local in locals_)
    header = f"reduction of {len(bucket)} gradients, {num_bytes} bytes{_of_batch(world)}"
    wait = world.transport.start_all_reduce(locals_, group, "sum", world.context.next_sum_tag(group), header)
    sent = 2 * (len(group) - 1) * num_bytes // len(group)
    world.traffic.add("gradients", sent, started)
    if world.context.tracer is not None:
        world.context.tracer.add_reduction(group, locals_)

    def finish() -> Sums:
        started = world.traffic.now()
        pieces = wait().split([local.numel() for local in locals_])
        world.traffic.end_exchange(started)
        return {term.owner: piece.view(term.local.shape) for term, piece in zip(bucket, pieces, strict=True)}

    return finish


def _start_scatter(bucket: list[Term]) -> Finish:
    """Every rank gets the sums of its shards."""
    world, group = bucket[0].owner._spec.world, bucket[0].group
    started = world.traffic.now()
    locals_, shards = [term.local for term in bucket], [term.shard for term in bucket if term.shard is not None]
    num_bytes = sum(local.nbytes for local in locals_)
    header = f"reduction of {len(bucket)} gradients to shards, {num_bytes} bytes{_of_batch(world)}"
    sent, wait = start_scatter(world, shards, locals_, _tag(world, group), header)
    world.traffic.add("gradients", sent, started)
    if world.context.tracer is not None:
        world.context.tracer.add_reduction(group, locals_, "P -> S", "reduce-scatter", sent)

    def finish() -> Sums:
        started = world.traffic.now()
        sums = wait()
        world.traffic.end_exchange(started)
        return {term.owner: total for term, total in zip(bucket, sums, strict=True)}

    return finish


def start_write_back(parameters: Iterable[GlobalTensor]) -> Callable[[], None]:
    """Begin to bring every rank's shard of the parameters to the other ranks that hold them; the result ends it.

    The shards must lie in their places in the local parameters.
    """
    terms = []
    for parameter in parameters:
        shard = shard_of(parameter)
        if shard is not None and not parameter._spec.is_placeholder:
            terms.append(Term(parameter, plain(parameter), shard.group, shard))
    started = [_start_gather(bucket) for bucket in cut_into_buckets(terms, BUCKET_BYTES)]

    def finish() -> None:
        for finish_bucket in started:
            finish_bucket()

    return finish


def _start_gather(bucket: list[Term]) -> Callable[[], None]:
    world, group = bucket[0].owner._spec.world, bucket[0].group
    started = world.traffic.now()
    locals_, shards = [term.local for term in bucket], [term.shard for term in bucket if term.shard is not None]
    parts = [
        slice_region(local, shard.regions[world.rank]).contiguous()
        for local, shard in zip(locals_, shards, strict=True)
    ]
    sent, wait = start_gather(world, shards, parts, _tag(world, group))
    world.traffic.add("parameters", sent, started)
    if world.context.tracer is not None:
        world.context.tracer.add_reduction(group, locals_, "S -> B", "all-gather", sent, "parameters")
    return lambda: wait(locals_)


def _of_batch(world: World) -> str:
    """The batch in the header of a sum: ranks with different batches have diverged, and may not add gradients."""
    batch = world.context.batch
    return f", of plain inputs {batch}" if batch else ""


def _tag(world: World, group: tuple[int, ...]) -> int:
    """A tag for the messages of one exchange in ``group``; two groups may exchange at the same time."""
    return world.context.next_sum_tag(group) & 0x20001FFF | (crc32(repr(group).encode()) & 0x7FFF) << 13
