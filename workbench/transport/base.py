"""The protocol of all transports. Boxing depends on nothing else in this package."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from workbench.core.boxing import LinkCost
from workbench.core.layout import Region

PeerTensor = tuple[int, torch.Tensor]
"""A peer's rank with the tensor to send to it (of any strides), or the contiguous tensor to receive from it."""
PeerShape = tuple[int, Sequence[int]]
"""A peer's rank with the shape of the tensor to receive from it."""
Release = Callable[[], None]
Received = tuple[list[torch.Tensor], Release]

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

    A call ``start_...`` sends, and the function that it returns receives. Between GPUs that function lets the current
    stream wait, not the host.

    Attributes:
        cost: of the links, from which all ranks derive the same decisions.
        device: the device of received tensors.
        groups: the transports between groups of ranks, with reasons.
        scope: what all ranks are in: one ``"process"``, one ``"host"`` (they read one clock), or a ``"network"``.
        accepts_strided: whether slices of any strides are sent as fast as contiguous ones.
        has_collectives: whether ``start_all_gather`` and ``start_reduce_scatter`` exist.
        matches_by_order: whether messages match by order only; exchanges in unlike orders need channels.
    """

    name: str
    cost: LinkCost
    rank: int
    world_size: int
    device: torch.device = torch.device("cpu")
    groups: tuple[Any, ...] = ()
    scope: str = "network"
    accepts_strided: bool = False
    has_collectives: bool = False
    matches_by_order: bool = False

    @property
    def idle_bytes(self) -> int:
        """Bytes of memory that this rank has allocated for exchanges."""
        return 0

    def shares_memory(self, ranks: Collection[int]) -> bool:
        """Whether ``ranks``, this one among them, access one another's memory: they can ``execute`` and
        ``start_shared_all_gather``.
        """
        return False

    def overlaps(self, ranks: Collection[int]) -> bool:
        """Whether an exchange among ``ranks`` goes on while they compute. All ranks of the world answer alike."""
        return True

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str
    ) -> Callable[[], None]:
        """Start an exchange; the returned function waits until ``receives`` are filled.

        The caller may write to ``sends`` as soon as this returns.
        """

    def exchange(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str) -> None:
        """Send all of ``sends`` and return when all of ``receives`` are filled."""
        self.start_exchange(sends, receives, tag, header)()

    def start_exchange_in_place(
        self, sends: Sequence[PeerTensor], wanted: Sequence[PeerShape], dtype: torch.dtype, tag: int, header: str
    ) -> Callable[[], Received]:
        """Like ``start_exchange``, but received tensors may lie in the sender's memory: read them, then call
        ``Release``.
        """
        pieces = [torch.empty(tuple(shape), dtype=dtype, device=self.device) for _, shape in wanted]
        receives = [(source, piece) for (source, _), piece in zip(wanted, pieces, strict=True)]
        wait = self.start_exchange(sends, receives, tag, header)

        def finish() -> Received:
            wait()
            return pieces, do_nothing

        return finish

    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        """Start to all-reduce the elements of ``tensors`` (of one dtype), flattened and concatenated.

        The returned function waits and returns the flat result, in new memory and with the same bits on all ranks of
        ``group``. Do not write to ``tensors`` before it has been called.
        """

    def all_reduce(
        self, tensor: torch.Tensor, group: Sequence[int], reduction: str, tag: int, header: str
    ) -> torch.Tensor:
        """A new tensor: ``tensor`` reduced over the ranks of ``group``, with the same bits on all of them."""
        return self.start_all_reduce([tensor], group, reduction, tag, header)().view(tensor.shape)

    def start_all_gather(
        self, part: torch.Tensor, sizes: Sequence[int], group: Sequence[int], header: str
    ) -> Callable[[], torch.Tensor]:
        """Start to all-gather flat tensors over ``group``, in ascending order; ``sizes`` are their numbers of elements.

        The returned function waits and returns them, concatenated. Do not write to ``part`` before.
        """
        raise TypeError(f"ranks over {self.name} have collectives for sums only")

    def start_reduce_scatter(
        self, terms: Sequence[torch.Tensor], group: Sequence[int], header: str
    ) -> Callable[[], torch.Tensor]:
        """Start to sum flat tensors over ``group``, in ascending order: one term for the sum of each rank.

        The returned function waits and returns this rank's sum.
        """
        raise TypeError(f"ranks over {self.name} have collectives for sums only")

    def all_gather(self, tensor: torch.Tensor, header: str) -> list[torch.Tensor]:
        """All-gather a small tensor of one shape over all ranks of the world; the result is ordered by rank."""
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        parts[self.rank].copy_(tensor)
        receives = [(rank, part) for rank, part in enumerate(parts) if rank != self.rank]
        self.exchange([(rank, tensor) for rank, _ in receives], receives, _GATHER_TAG, header)
        return parts

    def execute(self, plan: Any, local: torch.Tensor, tag: int, header: str) -> torch.Tensor | None:
        """Execute this rank's ``TransferPlan`` between ranks that share memory: slices go straight from shard to shard.

        Returns the new shard, or None if this rank only sends. The caller may write to ``local`` as soon as this
        returns.
        """
        raise TypeError(f"ranks over {self.name} share no memory")

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
        raise TypeError(f"ranks over {self.name} share no memory")

    def open_channel(self, name: str, pairs: Sequence[tuple[int, int]]) -> None:
        """Where messages match by order: let exchanges from a source to a destination keep an order of their own in
        ``in_channel``. All ranks open the same channels in the same order.
        """
        raise TypeError(f"messages over {self.name} match by their tags and need no channels")

    def in_channel(self, name: str) -> AbstractContextManager[None]:
        """Context of exchanges that go one way, through a channel."""
        return nullcontext()

    def flush(self) -> None:
        """Return when all sent data has left its buffers."""
        return

    def awaited_call(self) -> tuple[int, str] | None:
        """The peer for which this rank waits, and the call; None if it does not wait, or if nobody knows. May be asked
        from another thread.
        """
        return None

    def abort(self, reason: str) -> None:
        """End every wait of this rank with ``CollectiveAborted(reason)``; may be called from any thread."""

    def close(self) -> None:
        """Free the resources of the transport; safe to call twice."""


def pack(tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """The elements of ``tensors``, flattened and concatenated, in new memory or in ``out``."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    if out is None:
        return torch.cat(flat)
    return out.copy_(flat[0]) if len(flat) == 1 else torch.cat(flat, out=out)


def memory_key(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that show the same elements of one memory, which are copied once for several peers."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def copied(sends: Sequence[PeerTensor], copy: Callable[[torch.Tensor], torch.Tensor]) -> list[PeerTensor]:
    """What is sent, with a copy in place of each tensor: one for all peers that get the same."""
    keys = [memory_key(tensor) for _, tensor in sends]
    made = {key: copy(tensor) for key, (_, tensor) in dict(zip(keys, sends, strict=True)).items()}
    return [(peer, made[key]) for key, (peer, _) in zip(keys, sends, strict=True)]


def do_nothing() -> None:
    """What releases pieces that lie in this rank's own memory."""


def reason_of(error: BaseException) -> str:
    """Why a world ends in which this error broke off an exchange."""
    if isinstance(error, KeyboardInterrupt):
        return "KeyboardInterrupt, which broke off an exchange. In a notebook the next cell has a new world: save there"
    return str(error) or type(error).__name__
