"""Sums of gradients in flat buckets, shared by all that need them before an optimizer's step.

A parameter's ``.grad`` keeps one term of a sum on each rank. It is never reduced in place, so it can accumulate
further. The reduced gradient (the whole sum, or under ZeRO this rank's shard of it) is kept separately, with the
version of the gradient that went in. Clipping, unscaling and the step use the same sums. A gradient that has changed
since is reduced again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import torch

from workbench.kernels.blocks import slice_region
from workbench.tensors.boxing.bucketed import AT_A_TIME, BUCKET_BYTES, BoxingWork, cut_into_buckets, limit_unfinished
from workbench.tensors.boxing.exchange import Exchange, direct_exchange
from workbench.tensors.execution_context import batch_in_header
from workbench.tensors.global_tensor import GlobalTensor, local_torch, plain
from workbench.tensors.leaf_gradients import read_grad
from workbench.tensors.tensor_state import forget_sum, gradient_state, version_of
from workbench.tensors.world import World
from workbench.training.gradients.shard import Shard, shard_of

Sums = dict[GlobalTensor, torch.Tensor]
Finish = Callable[[], Sums]


class Term(NamedTuple):
    """A local tensor that is one term of a sum: the owner of the sum, the ranks with terms, and the boxing to the sum,
    or to this rank's shard of it. With groups of shards it is the sum inside a group, and ``between`` adds the groups'.
    """

    owner: GlobalTensor
    local: torch.Tensor
    group: tuple[int, ...]
    exchange: Exchange
    between: Exchange | None = None

    @property
    def kind(self) -> Hashable:
        """Terms of one kind may share a bucket."""
        return self.group, self.local.dtype, not self.exchange.group, self.between is None


def term_of(parameter: GlobalTensor, local: torch.Tensor) -> Term:
    """The term of a parameter's gradient. Under ``local_torch``."""
    spec, shard = parameter._spec, shard_of(parameter)
    if shard is None:
        return Term(parameter, local, spec.term_ranks, direct_exchange(spec.dual, spec, local.dtype))
    terms = shard.spec.dual
    exchange = direct_exchange(shard.whole.dual, terms, local.dtype)
    between = None if terms is shard.spec else direct_exchange(terms, shard.spec, local.dtype)
    return Term(parameter, local, spec.term_ranks, exchange, between)


class _Stamped(NamedTuple):
    """A sum (or how to get it), the gradient that it was made of, and the number of rebuilds of the world before.

    The gradient is held: a later one could have its address, on some ranks only.
    """

    grad: torch.Tensor
    address: int
    version: int
    num_rebuilds: int
    finish: Finish


