"""A transport that moves no data: received tensors have a shape only. It serves dry runs on metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from workbench.core.boxing import LinkCost
from workbench.transport.base import PeerShape, PeerTensor, Release


class FakeTransport:
    """The transport of one rank in a world whose other ranks do not run; it never waits.

    Args:
        num_ranks: number of ranks of the world.
        cost: cost of the links, from which boxing derives its decisions.
    """

    name = "fake"

    def __init__(self, num_ranks: int, cost: LinkCost) -> None:
        self.num_ranks, self.cost = num_ranks, cost

    def exchange(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str) -> None:
        """Do nothing; ``receives`` keep their contents."""

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str
    ) -> Callable[[], None]:
        return _nothing

    def exchange_in_place(
        self, sends: Sequence[PeerTensor], wanted: Sequence[PeerShape], dtype: torch.dtype, tag: int, header: str
    ) -> tuple[list[torch.Tensor], Release]:
        return [torch.empty(tuple(shape), dtype=dtype, device="meta") for _, shape in wanted], _nothing

    def all_reduce(
        self, tensor: torch.Tensor, group: Sequence[int], reduction: str, tag: int, header: str
    ) -> torch.Tensor:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)

    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device="meta")
        return lambda: flat

    def all_gather(self, tensor: torch.Tensor, header: str) -> list[torch.Tensor]:
        """Zeros, with data: ranks compare these small tensors, and here all ranks agree."""
        return [torch.zeros(tensor.shape, dtype=tensor.dtype)] * self.num_ranks

    def flush(self) -> None:
        """Do nothing: no message is in flight."""

    def abort(self, reason: str) -> None:
        """Do nothing: no call waits."""

    def close(self) -> None:
        """Do nothing: no resource is held."""


def _nothing() -> None:
    pass


__all__ = ["FakeTransport"]
