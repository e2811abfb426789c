"""CUDA IPC between GPU ranks of one host, also of several ranks on one GPU: readers pull out of the sender's memory.

A sender copies its slices into its pool (see ``pool``), records an event, and sends a letter over host memory that says
where they lie and which event to wait for. The reader waits until that event is done, pulls all slices that it wants
by one kernel straight into place, summing on the way, and sends a receipt when its own device has come that far.

The reader waits for the event on the host, not on its stream: a stream that waits for a process that was killed would
never go on, and nothing could free it. So every wait ends like those of ``shared``, whose letters these are: by an
abort, a dead or stopped peer, ranks that diverged, a timeout. It costs the start of one kernel per exchange.

No GPU has run this yet. It is tested, with real processes, on a stand-in for the device whose work runs late, and
before ranks use it they read known bytes from each other. A rank that cannot reach a peer's device memory (no peer
access) gets its data through pinned memory of the host; where events cannot be shared, the sender waits instead.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingOf
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from workbench.core.boxing import LinkCost
from workbench.core.layout import balanced_bounds
from workbench.transport.base import Asynchronous, Message, Release, Wanted
from workbench.transport.ipc.catalogue import ON_DEVICE, Catalogue
from workbench.transport.ipc.marks import MarkWaiter
from workbench.transport.ipc.parcels import Parcels, plain
from workbench.transport.letters.board import Board, encode_header
from workbench.transport.letters.ending import OverLetters, ends_the_transport
from workbench.transport.letters.link import Block, Letter
from workbench.transport.reducing import tag_in_group

ONE_STEP_BYTES = 256 * 2**10
"""Up to this size every rank adds up all terms of a sum itself, which saves a meeting."""
_LAST_LETTERS_S = 10.0
"""How long a rank that leaves waits for slower ones to read what it has sent; less if they have gone."""
_NAP_S = 1e-3


class _Term(NamedTuple):
    """This rank's term of a sum: where it lies, the blocks that hold it, and the mark after which it is there."""

    data: torch.Tensor
    blocks: list[Block]
    mark: int