def start_reduction(parameters: Iterable[GlobalTensor]) -> Finish:
    """Start to sum the terms of the parameters' gradients over the axes on which a parameter is broadcast.

    All ranks of the parameters' placements call it with the same parameters. A list that was a set has another order on
    each rank, and those of ``wb.parallelize`` have numbers. Placeholders and parameters without a gradient are left
    out. Sums that exist already are used.

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
                fresh.append(term_of(parameter, plain(grad)))
    fresh.sort(key=lambda term: term.owner._number)
    finish_fresh = start_sums(fresh)

    def finish() -> Sums:
        result.update((parameter, finish_known()[parameter]) for parameter, finish_known in known.items())
        sums = finish_fresh()
        keep(fresh, lambda: sums)
        return {**result, **sums}

    return finish


def _stamp(parameter: GlobalTensor, grad: torch.Tensor, finish: Finish) -> _Stamped:
    """After the world was rebuilt a sum counts no more: other ranks may not have made it. Under ``local_torch``."""
    return _Stamped(grad, grad.data_ptr(), version_of(grad), parameter._spec.world.num_rebuilds, finish)


def _is_current(stamped: _Stamped, parameter: GlobalTensor, grad: torch.Tensor) -> bool:
    return stamped[1:] == _stamp(parameter, grad, stamped.finish)[1:]


def keep(terms: Iterable[Term], finish: Finish) -> None:
    """Keep the sums of the present gradients until the gradients change or a step uses them."""
    with local_torch():
        for owner, local, *_ in terms:
            held = read_grad(owner)  # which knows of writes through its ``.data``
            if held is None or held.data_ptr() != local.data_ptr():
                held = local
            gradient_state(owner).sum = _stamp(owner, held, finish)


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


def start_sums(terms: Sequence[Term]) -> Finish:
    """Start to sum local tensors, each over a group of ranks, in flat buckets.

    Returns:
        A function that waits for the sums and gives each by its owner.
    """
    result: Sums = {term.owner: term.local for term in terms if len(term.group) == 1}
    # All ranks follow the order of the parameters. Otherwise two ranks could wait for each other's later buckets.
    buckets = cut_terms([term for term in terms if len(term.group) > 1])
    wait = limit_unfinished((partial(start_bucket, bucket) for bucket in buckets), AT_A_TIME)

    def finish() -> Sums:
        for sums in wait():
            result.update(sums)
        return result

    return finish


def cut_terms(terms: Sequence[Term], bucket_bytes: float = math.inf) -> Iterator[list[Term]]:
    """Terms in buckets, each of which takes one exchange."""
    limit = min(bucket_bytes, BUCKET_BYTES)
    return cut_into_buckets(terms, lambda term: term.kind, lambda term: term.local.nbytes, limit)


def start_bucket(bucket: list[Term]) -> Finish:
    """Start one exchange for all terms of a bucket. The terms may not change until the returned function was called."""
    world, group = bucket[0].exchange.world, bucket[0].group
    locals_, exchanges = [term.local for term in bucket], [term.exchange for term in bucket]
    num_bytes = sum(local.nbytes for local in locals_)
    is_whole, of_batch = bool(exchanges[0].group), batch_in_header(world.context.batch)
    header = f"reduction of {len(bucket)} gradients{'' if is_whole else ' to shards'}, {num_bytes} bytes{of_batch}"
    tag = _tag(world, group)
    work = BoxingWork(exchanges, locals_, tag, header, counts_as="gradients", shares_memory=True)
    if world.context.tracer is not None:
        what = ("P -> B", "all-reduce") if is_whole else ("P -> S", "reduce-scatter")
        world.context.tracer.add_reduction(group, locals_, *what, work.sent_bytes)

    def finish() -> Sums:
        sums = work.finish()
        between = [term.between for term in bucket if term.between is not None]
        if between:
            sums = _start_between(between, sums, tag, of_batch).finish()
        return dict(zip([term.owner for term in bucket], sums, strict=True))

    return finish


def _start_between(exchanges: list[Exchange], sums: list[torch.Tensor], tag: int, of_batch: str) -> BoxingWork:
    """Start to add the sums of all groups of shards."""
    world, group = exchanges[0].world, exchanges[0].group
    header = f"sum of {len(sums)} shards of gradients between groups{of_batch}"
    work = BoxingWork(exchanges, sums, tag, header, counts_as="gradients", shares_memory=True)
    if world.context.tracer is not None:
        world.context.tracer.add_reduction(group, sums, "P -> B", "all-reduce", work.sent_bytes)
    return work


def write_back(parameters: Iterable[GlobalTensor]) -> None:
    """Bring every rank's shard of the parameters to the other ranks that hold them.

    The shards must lie in their places in the local parameters.
    """
    sharded = [(p, shard) for p in parameters if not p._spec.is_placeholder and (shard := shard_of(p)) is not None]
    sharded.sort(key=lambda found: found[0]._number)
    buckets = cut_into_buckets(
        sharded, lambda found: (found[0]._spec.term_ranks, found[0].dtype), lambda found: num_bytes(found[0])
    )
    limit_unfinished((partial(_start_gather, bucket) for bucket in buckets), AT_A_TIME)()


def num_bytes(parameter: GlobalTensor) -> int:
    """Bytes of this rank's part of a parameter."""
    return math.prod(parameter._spec.local_shape) * parameter.dtype.itemsize


def _start_gather(bucket: list[tuple[GlobalTensor, Shard]]) -> Callable[[], Any]:
    spec = bucket[0][0]._spec
    world, group, wholes = spec.world, spec.term_ranks, [plain(parameter) for parameter, _ in bucket]
    parts = [slice_region(whole, shard.region) for whole, (_, shard) in zip(wholes, bucket, strict=True)]
    exchanges = [
        direct_exchange(shard.spec, shard.whole, part.dtype) for part, (_, shard) in zip(parts, bucket, strict=True)
    ]
    header = f"gathering of {len(bucket)} parameters"
    work = BoxingWork(exchanges, parts, _tag(world, group), header, counts_as="parameters", into=wholes)
    if world.context.tracer is not None:
        world.context.tracer.add_reduction(group, wholes, "S -> B", "all-gather", work.sent_bytes, "parameters")
    return work.finish


def _tag(world: World, group: tuple[int, ...]) -> int:
    """A tag for the messages of one exchange in ``group``; two groups may exchange at the same time."""
    return world.context.next_sum_tag(group) & 0x20001FFF | (crc32(repr(group).encode()) & 0x7FFF) << 13
