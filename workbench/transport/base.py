"""What every transport can do; boxing is written against this and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from workbench.core.boxing import LinkCost
from workbench.core.layout import Region

Message = tuple[int, torch.Tensor]
"""The other rank, and the tensor to send to it (of any strides) or the contiguous one to fill from it."""
Wanted = tuple[int, Sequence[int]]
"""The other rank, and the shape of what comes from it."""
Release = Callable[[], None]

_GATHER_TAG = -1
"""No exchange of a program has it."""
ACCUMULATED_IN_32_BITS = (torch.bfloat16, torch.float16)
"""Sums of these are made in float32 and rounded once."""


@dataclass
class Traffic:
    """What one rank has sent since the last ``reset``, and how long it waited for others."""

    sent_bytes: int = 0
    num_exchanges: int = 0
    time_s: float = 0.0
    by_kind: dict[str, int] = field(default_factory=dict)

    def reset(self) -> None:
        """Start counting from zero."""
        self.sent_bytes, self.num_exchanges, self.time_s, self.by_kind = 0, 0, 0.0, {}

    def add(self, kind: str, sent_bytes: int, time_s: float) -> None:
        """Count one exchange of this rank."""
        self.sent_bytes += sent_bytes
        self.num_exchanges += 1
        self.time_s += time_s
        self.by_kind[kind] = self.by_kind.get(kind, 0) + sent_bytes


class Transport(Protocol):
    """Moves tensors between the ranks of one world.

    Sends never block; receives do, and every wait can be interrupted: by SIGINT, by ``abort`` from another thread, by
    the death of a peer. Messages between two ranks match by ``tag`` and, within a tag, by order. ``header`` names the
    call in words; a transport that can compares it with the other side's, so that ranks that run different programs
    get an error that names both calls.
    """

    name: str
    cost: LinkCost

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, header: str) -> None:
        """Send all of ``sends`` and return when all of ``receives`` are filled."""

    def borrow(
        self, sends: Sequence[Message], wanted: Sequence[Wanted], dtype: torch.dtype, tag: int, header: str
    ) -> tuple[list[torch.Tensor], Release]:
        """Like ``exchange``, but what arrives may still lie in the sender's memory: read it, then call the release."""

    def all_reduce(
        self, tensor: torch.Tensor, group: Sequence[int], reduction: str, tag: int, header: str
    ) -> torch.Tensor:
        """A new tensor, ``tensor`` reduced over the ranks of ``group``; every one of them gets the same bits."""

    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        """Begin to reduce the elements of ``tensors`` (one dtype), laid one behind the other.

        Nobody may change them until what comes back has been called: it ends the reduction and gives the result, flat.
        """

    def all_gather(self, tensor: torch.Tensor, header: str) -> list[torch.Tensor]:
        """Equally shaped small tensors of all ranks of the world, by rank."""

    def flush(self) -> None:
        """Return when everything that was sent has left its buffer."""

    def abort(self, reason: str) -> None:
        """End every wait of this rank with ``CollectiveAborted(reason)``; may be called from any thread."""

    def close(self) -> None:
        """Give back what the transport holds; safe to call twice."""


class Asynchronous(Transport, Protocol):
    """A transport whose exchanges can be started now and waited for later; the other calls are made of these.

    Attributes:
        device: where what arrives is to lie.
    """

    rank: int
    world_size: int
    device: torch.device = torch.device("cpu")

    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, header: str) -> Callable[[], None]:
        """Send ``sends``, which may be written afterwards; what comes back waits until ``receives`` are filled."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, header: str) -> None:
        self.start(sends, receives, tag, header)()

    def borrow(
        self, sends: Sequence[Message], wanted: Sequence[Wanted], dtype: torch.dtype, tag: int, header: str
    ) -> tuple[list[torch.Tensor], Release]:
        pieces = [torch.empty(tuple(shape), dtype=dtype, device=self.device) for _, shape in wanted]
        receives = [(source, piece) for (source, _), piece in zip(wanted, pieces, strict=True)]
        self.exchange(sends, receives, tag, header)
        return pieces, _nothing

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


class Mapped(Transport, Protocol):
    """A transport whose ranks read one another's memory: slices go straight from shard to shard."""

    def pull(self, program: Any, local: torch.Tensor, tag: int) -> torch.Tensor | None:
        """Run this rank's part of an exchange (a ``Program``): its new shard, or None if it only sends.

        Whoever made ``local`` may write to it as soon as this returns.
        """

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that the peers can read where it lies, if there is room for it; else an ordinary one."""


class Common(Transport, Protocol):
    """A transport whose ranks can have tensors in common: each writes a part of them, and all read them in place."""

    def start_filling(
        self,
        group: tuple[int, ...],
        wholes: Sequence[Sequence[int]],
        regions: Sequence[Region],
        parts: Sequence[torch.Tensor],
        tag: int,
        header: str,
    ) -> tuple[bool, Callable[[], list[torch.Tensor]]]:
        """Begin to put whole tensors together out of the parts of all ranks of ``group``, which all call it alike.

        Args:
            wholes: shapes of the whole tensors.
            regions, parts: where this rank's parts lie in them; parts of one dtype, contiguous.

        Returns:
            whether there is room for them now, on all ranks or on none; and a function that waits for the others'
            parts and gives the tensors, which nobody may write to, or none where there is no room. Call it either way.
        """


def pack(tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """The elements of ``tensors`` one behind the other, in new memory or in ``out``."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    if out is None:
        return torch.cat(flat)
    return out.copy_(flat[0]) if len(flat) == 1 else torch.cat(flat, out=out)


def _nothing() -> None:
    pass
