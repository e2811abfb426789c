"""A transport that moves nothing: what arrives has a shape and no data. For programs that run on metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from workbench.core.boxing import LinkCost
from workbench.transport.base import Message, Release, Wanted


class PaperTransport:
    """One rank's end of a world in which nobody else is running; it never waits.

    Args:
        num_ranks: of the world.
        cost: of the link that boxing is to decide by.
    """

    name = "paper"

    def __init__(self, num_ranks: int, cost: LinkCost) -> None:
        self.num_ranks, self.cost = num_ranks, cost

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, header: str) -> None:
        """What is to be filled stays as it is."""

    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, header: str) -> Callable[[], None]:
        return _nothing

    def borrow(
        self, sends: Sequence[Message], wanted: Sequence[Wanted], dtype: torch.dtype, tag: int, header: str
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
        """Small tensors by which ranks agree on something: zeros, that can be read. All ranks agree."""
        return [torch.zeros(tensor.shape, dtype=tensor.dtype)] * self.num_ranks

    def flush(self) -> None:
        """Nothing is on its way."""

    def abort(self, reason: str) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""


def _nothing() -> None:
    pass


__all__ = ["PaperTransport"]
