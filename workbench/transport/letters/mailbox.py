"""Letters of all peers, taken by tag, and the places they speak of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from workbench.errors import CollectiveAborted
from workbench.transport.letters.board import decode_header
from workbench.transport.letters.link import Lent, Letter, Link
from workbench.transport.letters.program import Read
from workbench.transport.letters.waits import Waiter


class Mailbox:
    """One rank's links, and how it waits for what comes over them.

    Attributes:
        read_bytes: bytes of other ranks' data that this rank has read.
        num_taken: letters that this rank has acted on.
    """

    def __init__(self, rank: int, links: Mapping[int, Link], waiter: Waiter) -> None:
        self.rank, self.links, self._waiter = rank, links, waiter
        self.read_bytes = 0
        self.num_taken = 0

    def takes_same(self, link: Link, letter: bytes, header: bytes) -> bool:
        """Wait for the next letter of a peer, and take it if it says exactly this; else ``take`` finds what has come.

        What comes again need not be read, which costs several times as much behind a wait.

        Raises:
            CollectiveAborted: none will come.
        """
        if link.arrived or not (link.take_announced() or self._waiter.take_letter(link, header)):
            return False
        if not link.is_same(letter):
            return False
        self.num_taken += 1
        return True

    def take(self, source: int, tag: int, header: bytes, *sizes: int) -> Letter:
        """The next letter of ``source`` with this tag; it must come from the same call, about one of these sizes.

        Raises:
            CollectiveAborted: none will come, or it comes from another call.
        """
        link = self.links[source]
        letter = link.expect(tag)
        while letter is None:
            letter = self._waiter.wait_for_letter(link, tag, header)
        self.num_taken += 1
        if letter.header != header or letter.num_bytes not in sizes:
            theirs, ours = decode_header(letter.header), decode_header(header)
            expected = " or ".join(map(str, sorted(set(sizes))))
            raise CollectiveAborted(
                f"ranks diverged: rank {self.rank} called {ours} and expects {expected} bytes while rank {source} "
                f"called {theirs} and sent {letter.num_bytes}. All ranks must run the same program."
            )
        return letter

    def view(self, source: int, letter: Letter, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What a letter speaks of: elements one behind the other in the memory of ``source``."""
        if letter.num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        return self.links[source].mapping(letter.chunk).tensor(letter.offset, tuple(shape), dtype)

    def lent(self, read: Read, letter: Letter, dtype: torch.dtype) -> torch.Tensor:
        """A slice of a shard: out of the whole shard, or as it was copied, whichever the letter speaks of."""
        memory, part = self.links[read.source].mapping(letter.chunk), read.part
        if letter.num_bytes != read.shard_bytes:
            return memory.tensor(letter.offset, part.shape, dtype)
        return memory.strided(letter.offset + part.start, part.shape, part.strides, dtype)

    def settle(self, lent: Lent, users: Iterable[int], header: bytes) -> None:
        """Return when all ``users`` have read, or written, what was lent to them."""
        for user in users:
            link = self.links[user]
            while lent.num_readers and link.owes(lent):
                if not link.collect():
                    self._waiter.wait_for_receipt(link, header)
