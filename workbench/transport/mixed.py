"""Ranks of several hosts: shared memory inside each host, torch.distributed between hosts.

Where a group has several ranks on one host, an all-reduce takes three steps: a reduction inside each host, an
all-reduce between the hosts' first ranks, and a broadcast inside each host. All ranks get the same bits, and one
message per pair of hosts crosses the network.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from workbench.core.boxing import LinkCost
from workbench.transport.base import (
    ACCUMULATED_IN_32_BITS,
    PeerShape,
    PeerTensor,
    Received,
    Transport,
    pack,
    reason_of,
)
from workbench.transport.network.gloo import GlooTransport
from workbench.transport.network.hang_detector import Wait
from workbench.transport.reduction import group_tag
from workbench.transport.shared.transport import SharedTransport


class MixedTransport(Transport):
    """One rank's transport: ``intra_host`` to ranks of its host, ``inter_host`` to all others.

    ``cost`` is that of the links between hosts, because all ranks must derive the same decisions from it.

    Args:
        intra_host: the transport to ranks in the same place; None where there are none.
        inter_host: the transport to all other ranks.
        places: the place of each rank; ranks in one place share memory.
    """

    name = "mixed"
    cost: LinkCost = GlooTransport.cost

    def __init__(self, intra_host: SharedTransport | None, inter_host: GlooTransport, places: Sequence[str]) -> None:
        self.rank, self.world_size = inter_host.rank, inter_host.world_size
        self._inter_host, self._places = inter_host, tuple(places)
        self._near = frozenset(rank for rank, place in enumerate(places) if place == places[inter_host.rank])
        self._has_intra_host = intra_host is not None
        if intra_host is not None:
            self._intra_host = intra_host
            inter_host.external_failure = intra_host.waiter.peer_failure
            inter_host.hang_detector.local_counts = intra_host.sent_counts
            intra_host.waiter.external_failure = self._check_inter_host  # the ranks of a host may depend on others
            intra_host.on_failure = inter_host.fail

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to other hosts."""
        return self._inter_host.sent_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of other ranks' data that this rank has read from their memory or received from other hosts."""
        return self._inter_host.read_bytes + (self._intra_host.read_bytes if self._has_intra_host else 0)

    @property
    def idle_bytes(self) -> int:
        """Bytes of shared memory that this rank has allocated for its host, without those that tensors own."""
        return self._intra_host.idle_bytes if self._has_intra_host else 0

    def shares_memory(self, ranks: Collection[int]) -> bool:
        return self._has_intra_host and self._near.issuperset(ranks)

    def overlaps(self, ranks: Collection[int]) -> bool:
        """Whether some are in different places: inside a place, ranks copy by themselves."""
        return len({self._places[rank] for rank in ranks}) > 1

    def execute(self, plan: Any, local: torch.Tensor, tag: int, header: str) -> torch.Tensor | None:
        return self._intra_host.execute(plan, local, tag, header)

    def start_shared_all_gather(self, *args: Any) -> tuple[bool, Callable[[], list[torch.Tensor]]]:
        return self._intra_host.start_shared_all_gather(*args)

    def start_exchange_in_place(
        self, sends: Sequence[PeerTensor], wanted: Sequence[PeerShape], dtype: torch.dtype, tag: int, header: str
    ) -> Callable[[], Received]:
        if self.shares_memory([peer for peer, _ in (*sends, *wanted)]):
            return self._intra_host.start_exchange_in_place(sends, wanted, dtype, tag, header)
        return super().start_exchange_in_place(sends, wanted, dtype, tag, header)

    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str
    ) -> Callable[[], None]:
        near_sends, far_sends = self._split_by_host(sends)
        near_receives, far_receives = self._split_by_host(receives)
        with self._abort_on_error():
            waits = [self._inter_host.start_exchange(far_sends, far_receives, tag, header)]
            if near_sends or near_receives:
                waits.insert(0, self._intra_host.start_exchange(near_sends, near_receives, tag, header))

        def finish() -> None:
            with self._abort_on_error():
                for wait in waits:
                    wait()

        return finish

    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        near = [rank for rank in group if rank in self._near]
        first_at_place = {self._places[rank]: rank for rank in reversed(group)}
        with self._abort_on_error():
            if len(near) == len(group):
                return self._guarded(self._intra_host.start_all_reduce(tensors, group, reduction, tag, header))
            if len(first_at_place) == len(group):
                return self._guarded(self._inter_host.start_all_reduce(tensors, group, reduction, tag, header))
            dtype = tensors[0].dtype
            if reduction == "sum" and dtype in ACCUMULATED_IN_32_BITS:  # so that only the final sum is rounded
                tensors = [tensor.float() for tensor in tensors]
            wait = self._start_intra_host(tensors, near, reduction, tag, header)

        def finish() -> torch.Tensor:
            part, leaders = wait(), [rank for rank in group if rank in first_at_place.values()]
            back, text = group_tag(tag, group), f"{header}, back inside"
            if self.rank not in leaders:
                self._intra_host.exchange([], [(near[0], part)], back, text)
                return part.to(dtype)
            total = self._inter_host.all_reduce(part, leaders, reduction, group_tag(tag, group), header)
            if len(near) > 1:
                self._intra_host.exchange([(rank, total) for rank in near[1:]], [], back, text)
            return total.to(dtype)

        return self._guarded(finish)

    def flush(self) -> None:
        if self._has_intra_host:
            with self._abort_on_error():
                self._intra_host.flush()

    def awaited_call(self) -> tuple[int, str] | None:
        near = self._intra_host.awaited_call() if self._has_intra_host else None
        return near or self._inter_host.awaited_call()

    def abort(self, reason: str) -> None:
        self._inter_host.abort(reason)
        if self._has_intra_host:
            self._intra_host.abort(reason)

    def close(self) -> None:
        if self._has_intra_host:
            self._intra_host.close()
        self._inter_host.close()

    def _split_by_host(self, tensors: Sequence[PeerTensor]) -> tuple[list[PeerTensor], list[PeerTensor]]:
        """The tensors for ranks of this host, and the others."""
        near = [tensor for tensor in tensors if tensor[0] in self._near]
        return near, [tensor for tensor in tensors if tensor[0] not in self._near]

    def _start_intra_host(
        self, tensors: Sequence[torch.Tensor], near: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        if len(near) > 1:
            return self._intra_host.start_all_reduce(tensors, near, reduction, tag, header)
        own = pack(tensors)
        return lambda: own

    def _guarded(self, finish: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with self._abort_on_error():
                return finish()

        return run

    @contextmanager
    def _abort_on_error(self) -> Iterator[None]:
        """End both transports on any error, so that the waits of peers on all hosts end."""
        try:
            yield
        except BaseException as error:
            reason = reason_of(error)
            if self._has_intra_host:
                self._intra_host.abort(reason)
                self._intra_host.fail()
            self._inter_host.fail(reason)
            raise

    def _check_inter_host(self) -> str | None:
        """The reason why this rank's wait inside the host cannot end, found in the statuses of other hosts' ranks."""
        if self._inter_host.abort_reason is not None:
            return self._inter_host.abort_reason
        waiting = self._intra_host.waiter.unsatisfied_wait()
        if waiting is None:
            self._inter_host.hang_detector.forget_wait()
            return None
        return self._inter_host.hang_detector.hang_reason(Wait(*waiting))
