"""Shared memory between CPU ranks of one host: readers copy, or add, straight out of the sender's memory.

A sender copies its data into a block of its own mapped memory and sends a letter that says where; it never waits. The
receiver reads the block in place and sends a receipt; when all readers have, the block is free. Sums work the same
way: every rank offers its term, and reads the others' terms in the order of the group, so that all get the same bits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from workbench.core.boxing import LinkCost
from workbench.errors import CollectiveAborted
from workbench.runtime.transport.arena import Arena
from workbench.runtime.transport.base import Message, Release, Wanted, pack
from workbench.runtime.transport.board import FAILED, LEFT, MAX_CHUNKS, Board, decode_header, encode_header
from workbench.runtime.transport.link import Block, Letter, Link
from workbench.runtime.transport.mapped import Mapping
from workbench.runtime.transport.reducing import combine, cut, tag_in_group
from workbench.runtime.transport.semaphores import Semaphores
from workbench.runtime.transport.waits import SLICE_S, Waiter

FIRST_CHUNK_BYTES = 8 * 2**20
"""Memory for data that every rank starts with; more is added in growing steps when messages need it."""
_LAST_LETTERS_S = 1.0
PIECE_BYTES = 2 * 2**20
"""Long sums go by pieces: they need little mapped memory, and always the same, whose pages are warm."""
_PIECES_UNDER_WAY = 2
ONE_STEP_BYTES = 256 * 2**10
"""Up to this size every rank of three or more adds up everything itself, which saves a meeting."""

P = ParamSpec("P")
R = TypeVar("R")


def _ends_the_transport(
    method: Callable[Concatenate[SharedTransport, P], R],
) -> Callable[Concatenate[SharedTransport, P], R]:
    """An exchange that was broken off leaves letters behind: neither this rank nor its peers may go on with them."""

    @wraps(method)
    def run(self: SharedTransport, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._waiter.abort_reason is not None:
            self._give_up(None)
            raise CollectiveAborted(f"rank {self.rank}: this world has ended: {self._waiter.abort_reason}")
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._give_up(error)
            raise

    return run


class _Sum:
    """A reduction on its way: pieces that are not offered yet, and those that are, with the blocks they lie in."""

    def __init__(
        self, pieces: list[list[torch.Tensor]], group: Sequence[int], reduction: str, tag: int, header: bytes
    ) -> None:
        self.pieces = deque(pieces)
        self.offered: deque[tuple[torch.Tensor, Block]] = deque()
        self.dtype, self.numel = pieces[0][0].dtype, sum(part.numel() for piece in pieces for part in piece)
        self.group, self.reduction, self.tag, self.header = group, reduction, tag, header


class SharedTransport:
    """One rank's end of the mapped memory; ``connect`` in ``choice`` makes it.

    ``cost`` is a constant, like every transport's: decisions that follow from it must be the same on all ranks.
    """

    name = "shared"
    cost = LinkCost(latency_s=40e-6, bandwidth_bytes_per_s=5e9)

    def __init__(
        self,
        rank: int,
        board: Board,
        links: dict[int, Link],
        first_chunk: Mapping,
        semaphores: Semaphores,
        timeout_s: float,
    ) -> None:
        self.rank, self.world_size = rank, len(links) + 1
        self._board, self._links = board, links
        self._chunks = [first_chunk]
        self._arenas = [Arena(first_chunk.size)]
        self._waiter = Waiter(rank, board, links, semaphores, timeout_s)
        self._is_closed = False

    @_ends_the_transport
    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int, header: str) -> None:
        text = encode_header(header)
        self._send(sends, tag << 1, text)
        for source, out in receives:
            link = self._links[source]
            letter = self._take(link, tag << 1, text, out.nbytes)
            if letter.num_bytes:
                out.copy_(self._view(link, letter, out.shape, out.dtype))
            link.acknowledge(letter)

    @_ends_the_transport
    def borrow(
        self, sends: Sequence[Message], wanted: Sequence[Wanted], dtype: torch.dtype, tag: int, header: str
    ) -> tuple[list[torch.Tensor], Release]:
        text = encode_header(header)
        self._send(sends, tag << 1, text)
        letters: list[tuple[Link, Letter]] = []
        pieces: list[torch.Tensor] = []
        for source, shape in wanted:
            link = self._links[source]
            letter = self._take(link, tag << 1, text, _num_bytes(shape, dtype))
            letters.append((link, letter))
            pieces.append(self._view(link, letter, shape, dtype))

        def release() -> None:
            for link, letter in letters:
                link.acknowledge(letter)

        return pieces, release

    def all_reduce(
        self, tensor: torch.Tensor, group: Sequence[int], reduction: str, tag: int, header: str
    ) -> torch.Tensor:
        return self.start_all_reduce([tensor], group, reduction, tag, header)().view(tensor.shape)

    @_ends_the_transport
    def start_all_reduce(
        self, tensors: Sequence[torch.Tensor], group: Sequence[int], reduction: str, tag: int, header: str
    ) -> Callable[[], torch.Tensor]:
        piece_numel = PIECE_BYTES // tensors[0].dtype.itemsize
        sum_ = _Sum(
            list(cut(tensors, piece_numel)), group, reduction, tag_in_group(tag, group) << 1, encode_header(header)
        )
        for _ in range(_PIECES_UNDER_WAY):
            self._offer(sum_)
        return lambda: self._finish_all_reduce(sum_)

    def _offer(self, sum_: _Sum) -> None:
        """Let the peers read this rank's next piece, if there is one."""
        if not sum_.pieces:
            return
        parts = sum_.pieces.popleft()
        dtype, numel = parts[0].dtype, sum(part.numel() for part in parts)
        block = self._allocate(numel * dtype.itemsize, sum_.header)
        own = self._chunks[block.chunk].tensor(block.offset, (numel,), dtype)
        pack(parts, out=own)
        for rank in sum_.group:
            if rank != self.rank:
                self._links[rank].send(sum_.tag, block, own.nbytes, sum_.header)
        sum_.offered.append((own, block))

    @_ends_the_transport
    def _finish_all_reduce(self, sum_: _Sum) -> torch.Tensor:
        out = torch.empty(sum_.numel, dtype=sum_.dtype)
        start = 0
        while sum_.offered:
            own, block = sum_.offered.popleft()
            self._reduce_piece(own, block, out[start : start + own.numel()], sum_)
            start += own.numel()
            self._offer(sum_)
        return out

    def _reduce_piece(self, own: torch.Tensor, block: Block, out: torch.Tensor, sum_: _Sum) -> None:
        letters: list[tuple[Link, Letter]] = []
        terms: list[torch.Tensor] = []
        for rank in sum_.group:
            if rank == self.rank:
                terms.append(own)
                continue
            link = self._links[rank]
            letter = self._take(link, sum_.tag, sum_.header, own.nbytes)
            letters.append((link, letter))
            terms.append(self._view(link, letter, own.shape, own.dtype))
        if len(terms) == 2 or own.nbytes <= ONE_STEP_BYTES:
            combine(terms, out, sum_.reduction)
        else:
            self._reduce_in_two_steps(terms, out, block, sum_)
        for link, letter in letters:
            link.acknowledge(letter)
        block.leave()

    def _reduce_in_two_steps(self, terms: list[torch.Tensor], out: torch.Tensor, block: Block, sum_: _Sum) -> None:
        """Each rank reduces its slice of all terms and offers it in the place of its own term; the others copy it.

        Nobody else reads that place: the others read their own slices of this rank's term.
        """
        group, tag = sum_.group, sum_.tag | 1
        mine, step = group.index(self.rank), -(-out.numel() // len(group))
        slices = [slice(index * step, (index + 1) * step) for index in range(len(group))]
        combine([term[slices[mine]] for term in terms], out[slices[mine]], sum_.reduction)
        terms[mine][slices[mine]].copy_(out[slices[mine]])
        others = [(mine + distance) % len(group) for distance in range(1, len(group))]  # not all at one rank's memory
        for index in others:
            self._links[group[index]].send(tag, block, out.nbytes, sum_.header)
        for index in others:
            link = self._links[group[index]]
            letter = self._take(link, tag, sum_.header, out.nbytes)
            out[slices[index]].copy_(terms[index][slices[index]])
            link.acknowledge(letter)

    def all_gather(self, tensor: torch.Tensor, header: str) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        parts[self.rank].copy_(tensor)
        sends = [(peer, tensor) for peer in self._links]
        self.exchange(sends, [(peer, parts[peer]) for peer in self._links], -1, header)
        return parts

    @_ends_the_transport
    def flush(self) -> None:
        """What was sent lies in blocks of its own; only letters for which a ring had no room are left to send."""
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
            self._let_peers_open_files()
            self._board.end(LEFT)
            self._waiter.abort_reason = "this rank has left it"
        else:
            self._give_up(None)  # the reason may not have met a wait yet
        self._is_closed = True
        self._waiter.close()
        for mapping in (self._board.mapping, *self._chunks):
            mapping.close()

    def _let_peers_open_files(self) -> None:
        """Peers that have not read the last letters yet can no longer open this rank's files when it is gone."""
        end = time.perf_counter() + _LAST_LETTERS_S
        for link in self._links.values():
            while link.has_files_to_open and time.perf_counter() < end and not self._waiter.is_gone(link):
                time.sleep(SLICE_S / 10)
                link.collect()

    def _give_up(self, error: BaseException | None) -> None:
        if self._waiter.abort_reason is None:
            self._waiter.abort_reason = str(error) or type(error).__name__
        if not self._is_closed:
            self._board.end(FAILED, self._waiter.abort_reason)

    def _send(self, sends: Sequence[Message], tag: int, header: bytes) -> None:
        published: dict[Any, Block | None] = {}  # what goes to several ranks is copied once
        for destination, tensor in sends:
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if key not in published:
                published[key] = self._publish(tensor, header)
            self._links[destination].send(tag, published[key], tensor.nbytes, header)
        for block in published.values():
            if block is not None:
                block.leave()

    def _publish(self, tensor: torch.Tensor, header: bytes) -> Block | None:
        if tensor.numel() == 0:
            return None
        block = self._allocate(tensor.nbytes, header)
        self._chunks[block.chunk].tensor(block.offset, tensor.shape, tensor.dtype).copy_(tensor.detach())
        return block

    def _allocate(self, num_bytes: int, header: bytes) -> Block:
        for link in self._links.values():
            link.collect()
        for chunk, arena in enumerate(self._arenas):
            offset = arena.allocate(num_bytes)
            if offset is not None:
                return Block(arena, chunk, offset, num_bytes)
        return self._grow(num_bytes, header)

    def _grow(self, num_bytes: int, header: bytes) -> Block:
        """A further chunk, at least as large as all before it, so that few are needed."""
        has = sum(chunk.size for chunk in self._chunks)
        assert len(self._chunks) < MAX_CHUNKS
        size = -(-max(num_bytes, has) // 2**20) * 2**20
        what = f"rank {self.rank} in {decode_header(header)}: data for other ranks"
        mapping = Mapping.create(size, what)
        self._board.add_chunk(mapping)
        self._chunks.append(mapping)
        self._arenas.append(Arena(size))
        offset = self._arenas[-1].allocate(num_bytes)
        assert offset is not None
        return Block(self._arenas[-1], len(self._chunks) - 1, offset, num_bytes)

    def _take(self, link: Link, tag: int, header: bytes, num_bytes: int) -> Letter:
        """The next letter of the peer with this tag; it must come from the same call."""
        while tag not in link.arrived:
            self._waiter.wait(link, header)
        letters = link.arrived[tag]
        letter = letters.popleft()
        if not letters:
            del link.arrived[tag]
        if letter.header != header or letter.num_bytes != num_bytes:
            theirs, ours = decode_header(letter.header), decode_header(header)
            raise CollectiveAborted(
                f"ranks diverged: rank {self.rank} called {ours} and expects {num_bytes} bytes while rank {link.peer} "
                f"called {theirs} and sent {letter.num_bytes}. All ranks must run the same program."
            )
        return letter

    def _view(self, link: Link, letter: Letter, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if letter.num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        return link.mapping(letter.chunk).tensor(letter.offset, tuple(shape), dtype)


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count
