"""Ranks of several hosts: shared memory inside each host, torch.distributed between them, for each message its own way.

Sums go in three steps where a group has several ranks on some host: inside each host, between the hosts' first ranks,
and back inside. Every rank gets the same bits, and one message per pair of hosts goes over the network.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from workbench.core.boxing import LinkCost
from workbench.transport.base import ACCUMULATED_IN_32_BITS, Asynchronous, Message, Transport, pack
from workbench.transport.network.gloo import GlooTransport
from workbench.transport.network.watch import Wait
from workbench.transport.reducing import tag_in_group
from workbench.transport.shared.transport import SharedTransport


class MixedTransport(Asynchronous):
    """One rank's way to every other: ``inside`` for ranks of its host, ``between`` for all others.

    ``cost`` is that between hosts: what is decided by it concerns all ranks.

    Args:
        inside: to the ranks at this rank's place; None where there are none.
        places: by rank, where it is: ranks at one place share memory.
    """

    name = "mixed"
    cost: LinkCost = GlooTransport.cost

    def __init__(self, inside: SharedTransport | None, between: GlooTransport, places: Sequence[str]) -> None:
        self.rank, self.world_size = between.rank, between.world_size
        self._between, self._places = between, tuple(places)
        self._near = frozenset(rank for rank, place in enumerate(places) if place == places[between.rank])
        self._has_inside = inside is not None
        if inside is not None:
            self._inside = inside
            between.other_reason = inside.breakdown
            between.watch.near_counts = inside.sent_counts
            inside.ask_also(self._look_between)
            inside.tell_also = between.give_up

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to other hosts."""
        return self._between.sent_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of other ranks' data that have come to this one, out of their memory or from other hosts."""
        return self._between.read_bytes + (self._inside.read_bytes if self._has_inside else 0)

    def among(self, ranks: Collection[int]) -> Transport:
        """The transport for an exchange between these ranks alone, this one among them; the same on all of them."""
        return self._inside if self._has_inside and self._near.issuperset(ranks) else self

    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, header: str) -> Callable[[], None]:
        near_sends, far_sends = self._parted(sends)
        near_receives, far_receives = self._parted(receives)
        with self._giving_up():
            waits = [self._between.start(far_sends, far_receives, tag, header)]
            if near_sends or near_receives:
                waits.insert(0, self._inside.start(near_sends, near_receives, tag, header))

        def finish() -> None:
            with self._giving_up():
                for wait in waits:
                    wait()

        return finish

    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        near = [rank for rank in group if rank in self._near]
        first_at_place = {self._places[rank]: rank for rank in reversed(group)}
        with self._giving_up():
            if len(near) == len(group):
                return self._guarded(self._inside.start_all_reduce(tensors, group, reduction, tag, header))
            if len(first_at_place) == len(group):
                return self._guarded(self._between.start_all_reduce(tensors, group, reduction, tag, header))
            dtype = tensors[0].dtype
            if reduction == "sum" and dtype in ACCUMULATED_IN_32_BITS:  # rounded once, at the end
                tensors = [tensor.float() for tensor in tensors]
            wait = self._start_inside(tensors, near, reduction, tag, header)

        def finish() -> torch.Tensor:
            part, leaders = wait(), [rank for rank in group if rank in first_at_place.values()]
            back, words = tag_in_group(tag, group), f"{header}, back inside"
            if self.rank not in leaders:
                self._inside.exchange([], [(near[0], part)], back, words)
                return part.to(dtype)
            total = self._between.all_reduce(part, leaders, reduction, tag_in_group(tag, group), header)
            if len(near) > 1:
                self._inside.exchange([(rank, total) for rank in near[1:]], [], back, words)
            return total.to(dtype)

        return self._guarded(finish)

    def flush(self) -> None:
        if self._has_inside:
            with self._giving_up():
                self._inside.flush()

    def abort(self, reason: str) -> None:
        self._between.abort(reason)
        if self._has_inside:
            self._inside.abort(reason)

    def close(self) -> None:
        if self._has_inside:
            self._inside.close()
        self._between.close()

    def _parted(self, messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
        """Those with ranks of this host, and the others."""
        near = [message for message in messages if message[0] in self._near]
        return near, [message for message in messages if message[0] not in self._near]

    def _start_inside(
        self, tensors: Sequence[torch.Tensor], near: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        if len(near) > 1:
            return self._inside.start_all_reduce(tensors, near, reduction, tag, header)
        own = pack(tensors)
        return lambda: own

    def _guarded(self, finish: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with self._giving_up():
                return finish()

        return run

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Whatever breaks off an exchange ends both transports, so that peers here and elsewhere learn of it."""
        try:
            yield
        except BaseException as error:
            reason = str(error) or type(error).__name__
            if self._has_inside:
                self._inside.abort(reason)
                self._inside.give_up()
            self._between.give_up(reason)
            raise

    def _look_between(self) -> str | None:
        """Why this rank's wait inside the host is in vain, as the notes of ranks on other hosts show."""
        if self._between.abort_reason is not None:
            return self._between.abort_reason
        waiting = self._inside.starving()
        if waiting is None:
            self._between.watch.forget_wait()
            return None
        return self._between.watch.reason_against(Wait(*waiting))
