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
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingOf
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch

from workbench.core.boxing import LinkCost
from workbench.core.layout import balanced_bounds
from workbench.errors import CollectiveAborted
from workbench.runtime.transport.base import Message, Release, Wanted
from workbench.runtime.transport.board import FAILED, LEFT, Board, encode_header
from workbench.runtime.transport.catalogue import ON_DEVICE, ON_HOST, Catalogue
from workbench.runtime.transport.link import Block, Letter, Link
from workbench.runtime.transport.mailbox import Mailbox
from workbench.runtime.transport.marks import Marks, MarkWaiter, PeerMarks
from workbench.runtime.transport.pool import RETIRE_TAG, Opened, Pool, leave_all
from workbench.runtime.transport.reducing import tag_in_group

ONE_STEP_BYTES = 256 * 2**10
"""Up to this size every rank adds up all terms of a sum itself, which saves a meeting."""
_LAST_LETTERS_S = 10.0
"""How long a rank that leaves waits for slower ones to read what it has sent; less if they have gone."""
_NAP_S = 1e-3

P = ParamSpec("P")
R = TypeVar("R")


class Peer(NamedTuple):
    """What a rank has of another one.

    Attributes:
        way: whether what goes to it lies in memory of the device or of the host (see ``catalogue``).
    """

    link: Link
    opened: Opened
    marks: PeerMarks
    way: int


class _Due(NamedTuple):
    """What is given back when this rank's device has come to a mark: receipts to peers, own blocks."""

    mark: int
    letters: list[tuple[int, Letter]]
    blocks: list[Block]


class _Term(NamedTuple):
    """This rank's term of a sum: where it lies, the blocks that hold it, and the mark after which it is there."""

    data: torch.Tensor
    blocks: list[Block]
    mark: int


