"""Exchanges between the ranks' parts of parameters and the whole parameters: gathers and scatters.

Both take many tensors at once. The data from one rank to another goes in bundles: small tensors share a message, and
each large tensor is a message of its own, because joining large tensors would copy them once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from workbench.kernels.blocks import slice_region
from workbench.tensors.world import World
from workbench.training.gradients.shard import Shard
from workbench.transport.base import PeerShape, PeerTensor, Release, pack
from workbench.transport.reduction import reduce_into

_ALONE_FROM_BYTES = 2**17
"""A tensor of this many bytes is a message of its own."""


def start_exchange(
    world: World, sends: Sequence[PeerTensor], wanted: Sequence[PeerShape], dtype: torch.dtype, tag: int, header: str
) -> Callable[[], tuple[list[torch.Tensor], Release]]:
    """Send now; the returned function receives. NCCL starts both now, and the returned function waits on the stream."""
    transport: Any = world.transport
    if transport.name == "nccl":
        pieces = [torch.empty(tuple(shape), dtype=dtype, device=world.device) for _, shape in wanted]
        receives = [(source, piece) for (source, _), piece in zip(wanted, pieces, strict=True)]
        wait = transport.start_exchange(sends, receives, tag, header)

        def receive() -> tuple[list[torch.Tensor], Release]:
            wait()
            return pieces, lambda: None

        return receive
    if sends:
        transport.exchange_in_place(sends, [], dtype, tag, header)
    return lambda: transport.exchange_in_place([], wanted, dtype, tag, header) if wanted else ([], lambda: None)


def start_gather(
    world: World, shards: Sequence[Shard], parts: Sequence[torch.Tensor], tag: int
) -> tuple[int, Callable[[Sequence[torch.Tensor]], None]]:
    """Send this rank's parts to the other ranks of their group.

    Args:
        shards: of one group.
        parts: this rank's parts, of one dtype, contiguous.
        tag: of the messages; the same on all ranks of the group.

    Returns:
        The bytes sent, and a function that waits for the others' parts and writes them into whole tensors.
    """
    group, rank = shards[0].group, world.rank
    header = f"gathering of {len(shards)} parameters, {parts[0].dtype}"
    bundles = list(_bundles(shards, parts[0].element_size()))
    own = [_packed([parts[i] for i in bundle]) for bundle in bundles]
    others = [other for other in group if other != rank]
    sends = [(other, part) for other in others for part in own if part.numel()]
    expected = [
        (other, bundle, shape)
        for other in others
        for bundle in bundles
        if math.prod(shape := _packed_shape([shards[i] for i in bundle], other))
    ]
    wanted = [(other, shape) for other, _, shape in expected]
    receive = start_exchange(world, sends, wanted, parts[0].dtype, tag, header)

    def finish(wholes: Sequence[torch.Tensor]) -> None:
        received, release = receive()
        places: list[torch.Tensor] = []
        pieces: list[torch.Tensor] = []
        for (other, bundle, _), arrived in zip(expected, received, strict=True):
            places += [slice_region(wholes[i], shards[i].regions[other]) for i in bundle]
            pieces += _unpacked(arrived, [shards[i].shapes[other] for i in bundle])
        if places:
            torch._foreach_copy_(places, pieces)
        release()

    return sum(part.nbytes for _, part in sends), finish


def start_scatter(
    world: World, shards: Sequence[Shard], terms: Sequence[torch.Tensor], tag: int, header: str
) -> tuple[int, Callable[[], list[torch.Tensor]]]:
    """Send the other ranks of a group their parts of this rank's terms. The returned function sums the parts for this
    rank.

    Args:
        shards: of one group.
        terms: whole local tensors, of one dtype; they may not change until the returned function was called.
        tag, header: of the messages; the same on all ranks of the group.

    Returns:
        The bytes sent, and a function that waits for this rank's parts of the sums.
    """
    group, rank, dtype = shards[0].group, world.rank, terms[0].dtype
    bundles = list(_bundles(shards, terms[0].element_size()))

    def cut_for(other: int) -> Iterator[torch.Tensor]:
        for bundle in bundles:
            yield _packed([slice_region(terms[i], shards[i].regions[other]) for i in bundle])

    others = [other for other in group if other != rank]
    sends = [(other, piece) for other in others for piece in cut_for(other) if piece.numel()]
    own = list(cut_for(rank))
    wanted = [(other, piece.shape) for other in others for piece in own if piece.numel()]
    receive = start_exchange(world, sends, wanted, dtype, tag, header)

    def finish() -> list[torch.Tensor]:
        received, release = receive()
        arrived = iter(received)
        theirs = {other: [next(arrived) if piece.numel() else piece for piece in own] for other in others}
        theirs[rank] = own
        totals = [_sum([theirs[member][k] for member in group]) for k in range(len(own))]
        release()
        found: dict[int, torch.Tensor] = {}
        for bundle, total in zip(bundles, totals, strict=True):
            found |= zip(bundle, _unpacked(total, [shards[i].spec.local_shape for i in bundle]), strict=True)
        return [found[i] for i in range(len(shards))]

    return sum(piece.nbytes for _, piece in sends), finish


def _bundles(shards: Sequence[Shard], itemsize: int) -> Iterator[list[int]]:
    """Numbers of the tensors that share a message. They depend on the largest part of each tensor, so they are the same
    on all ranks.
    """
    small: list[int] = []
    for i, shard in enumerate(shards):
        if max(shard.sizes.values()) * itemsize >= _ALONE_FROM_BYTES:
            yield [i]
        else:
            small.append(i)
    if small:
        yield small


def _packed(parts: list[torch.Tensor]) -> torch.Tensor:
    """The content of one message: a single tensor unchanged, several tensors joined."""
    return pack(parts) if len(parts) > 1 else parts[0]


def _packed_shape(shards: list[Shard], rank: int) -> tuple[int, ...]:
    if len(shards) == 1:
        return shards[0].shapes[rank]
    return (sum(shard.sizes[rank] for shard in shards),)


def _unpacked(message: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    if len(shapes) == 1:
        return [message]
    cuts = message.split([math.prod(shape) for shape in shapes])
    return [cut.view(tuple(shape)) for cut, shape in zip(cuts, shapes, strict=True)]


def _sum(terms: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of the group, in at least 32 bits: the bits of an all-reduce."""
    out = torch.empty(terms[0].shape, dtype=terms[0].dtype, device=terms[0].device)
    reduce_into(terms, out, "sum")
    return out
