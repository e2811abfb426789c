"""The protocol of all transports. Boxing depends on nothing else in this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from workbench.core.boxing import LinkCost
from workbench.core.layout import Region

PeerTensor = tuple[int, torch.Tensor]
"""A peer's rank with the tensor to send to it (of any strides), or the contiguous tensor to receive from it."""
PeerShape = tuple[int, Sequence[int]]
"""A peer's rank with the shape of the tensor to receive from it."""
Release = Callable[[], None]

_GATHER_TAG = -1
"""A tag that no exchange of a program uses."""
ACCUMULATED_IN_32_BITS = (torch.bfloat16, torch.float16)
"""Sums of these dtypes are accumulated in float32 and rounded once."""


class Transport(Protocol):
    """Moves tensors between the ranks of one world.

    Sends never block. Receives block, and every wait ends: by SIGINT, by ``abort`` from another thread, or by the death
    of a peer. Messages between two ranks match by ``tag`` and, within a tag, by order. ``header`` describes the call.
    Where possible, a transport compares it with the peer's header, so that ranks that run different programs get an
    error that names both calls.
    """

    name: str
    cost: LinkCost

    def exchange(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str) -> None:
        """Send all of ``sends`` and return when all of ``receives`` are filled."""

    def exchange_in_place(
        self, sends: Sequence[PeerTensor], wanted: Sequence[PeerShape], dtype: torch.dtype, tag: int, header: str
    ) -> tuple[list[torch.Tensor], Release]:
        """Like ``exchange``, but received tensors may lie in the sender's memory: read them, then call ``Release``."""

    def all_reduce(
        self, tensor: torch.Tensor, group: Sequence[int], reduction: str, tag: int, header: str
    ) -> torch.Tensor:
        """A new tensor: ``tensor`` reduced over the ranks of ``group``, with the same bits on all of them."""

    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        """Start to all-reduce the elements of ``tensors`` (of one dtype), flattened and concatenated.

        The returned function waits and returns the flat result. Do not write to ``tensors`` before it has been called.
        """

    def all_gather(self, tensor: torch.Tensor, header: str) -> list[torch.Tensor]:
        """All-gather a small tensor of one shape over all ranks of the world; the result is ordered by rank."""

    def flush(self) -> None:
        """Return when all sent data has left its buffers."""

    def abort(self, reason: str) -> None:
        """End every wait of this rank with ``CollectiveAborted(reason)``; may be called from any thread."""

    def close(self) -> None:
        """Free the resources of the transport; safe to call twice."""


class AsyncTransport(Transport, Protocol):
    """A transport with asynchronous exchanges, from which its other calls are derived.

    Attributes:
        device: the device of received tensors.
    """

    rank: int
    world_size: int
    device: torch.device = torch.device("cpu")

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str
    ) -> Callable[[], None]:
        """Start an exchange; the returned function waits until ``receives`` are filled.

        The caller may write to ``sends`` as soon as this returns.
        """

    def exchange(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str) -> None:
        self.start_exchange(sends, receives, tag, header)()

    def exchange_in_place(
        self, sends: Sequence[PeerTensor], wanted: Sequence[PeerShape], dtype: torch.dtype, tag: int, header: str
    ) -> tuple[list[torch.Tensor], Release]:
        pieces = [torch.empty(tuple(shape), dtype=dtype, device=self.device) for _, shape in wanted]
        receives = [(source, piece) for (source, _), piece in zip(wanted, pieces, strict=True)]
        self.exchange(sends, receives, tag, header)
        return pieces, _no_release

    def all_reduce(
        self, tensor: torch.Tensor, group: Sequence[int], reduction: str, tag: int, header: str
    ) -> torch.Tensor:
        return self.start_all_reduce([tensor], group, reduction, tag, header)().view(tensor.shape)

    def all_gather(self, tensor: torch.Tensor, header: str) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        parts[self.rank].copy_(tensor)
        receives = [(rank, part) for rank, part in enumerate(parts) if rank != self.rank]
        self.exchange([(rank, tensor) for rank, _ in receives], receives, _GATHER_TAG, header)
        return parts


class PeerAccessTransport(Transport, Protocol):
    """A transport whose ranks access one another's memory: slices go straight from shard to shard."""

    def execute(self, plan: Any, local: torch.Tensor, tag: int) -> torch.Tensor | None:
        """Execute this rank's ``TransferPlan``; return its new shard, or None if it only sends.

        The caller may write to ``local`` as soon as this returns.
        """

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that peers can read in place, if there is room for it; else an ordinary tensor."""


class SharedBufferTransport(Transport, Protocol):
    """A transport whose ranks share buffers: each rank writes its part of a tensor, and all read it in place."""

    def start_shared_all_gather(
        self,
        group: tuple[int, ...],
        full_shapes: Sequence[Sequence[int]],
        regions: Sequence[Region],
        parts: Sequence[torch.Tensor],
        tag: int,
        header: str,
    ) -> tuple[bool, Callable[[], list[torch.Tensor]]]:
        """Start to all-gather tensors into a buffer that the ranks of ``group`` share; all of them make the same call.

        Args:
            full_shapes: shapes of the full tensors.
            regions, parts: this rank's parts and their places in the full tensors; contiguous, of one dtype.

        Returns:
            Whether a buffer is free, which is the same on all ranks; and a function that waits for the peers' parts and
            returns the full tensors, which nobody may write to, or an empty list where no buffer is free. Always call
            it.
        """


def pack(tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """The elements of ``tensors``, flattened and concatenated, in new memory or in ``out``."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    if out is None:
        return torch.cat(flat)
    return out.copy_(flat[0]) if len(flat) == 1 else torch.cat(flat, out=out)


def _no_release() -> None:
    pass
