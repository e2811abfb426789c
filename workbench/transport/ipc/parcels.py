"""What one rank sends through its pool over ``ipc``, and what it takes out of the others': the traffic, not the calls.

A parcel is memory in a pool, a letter that says where it lies, and a mark after which it is there. It goes back to the
sender by a receipt, when the reader's device has done what it was given until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from workbench.transport.base import Message
from workbench.transport.ipc.marks import Marks, MarkWaiter, PeerMarks
from workbench.transport.ipc.pool import RETIRE_TAG, Opened, Pool, leave_all
from workbench.transport.letters.link import Block, Letter, Link
from workbench.transport.letters.mailbox import Mailbox


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


class Parcels:
    """One rank's traffic.

    Attributes:
        sent_bytes: bytes of this rank's data that others were told to read.
    """

    def __init__(self, rank: int, pool: Pool, marks: Marks, peers: MappingOf[int, Peer], waiter: MarkWaiter) -> None:
        self.pool, self.marks, self.peers = pool, marks, dict(peers)
        self.links = {peer: found.link for peer, found in peers.items()}
        self.sent_bytes = 0
        self._device, self._waiter, self._mailbox = pool.device, waiter, Mailbox(rank, self.links, waiter)
        self._due: deque[_Due] = deque()

    @property
    def owes_receipts(self) -> bool:
        """Whether a peer waits for memory that this rank has read, or is about to."""
        return bool(self._due)

    def send(self, sends: Sequence[Message], tag: int, header: bytes) -> None:
        self.tidy()
        sends = [(destination, plain(tensor)) for destination, tensor in sends]
        places: dict[Any, Block | None] = {}  # what goes to several ranks is copied once
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        keys = []
        for destination, tensor in sends:
            way = self.peers[destination].way
            key = (way, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            keys.append(key)
            if key not in places and tensor.numel():
                places[key] = block = self.pool.allocate(tensor.nbytes, way, header)
                copies.append((self.pool.view(block, tensor.shape, tensor.dtype), tensor))
            places.setdefault(key, None)
        mark = self.publish(copies, header)
        for (destination, tensor), key in zip(sends, keys, strict=True):
            self.tell(destination, tag, places[key], tensor.nbytes, header, 0, mark)
        leave_all(places.values())

    def publish(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], header: bytes) -> int:
        """Copy into the pool, one launch per dtype; the mark after which all of it is there."""
        if not copies:
            return 1
        for dtype in dict.fromkeys(target.dtype for target, _ in copies):
            targets, sources = zip(*(pair for pair in copies if pair[0].dtype == dtype), strict=True)
            self._device.copy(targets, sources, [1] * len(targets), "none")
        mark = self.marks.record()
        if not self.marks.are_shared:
            self._waiter.wait_for_own(self.marks, mark, header)
        return mark

    def tell(
        self, peer: int, tag: int, block: Block | None, num_bytes: int, header: bytes, skipped: int, mark: int
    ) -> None:
        if block is not None:
            self.pool.note_reader(block, peer)
        self.sent_bytes += num_bytes
        self.links[peer].send(tag, block, num_bytes, header, skipped, mark)

    def take(self, wanted: Sequence[tuple[int, int]], tag: int, header: bytes) -> list[tuple[int, Letter]]:
        """A letter of each source, about so many bytes, which are there now."""
        letters = [(source, self._mailbox.take(source, tag, header, num_bytes)) for source, num_bytes in wanted]
        for source, letter in letters:
            self._close_retired(source)
            if letter.num_bytes:
                peer = self.peers[source]
                self._waiter.wait_for_mark(peer.link, peer.marks, letter.wants_receipt, header)
        return letters

    def view(self, source: int, letter: Letter, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self.peers[source].opened.view(letter.chunk, letter.offset, shape, dtype)

    def give_back(self, letters: list[tuple[int, Letter]], blocks: Sequence[Block] = ()) -> None:
        """Receipts for ``letters``, and own ``blocks``, when the device has done what it was given up to here."""
        if letters or blocks:
            self._due.append(_Due(self.marks.record(), letters, list(blocks)))
        self.settle_due()

    def settle_due(self) -> None:
        while self._due and self.marks.is_done(self._due[0].mark):
            _, letters, blocks = self._due.popleft()
            for source, letter in letters:
                self.links[source].acknowledge(letter)
            leave_all(blocks)

    def tidy(self) -> None:
        """What has become possible since the last call: give receipts, take those of others, close, give back."""
        self.settle_due()
        for peer, link in self.links.items():
            while link.read():
                pass
            link.collect()
            self._close_retired(peer)
        self.pool.retire_idle(self.links)

    def _close_retired(self, peer: int) -> None:
        """The peer gives chunks back, which this rank has read for the last time."""
        found = self.peers[peer]
        while RETIRE_TAG in found.link.arrived:
            letter = found.link.expect(RETIRE_TAG)
            assert letter is not None
            found.opened.close(letter.chunk)
            found.link.acknowledge(letter)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, and with the values that its memory holds: kernels do not see torch's flags."""
    tensor = tensor.detach()
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
