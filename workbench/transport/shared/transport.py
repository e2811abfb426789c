"""Shared memory between CPU ranks of one host: readers copy, or add, straight out of the sender's memory.

A sender copies its data into a block of its own mapped memory and sends a letter that says where; it never waits. The
receiver reads the block in place and sends a receipt; when all readers have, the block is free. Sums work the same
way: every rank offers its term, and reads the others' terms in the order of the group, so that all get the same bits.
Large rows are not offered, but written by their owners into the others' new shards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from workbench.core.boxing import LinkCost
from workbench.core.layout import Region
from workbench.transport.base import Asynchronous, Message, Release, Wanted
from workbench.transport.letters.board import Board, encode_header
from workbench.transport.letters.ending import OverLetters, ends_the_transport
from workbench.transport.letters.link import Block, Letter, Link
from workbench.transport.letters.mailbox import Mailbox
from workbench.transport.letters.mapped import Mapping
from workbench.transport.letters.program import ONE_STEP_BYTES, Program
from workbench.transport.letters.semaphores import Semaphores
from workbench.transport.letters.waits import Waiter
from workbench.transport.network.watch import receipts_key
from workbench.transport.reducing import tag_in_group
from workbench.transport.shared.pulling import pull
from workbench.transport.shared.pushing import Pushes
from workbench.transport.shared.rooms import Rooms, Use
from workbench.transport.shared.segment import Segment
from workbench.transport.shared.steady import STEADY_BYTES, SteadyPrograms
from workbench.transport.shared.sums import Sum

FIRST_CHUNK_BYTES = 8 * 2**20 + STEADY_BYTES
"""Memory for data that every rank starts with; more is added in growing steps when messages need it."""
_LAST_LETTERS_S, _LOOK_S = 1.0, 2e-3


class SharedTransport(OverLetters, Asynchronous):
    """One rank's end of the mapped memory; ``connect`` in ``choice`` makes it.

    ``cost`` is a constant, like every transport's: decisions that follow from it must be the same on all ranks.
    """

    name = "shared"
    cost = LinkCost(latency_s=40e-6, bandwidth_bytes_per_s=5e9, one_shot_bytes=ONE_STEP_BYTES)

    def __init__(
        self,
        rank: int,
        board: Board,
        links: dict[int, Link],
        first_chunk: Mapping,
        semaphores: Semaphores,
        timeout_s: float,
    ) -> None:
        super().__init__(rank, board, links, Waiter(rank, board, links, semaphores, timeout_s))
        self._segment = Segment(rank, board, links.values(), first_chunk, reserved_bytes=STEADY_BYTES)
        self._mailbox = Mailbox(rank, links, self._waiter)
        self._pushes = Pushes(self._segment, self._mailbox)
        self._steady = SteadyPrograms(self._segment, self._mailbox)
        self._rooms = Rooms(self._segment, self._mailbox)

    @property
    def idle_bytes(self) -> int:
        """Bytes of shared memory that this rank has made, without the tensors that own some of it."""
        return self._segment.idle_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of other ranks' data that this rank has read so far."""
        return self._mailbox.read_bytes

    @ends_the_transport
    def start(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, header: str) -> Callable[[], None]:
        text = encode_header(header)
        self._send(sends, tag << 1, text)
        return lambda: self._receive(receives, tag, text)

    @ends_the_transport
    def _receive(self, receives: Sequence[Message], tag: int, text: bytes) -> None:
        for source, out in receives:
            letter = self._mailbox.take(source, tag << 1, text, out.nbytes)
            if letter.num_bytes:
                out.copy_(self._mailbox.view(source, letter, out.shape, out.dtype))
            self._acknowledge(source, letter)

    @ends_the_transport
    def borrow(
        self, sends: Sequence[Message], wanted: Sequence[Wanted], dtype: torch.dtype, tag: int, header: str
    ) -> tuple[list[torch.Tensor], Release]:
        text = encode_header(header)
        self._send(sends, tag << 1, text)
        letters: list[tuple[int, Letter]] = []
        pieces: list[torch.Tensor] = []
        for source, shape in wanted:
            letter = self._mailbox.take(source, tag << 1, text, math.prod(shape) * dtype.itemsize)
            letters.append((source, letter))
            pieces.append(self._mailbox.view(source, letter, shape, dtype))

        def release() -> None:
            for source, letter in letters:
                self._acknowledge(source, letter)

        return pieces, release

    @ends_the_transport
    def pull(self, program: Program, local: torch.Tensor, tag: int) -> torch.Tensor | None:
        if program.pushes:
            return self._pushes.of(program).run(local, tag << 1)
        steady = self._steady.of(program)
        if steady is not None:
            return steady.run(local, tag << 1)
        return pull(self._segment, self._mailbox, program, local, tag << 1)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._segment.empty(shape, dtype)

    @ends_the_transport
    def start_filling(
        self,
        group: tuple[int, ...],
        wholes: Sequence[Sequence[int]],
        regions: Sequence[Region],
        parts: Sequence[torch.Tensor],
        tag: int,
        header: str,
    ) -> tuple[bool, Callable[[], list[torch.Tensor]]]:
        use = self._rooms.of(group).begin(wholes, regions, parts, tag << 1, header)
        return use.memory is not None, lambda: self._end(use)

    @ends_the_transport
    def _end(self, use: Use) -> list[torch.Tensor]:
        return use.end()

    @ends_the_transport
    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        number = tag_in_group(tag, group) << 1
        sum_ = Sum(self._segment, self._mailbox, tensors, group, reduction, number, encode_header(header))
        return lambda: self._finish(sum_)

    @ends_the_transport
    def _finish(self, sum_: Sum) -> torch.Tensor:
        return sum_.finish()

    def breakdown(self) -> str | None:
        """What ended the world for a peer, if something has."""
        return self._waiter.breakdown()

    def ask_also(self, other_reason: Callable[[], str | None]) -> None:
        """Ask this, too, why a wait is in vain; the ranks of a host may wait for other hosts."""
        self._waiter.other_reason = other_reason

    def starving(self) -> tuple[int, int, str, int] | None:
        """Peer, slot, call and what has come so far, if this rank waits and nothing is under way to it."""
        return self._waiter.starving()

    def sent_counts(self) -> dict[str, tuple[int, list[int]]]:
        """How many letters and receipts this rank has sent to each peer, as notes tell it (see ``watch``)."""
        words, board = self._board.words, self._board
        letters: dict[str, tuple[int, list[int]]] = {str(p): (words[board.sent_word(p)], []) for p in self._links}
        return letters | {receipts_key(p): (words[board.receipts_sent_word(p)], []) for p in self._links}

    def _free(self) -> None:
        self._waiter.close()
        self._board.mapping.close()
        self._segment.close()

    def _let_peers_read(self) -> None:
        """Peers that have not read the last letters yet can no longer open this rank's files when it is gone."""
        end = time.perf_counter() + _LAST_LETTERS_S
        for link in self._links.values():
            while link.has_files_to_open and time.perf_counter() < end and not self._waiter.is_gone(link):
                time.sleep(_LOOK_S)
                link.collect()

    def _send(self, sends: Sequence[Message], tag: int, header: bytes) -> None:
        published: dict[Any, Block | None] = {}  # what goes to several ranks is copied once
        for destination, tensor in sends:
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if key not in published:
                published[key] = self._segment.publish(tensor, header)
            self._links[destination].send(tag, published[key], tensor.nbytes, header)
        for block in published.values():
            if block is not None:
                block.leave()

    def _acknowledge(self, source: int, letter: Letter) -> None:
        self._mailbox.read_bytes += letter.num_bytes
        self._links[source].acknowledge(letter)