def _ends_the_transport(
    method: Callable[Concatenate[IpcTransport, P], R],
) -> Callable[Concatenate[IpcTransport, P], R]:
    """An exchange that was broken off leaves letters behind: neither this rank nor its peers may go on with them."""

    @wraps(method)
    def run(self: IpcTransport, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._waiter.abort_reason is not None:
            self._give_up(None)
            raise CollectiveAborted(f"rank {self.rank}: this world has ended: {self._waiter.abort_reason}")
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._give_up(error)
            raise

    return run


class IpcTransport:
    """One rank's end; ``connecting`` makes it.

    ``cost`` is a constant, like every transport's: decisions that follow from it must be the same on all ranks.

    Attributes:
        sent_bytes: bytes of this rank's data that others were told to read.
    """

    name = "ipc"
    packs = True
    """Slices of any strides go into the pool by one kernel: nobody need pack them before."""
    cost = LinkCost(latency_s=40e-6, bandwidth_bytes_per_s=200e9, one_shot_bytes=ONE_STEP_BYTES)

    def __init__(
        self,
        rank: int,
        board: Board,
        catalogue: Catalogue,
        pool: Pool,
        marks: Marks,
        peers: MappingOf[int, Peer],
        waiter: MarkWaiter,
    ) -> None:
        self.rank, self.world_size, self.device = rank, len(peers) + 1, pool.device
        self._board, self._catalogue, self._pool, self._marks, self._peers = board, catalogue, pool, marks, peers
        self._links = {peer: found.link for peer, found in peers.items()}
        self._waiter, self._mailbox = waiter, Mailbox(rank, self._links, waiter)
        self._due: deque[_Due] = deque()
        self._is_closed = False
        self.sent_bytes = 0
        self.groups: tuple[Any, ...] = ()

    @property
    def idle_bytes(self) -> int:
        """Bytes of device and host memory that this rank has made for exchanges."""
        return self._pool.num_bytes

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, header: str) -> None:
        self.start(sends, receives, tag, header)()

    @_ends_the_transport
    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, header: str) -> Callable[[], None]:
        text = encode_header(header)
        self._send(sends, tag << 1, text)
        return lambda: self._receive(receives, tag << 1, text)

    @_ends_the_transport
    def borrow(
        self, sends: Sequence[Message], wanted: Sequence[Wanted], dtype: torch.dtype, tag: int, header: str
    ) -> tuple[list[torch.Tensor], Release]:
        text = encode_header(header)
        self._send(sends, tag << 1, text)
        sizes = [(source, math.prod(shape) * dtype.itemsize) for source, shape in wanted]
        letters = self._take(sizes, tag << 1, text)
        there = self.device.torch_device  # what came through memory of the host is copied to the device
        pieces = [
            self._view(source, letter, shape, dtype).to(there, non_blocking=True)
            for (source, letter), (_, shape) in zip(letters, wanted, strict=True)
        ]
        return pieces, lambda: self._give_back(letters)

    def all_reduce(
        self, tensor: torch.Tensor, group: Sequence[int], reduction: str, tag: int, header: str
    ) -> torch.Tensor:
        return self.start_all_reduce([tensor], group, reduction, tag, header)().view(tensor.shape)

    @_ends_the_transport
    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        """Every rank offers its term; where more than two add up a large one, each makes a slice for all others."""
        number, text = tag_in_group(tag, group) << 1, encode_header(header)
        dtype, numel = tensors[0].dtype, sum(tensor.numel() for tensor in tensors)
        is_one_step = len(group) == 2 or numel * dtype.itemsize <= ONE_STEP_BYTES
        whole = dict.fromkeys(group, (0, numel))
        bounds = balanced_bounds(numel, len(group))
        slices = whole if is_one_step else dict(zip(group, bounds, strict=True))
        others = [rank for rank in group if rank != self.rank]
        own = self._offer(tensors, dtype, numel, {rank: slices[rank] for rank in others}, number, text)
        return lambda: self._reduce(own, group, slices, reduction, number, text, is_one_step)

    def all_gather(self, tensor: torch.Tensor, header: str) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        parts[self.rank].copy_(tensor)
        sends = [(peer, tensor) for peer in self._links]
        self.exchange(sends, [(peer, parts[peer]) for peer in self._links], -1, header)
        return parts

    @_ends_the_transport
    def flush(self) -> None:
        """What was sent is a copy; only letters for which a ring had no room are left to send."""
        started = time.perf_counter()
        for link in self._links.values():
            while not link.push():
                self._waiter.wait_for_room(link, time.perf_counter() - started)

    def abort(self, reason: str) -> None:
        self._waiter.abort_reason = self._waiter.abort_reason or reason

    def close(self) -> None:
        if self._is_closed:
            return
        if self._waiter.abort_reason is None:
            self._let_peers_read()
            self._board.end(LEFT)
            self._waiter.abort_reason = "this rank has left it"
        else:
            self._give_up(None)  # the reason may not have met a wait yet
        self._is_closed = True
        with suppress(RuntimeError):  # a device that is broken has nothing to wait for
            self.device.synchronize()
        for peer in self._peers.values():
            peer.opened.close_all()
        self._catalogue.close()
        self._pool.bury({peer: found.opened.catalogue for peer, found in self._peers.items()}, self._waiter.processes)
        self._board.mapping.close()

    def _send(self, sends: Sequence[Message], tag: int, header: bytes) -> None:
        self._tidy()
        places: dict[Any, Block | None] = {}  # what goes to several ranks is copied once
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        keys = []
        for destination, tensor in sends:
            way = self._peers[destination].way
            key = (way, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            keys.append(key)
            if key not in places and tensor.numel():
                places[key] = block = self._pool.allocate(tensor.nbytes, way, header)
                copies.append((self._pool.view(block, tensor.shape, tensor.dtype), tensor.detach()))
            places.setdefault(key, None)
        mark = self._publish(copies, header)
        for (destination, tensor), key in zip(sends, keys, strict=True):
            self._tell(destination, tag, places[key], tensor.nbytes, header, 0, mark)
        leave_all(places.values())

    def _publish(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], header: bytes) -> int:
        """Copy into the pool, one launch per dtype; the mark after which all of it is there."""
        if not copies:
            return 1
        for dtype in dict.fromkeys(target.dtype for target, _ in copies):
            targets, sources = zip(*(pair for pair in copies if pair[0].dtype == dtype), strict=True)
            self.device.copy(targets, sources, [1] * len(targets), "none")
        mark = self._marks.record()
        if not self._marks.are_shared:
            self._waiter.wait_for_own(self._marks, mark, header)
        return mark

    def _tell(
        self, peer: int, tag: int, block: Block | None, num_bytes: int, header: bytes, skipped: int, mark: int
    ) -> None:
        if block is not None:
            self._pool.note_reader(block, peer)
        self.sent_bytes += num_bytes
        self._links[peer].send(tag, block, num_bytes, header, skipped, mark)

    @_ends_the_transport
    def _receive(self, receives: Sequence[Message], tag: int, header: bytes) -> None:
        letters = self._take([(source, out.nbytes) for source, out in receives], tag, header)
        copies = [
            (out, self._view(source, letter, out.shape, out.dtype))
            for (source, letter), (_, out) in zip(letters, receives, strict=True)
            if letter.num_bytes
        ]
        for dtype in dict.fromkeys(out.dtype for out, _ in copies):
            outs, views = zip(*(pair for pair in copies if pair[0].dtype == dtype), strict=True)
            self.device.copy(outs, views, [1] * len(outs), "none")
        self._give_back(letters)

    def _take(self, wanted: Sequence[tuple[int, int]], tag: int, header: bytes) -> list[tuple[int, Letter]]:
        """A letter of each source, about so many bytes, which are there now."""
        letters = [(source, self._mailbox.take(source, tag, header, num_bytes)) for source, num_bytes in wanted]
        for source, letter in letters:
            self._close_retired(source)
            if letter.num_bytes:
                peer = self._peers[source]
                self._waiter.wait_for_mark(peer.link, peer.marks, letter.wants_receipt, header)
        return letters

    def _view(self, source: int, letter: Letter, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._peers[source].opened.view(letter.chunk, letter.offset, shape, dtype)

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
        self._tidy()
        ways = sorted({ON_DEVICE} | {self._peers[rank].way for rank in slices})
        if numel == 0:
            for rank in slices:
                self._tell(rank, tag, None, 0, header, 0, 1)
            return _Term(torch.empty(0, dtype=dtype, device=self.device.torch_device), [], 0)
        blocks = {way: self._pool.allocate(numel * dtype.itemsize, way, header) for way in ways}
        terms = {way: self._pool.view(block, (numel,), dtype) for way, block in blocks.items()}
        copies = []
        for term in terms.values():
            start = 0
            for tensor in tensors:
                copies.append((term[start : start + tensor.numel()].view(tensor.shape), tensor.detach()))
                start += tensor.numel()
        mark = self._publish(copies, header)
        for rank, (start, stop) in slices.items():
            size = (stop - start) * dtype.itemsize
            self._tell(rank, tag, blocks[self._peers[rank].way], size, header, start * dtype.itemsize, mark)
        return _Term(terms[ON_DEVICE], list(blocks.values()), mark)

    @_ends_the_transport
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
        self._waiter.wait_for_own(self._marks, mark, header)  # this may be another stream than that of the start
        mine = own[start:stop]
        letters = self._take([(rank, mine.nbytes) for rank in others], tag, header)
        terms = {rank: self._view(rank, letter, mine.shape, own.dtype) for rank, letter in letters}
        terms[self.rank] = mine
        total = torch.empty_like(own)
        if mine.numel():  # in the order of the group on every rank: the same bits everywhere
            self.device.copy([total[start:stop]], [terms[rank] for rank in group], [len(group)], reduction)
        self._give_back(letters, blocks)
        if not is_one_step:
            sends = [(rank, total[start:stop]) for rank in others]
            receives = [(rank, total[slice(*slices[rank])]) for rank in others]
            self._send(sends, tag | 1, header)
            self._receive(receives, tag | 1, header)
        return total

    @_ends_the_transport
    def _give_back(self, letters: list[tuple[int, Letter]], blocks: Sequence[Block] = ()) -> None:
        """Receipts for ``letters``, and own ``blocks``, when the device has done what it was given up to here."""
        if letters or blocks:
            self._due.append(_Due(self._marks.record(), letters, list(blocks)))
        self._settle_due()

    def _settle_due(self) -> None:
        while self._due and self._marks.is_done(self._due[0].mark):
            _, letters, blocks = self._due.popleft()
            for source, letter in letters:
                self._links[source].acknowledge(letter)
            leave_all(blocks)

    def _tidy(self) -> None:
        """What has become possible since the last call: give receipts, take those of others, close, give back."""
        self._settle_due()
        for peer, link in self._links.items():
            while link.read():
                pass
            link.collect()
            self._close_retired(peer)
        self._pool.retire_idle(self._links)

    def _close_retired(self, peer: int) -> None:
        """The peer gives chunks back, which this rank has read for the last time."""
        found = self._peers[peer]
        while RETIRE_TAG in found.link.arrived:
            letter = found.link.expect(RETIRE_TAG)
            assert letter is not None
            found.opened.close(letter.chunk)
            found.link.acknowledge(letter)

    def _let_peers_read(self) -> None:
        """Memory of a process that has ended cannot be read: wait until the last letters are done with."""
        end = time.perf_counter() + _LAST_LETTERS_S
        for link in self._links.values():
            while time.perf_counter() < end and not self._waiter.is_gone(link):
                self._settle_due()
                link.push()
                link.collect()
                if not self._due and not link.has_unread:
                    break
                time.sleep(_NAP_S)

    def _give_up(self, error: BaseException | None) -> None:
        if self._waiter.abort_reason is None:
            self._waiter.abort_reason = str(error) or type(error).__name__
        if not self._is_closed:
            self._board.end(FAILED, self._waiter.abort_reason)


__all__ = ["ON_HOST", "IpcTransport", "Peer"]
