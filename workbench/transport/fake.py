"""A transport that moves no data: received tensors have a shape only. It serves dry runs on metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from workbench.core.boxing import LinkCost
from workbench.transport.base import PeerTensor, Transport, do_nothing


class FakeTransport(Transport):
    """The transport of one rank in a world whose other ranks do not run; it never waits.

    Args:
        num_ranks: number of ranks of the world.
        cost: cost of the links, from which boxing derives its decisions.
    """

    name = "fake"
    device = torch.device("meta")

    def __init__(self, num_ranks: int, cost: LinkCost) -> None:
        self.rank, self.world_size, self.cost = 0, num_ranks, cost

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str
    ) -> Callable[[], None]:
        return do_nothing

    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device="meta")
        return lambda: flat

    def all_gather(self, tensor: torch.Tensor, header: str) -> list[torch.Tensor]:
        """Zeros, with data: ranks compare these small tensors, and here all ranks agree."""
        return [torch.zeros(tensor.shape, dtype=tensor.dtype)] * self.world_size

    def abort(self, reason: str) -> None:
        """Do nothing: no call waits."""

    def close(self) -> None:
        """Do nothing: no resource is held."""