class IpcTransport(OverLetters, Asynchronous):
    """One rank's end; ``ipc_connecting`` makes it.

    ``cost`` is a constant, like every transport's: decisions that follow from it must be the same on all ranks.
    """

    name = "ipc"
    packs = True
    """Slices of any strides go into the pool by one kernel: nobody need pack them before."""
    cost = LinkCost(latency_s=40e-6, bandwidth_bytes_per_s=200e9, one_shot_bytes=ONE_STEP_BYTES)

    def __init__(self, rank: int, board: Board, catalogue: Catalogue, parcels: Parcels, waiter: MarkWaiter) -> None:
        super().__init__(rank, board, parcels.links, waiter)
        self._device, self.device = parcels.pool.device, parcels.pool.device.torch_device
        self._catalogue, self._parcels, self._mark_waiter = catalogue, parcels, waiter
        self.groups: tuple[Any, ...] = ()

    @property
    def sent_bytes(self) -> int:
        """Bytes of this rank's data that others were told to read."""
        return self._parcels.sent_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of device and host memory that this rank has made for exchanges."""
        return self._parcels.pool.num_bytes

    @ends_the_transport
    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, header: str) -> Callable[[], None]:
        text = encode_header(header)
        self._parcels.send(sends, tag << 1, text)
        return lambda: self._receive(receives, tag << 1, text)

    @ends_the_transport
    def borrow(
        self, sends: Sequence[Message], wanted: Sequence[Wanted], dtype: torch.dtype, tag: int, header: str
    ) -> tuple[list[torch.Tensor], Release]:
        text = encode_header(header)
        self._parcels.send(sends, tag << 1, text)
        sizes = [(source, math.prod(shape) * dtype.itemsize) for source, shape in wanted]
        letters = self._parcels.take(sizes, tag << 1, text)
        there = self.device  # what came through memory of the host is copied to the device
        pieces = [
            self._parcels.view(source, letter, shape, dtype).to(there, non_blocking=True)
            for (source, letter), (_, shape) in zip(letters, wanted, strict=True)
        ]
        return pieces, lambda: self._release(letters)

    @ends_the_transport
    def _release(self, letters: list[tuple[int, Letter]]) -> None:
        self._parcels.give_back(letters)

    @ends_the_transport
    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        """Every rank offers its term; where more than two add up a large one, each makes a slice for all others."""
        number, text = tag_in_group(tag, group) << 1, encode_header(header)
        tensors = [plain(tensor) for tensor in tensors]
        dtype, numel = tensors[0].dtype, sum(tensor.numel() for tensor in tensors)
        is_one_step = len(group) == 2 or numel * dtype.itemsize <= ONE_STEP_BYTES
        whole = dict.fromkeys(group, (0, numel))
        bounds = balanced_bounds(numel, len(group))
        slices = whole if is_one_step else dict(zip(group, bounds, strict=True))
        others = [rank for rank in group if rank != self.rank]
        own = self._offer(tensors, dtype, numel, {rank: slices[rank] for rank in others}, number, text)
        return lambda: self._reduce(own, group, slices, reduction, number, text, is_one_step)

    @ends_the_transport
    def _receive(self, receives: Sequence[Message], tag: int, header: bytes) -> None:
        letters = self._parcels.take([(source, out.nbytes) for source, out in receives], tag, header)
        copies = [
            (out, self._parcels.view(source, letter, out.shape, out.dtype))
            for (source, letter), (_, out) in zip(letters, receives, strict=True)
            if letter.num_bytes
        ]
        for dtype in dict.fromkeys(out.dtype for out, _ in copies):
            outs, views = zip(*(pair for pair in copies if pair[0].dtype == dtype), strict=True)
            self._device.copy(outs, views, [1] * len(outs), "none")
        self._parcels.give_back(letters)

    def _offer(
        self,
        tensors: Sequence[torch.Tensor],
        dtype: torch.dtype,
        numel: int,
        slices: MappingOf[int, tuple[int, int]],
        tag: int,
        header: bytes,
    ) -> _Term:
        """Copy this rank's term into the pool, and let every rank read its slice."""
        self._parcels.tidy()
        ways = sorted({ON_DEVICE} | {self._parcels.peers[rank].way for rank in slices})
        if numel == 0:
            for rank in slices:
                self._parcels.tell(rank, tag, None, 0, header, 0, 1)
            return _Term(torch.empty(0, dtype=dtype, device=self.device), [], 0)
        blocks = {way: self._parcels.pool.allocate(numel * dtype.itemsize, way, header) for way in ways}
        terms = {way: self._parcels.pool.view(block, (numel,), dtype) for way, block in blocks.items()}
        copies = []
        for term in terms.values():
            start = 0
            for tensor in tensors:
                copies.append((term[start : start + tensor.numel()].view(tensor.shape), tensor))
                start += tensor.numel()
        mark = self._parcels.publish(copies, header)
        for rank, (start, stop) in slices.items():
            size = (stop - start) * dtype.itemsize
            self._parcels.tell(
                rank, tag, blocks[self._parcels.peers[rank].way], size, header, start * dtype.itemsize, mark
            )
        return _Term(terms[ON_DEVICE], list(blocks.values()), mark)

    @ends_the_transport
    def _reduce(
        self,
        term: _Term,
        group: Sequence[int],
        slices: MappingOf[int, tuple[int, int]],
        reduction: str,
        tag: int,
        header: bytes,
        is_one_step: bool,
    ) -> torch.Tensor:
        own, blocks, mark = term
        others = [rank for rank in group if rank != self.rank]
        start, stop = slices[self.rank]
        self._mark_waiter.wait_for_own(
            self._parcels.marks, mark, header
        )  # this may be another stream than that of the start
        mine = own[start:stop]
        letters = self._parcels.take([(rank, mine.nbytes) for rank in others], tag, header)
        terms = {rank: self._parcels.view(rank, letter, mine.shape, own.dtype) for rank, letter in letters}
        terms[self.rank] = mine
        total = torch.empty_like(own)
        if mine.numel():  # in the order of the group on every rank: the same bits everywhere
            self._device.copy([total[start:stop]], [terms[rank] for rank in group], [len(group)], reduction)
        self._parcels.give_back(letters, blocks)
        if not is_one_step:
            sends = [(rank, total[start:stop]) for rank in others]
            receives = [(rank, total[slice(*slices[rank])]) for rank in others]
            self._parcels.send(sends, tag | 1, header)
            self._receive(receives, tag | 1, header)
        return total

    def _free(self) -> None:
        with suppress(RuntimeError):  # a device that is broken has nothing to wait for
            self._device.synchronize()
        for peer in self._parcels.peers.values():
            peer.opened.close_all()
        self._catalogue.close()
        theirs = {peer: found.opened.catalogue for peer, found in self._parcels.peers.items()}
        self._parcels.pool.bury(theirs, self._mark_waiter.processes)
        self._board.mapping.close()

    def _let_peers_read(self) -> None:
        """Memory of a process that has ended cannot be read: wait until the last letters are done with."""
        end = time.perf_counter() + _LAST_LETTERS_S
        for link in self._parcels.links.values():
            while time.perf_counter() < end and not self._waiter.is_gone(link):
                self._parcels.settle_due()
                link.push()
                link.collect()
                if not self._parcels.owes_receipts and not link.has_unread:
                    break
                time.sleep(_NAP_S)


__all__ = ["IpcTransport"]
