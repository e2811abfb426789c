"""CUDA IPC between GPU ranks of one host, also several ranks on one GPU: readers copy out of the sender's memory.

A sender copies its slices into its pool (see ``pool``), records an event, and sends a message over host memory with the
place of the slices and the number of the event. The reader waits for the event, copies all its slices into place with
one kernel, which also reduces them, and sends an ack when its own device has finished the copy.

The reader waits for the event on the host, not on its stream: a stream that waits for a killed process would never
continue, and nothing could free it. So every wait ends like those of ``shared``, which uses the same messages: by an
abort, a dead or stopped peer, ranks that diverged, or a timeout. This costs the launch of one kernel per exchange.

Ranks that share one GPU have run it; ranks with GPUs of their own have not. The tests run it with real processes on a
fake device whose work runs late, and ranks read known bytes from one another before they use it. A rank without peer
access to a device gets the data through pinned memory of the host; where events cannot be shared, the sender waits for
its own device instead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import torch

from workbench.core.boxing import LinkCost
from workbench.transport.base import PeerShape, PeerTensor, Received, Transport
from workbench.transport.ipc.events import EventWaiter
from workbench.transport.ipc.handles import ON_DEVICE, HandleTable
from workbench.transport.ipc.transfers import Transfers, resolve_flags
from workbench.transport.messaging.control_page import ControlPage, encode_header
from workbench.transport.messaging.link import Block, Message
from workbench.transport.messaging.message_transport import MessageTransport, closes_on_error
from workbench.transport.reduction import group_tag, slices_of

ONE_SHOT_BYTES = 256 * 2**10
"""Up to this size each rank reduces all terms itself, which saves one round of messages."""
_LAST_MESSAGES_S = 10.0
"""Limit of the time for which a rank that closes waits until its peers have read its last messages."""
_NAP_S = 1e-3


class IpcTransport(MessageTransport, Transport):
    """One rank's end; ``ipc.connect`` makes it.

    ``cost`` is a constant, like every transport's: all ranks must derive the same decisions from it.
    """

    name, scope = "ipc", "host"
    accepts_strided = True
    """One kernel copies slices of any strides into the pool, so callers need not pack them."""
    cost = LinkCost(latency_s=40e-6, bandwidth_bytes_per_s=200e9, one_shot_bytes=ONE_SHOT_BYTES)

    def __init__(
        self, rank: int, page: ControlPage, handle_table: HandleTable, transfers: Transfers, waiter: EventWaiter
    ) -> None:
        super().__init__(rank, page, transfers.links, waiter)
        self._device, self.device = transfers.pool.device, transfers.pool.device.torch_device
        self._handle_table, self._transfers, self._event_waiter = handle_table, transfers, waiter

    def overlaps(self, ranks: Collection[int]) -> bool:
        """Ranks copy and add by themselves, on the stream on which they compute."""
        return False

    @property
    def sent_bytes(self) -> int:
        """Bytes of this rank's data that were published to peers."""
        return self._transfers.sent_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of device and host memory that this rank has allocated for exchanges."""
        return self._transfers.pool.num_bytes

    @closes_on_error
    def start_exchange(
        self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], tag: int, header: str
    ) -> Callable[[], None]:
        text = encode_header(header)
        self._transfers.send(sends, tag << 1, text)
        return lambda: self._receive(receives, tag << 1, text)

    @closes_on_error
    def start_exchange_in_place(
        self, sends: Sequence[PeerTensor], wanted: Sequence[PeerShape], dtype: torch.dtype, tag: int, header: str
    ) -> Callable[[], Received]:
        text = encode_header(header)
        self._transfers.send(sends, tag << 1, text)
        return lambda: self._receive_in_place(wanted, dtype, tag << 1, text)

    @closes_on_error
    def _receive_in_place(self, wanted: Sequence[PeerShape], dtype: torch.dtype, tag: int, text: bytes) -> Received:
        sizes = [(source, math.prod(shape) * dtype.itemsize) for source, shape in wanted]
        messages = self._transfers.receive(sizes, tag, text)
        pieces = [  # data in memory of the host is copied to the device
            self._transfers.view(source, message, shape, dtype).to(self.device, non_blocking=True)
            for (source, message), (_, shape) in zip(messages, wanted, strict=True)
        ]
        return pieces, lambda: self._release(messages)

    @closes_on_error
    def _release(self, messages: list[tuple[int, Message]]) -> None:
        self._transfers.release_later(messages)

    @closes_on_error
    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        """Publish this rank's term. Where more than two ranks reduce a large one, each reduces a slice for all."""
        number, text = group_tag(tag, group) << 1, encode_header(header)
        tensors = [resolve_flags(tensor) for tensor in tensors]
        dtype, numel = tensors[0].dtype, sum(tensor.numel() for tensor in tensors)
        is_one_shot = len(group) == 2 or numel * dtype.itemsize <= ONE_SHOT_BYTES
        slices = slices_of(group, numel, is_one_shot)
        others = {rank: part for rank, part in slices.items() if rank != self.rank}
        own, blocks, event_number = self._offer(tensors, dtype, numel, others, number, text)

        def reduce() -> torch.Tensor:
            # The current stream may differ from the one on which the term was copied.
            self._event_waiter.wait_for_event(self._transfers.events, event_number, text)
            mine = own[slices[self.rank]]
            messages = self._transfers.receive([(rank, mine.nbytes) for rank in others], number, text)
            terms = {rank: self._transfers.view(rank, message, mine.shape, dtype) for rank, message in messages}
            terms[self.rank] = mine
            total = torch.empty_like(own)
            if mine.numel():  # in the order of the group on every rank: all ranks get the same bits
                self._device.copy([total[slices[self.rank]]], [terms[rank] for rank in group], [len(group)], reduction)
            self._transfers.release_later(messages, blocks)
            if not is_one_shot:
                sends = [(rank, total[slices[self.rank]]) for rank in others]
                receives = [(rank, total[slices[rank]]) for rank in others]
                self._transfers.send(sends, number | 1, text)
                self._receive(receives, number | 1, text)
            return total

        return lambda: self._run(reduce)

    @closes_on_error
    def _receive(self, receives: Sequence[PeerTensor], tag: int, header: bytes) -> None:
        messages = self._transfers.receive([(source, out.nbytes) for source, out in receives], tag, header)
        copies = [
            (out, self._transfers.view(source, message, out.shape, out.dtype))
            for (source, message), (_, out) in zip(messages, receives, strict=True)
            if message.num_bytes
        ]
        for dtype in dict.fromkeys(out.dtype for out, _ in copies):
            outs, views = zip(*(pair for pair in copies if pair[0].dtype == dtype), strict=True)
            self._device.copy(outs, views, [1] * len(outs), "none")
        self._transfers.release_later(messages)

    def _offer(
        self,
        tensors: Sequence[torch.Tensor],
        dtype: torch.dtype,
        numel: int,
        slices: Mapping[int, slice],
        tag: int,
        header: bytes,
    ) -> tuple[torch.Tensor, list[Block], int]:
        """Copy this rank's term into the pool and publish each peer's slice. Returns the term, the blocks that hold it,
        and the number of the event after which it is there.
        """
        self._transfers.make_progress()
        kinds = sorted({ON_DEVICE} | {self._transfers.peers[rank].chunk_kind for rank in slices})
        if numel == 0:
            for rank in slices:
                self._transfers.notify(rank, tag, None, 0, header, 0, 1)
            return torch.empty(0, dtype=dtype, device=self.device), [], 0
        blocks = {kind: self._transfers.pool.allocate(numel * dtype.itemsize, kind, header) for kind in kinds}
        terms = {kind: self._transfers.pool.view(block, (numel,), dtype) for kind, block in blocks.items()}
        copies = []
        for term in terms.values():
            start = 0
            for tensor in tensors:
                copies.append((term[start : start + tensor.numel()].view(tensor.shape), tensor))
                start += tensor.numel()
        event_number = self._transfers.publish(copies, header)
        for rank, part in slices.items():
            block, skipped = blocks[self._transfers.peers[rank].chunk_kind], part.start * dtype.itemsize
            size = part.stop * dtype.itemsize - skipped
            self._transfers.notify(rank, tag, block, size, header, skipped, event_number)
        return terms[ON_DEVICE], list(blocks.values()), event_number

    def _free(self) -> None:
        with suppress(RuntimeError):  # a broken device runs nothing
            self._device.synchronize()
        for peer in self._transfers.peers.values():
            peer.opened.close_all()
        self._handle_table.close()
        theirs = {peer: found.opened.handle_table for peer, found in self._transfers.peers.items()}
        self._transfers.pool.free_when_unused(theirs, self._event_waiter.processes)
        self._page.memory.close()

    def _let_peers_read(self) -> None:
        """Wait until peers have read the last messages: memory of a process that has ended cannot be read."""
        end = time.perf_counter() + _LAST_MESSAGES_S
        for link in self._transfers.links.values():
            while time.perf_counter() < end and not self.waiter.is_gone(link):
                self._transfers.release_finished()
                link.send_queued()
                link.collect_acks()
                if not self._transfers.owes_acks and not link.has_unread:
                    break
                time.sleep(_NAP_S)
