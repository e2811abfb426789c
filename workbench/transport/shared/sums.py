"""Reductions over a group of ranks: every rank offers its term and reads the others', in the order of the group.

Long sums go by pieces. Where more than two ranks add up a large piece, each adds up one slice of it and the others
copy the result: two meetings, but no rank reads more than it must.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from workbench.core.layout import balanced_bounds
from workbench.transport.base import pack
from workbench.transport.letters.link import Block, Letter, Loan
from workbench.transport.letters.mailbox import Mailbox
from workbench.transport.letters.program import ONE_STEP_BYTES
from workbench.transport.reducing import combine, cut
from workbench.transport.shared.segment import LENT_FROM_BYTES, Segment

PIECE_BYTES = 4 * 2**20
"""Long sums go by pieces: they need little memory for terms, and always the same, whose pages are warm."""
_PIECES_UNDER_WAY = 2
_LENT_PIECES_UNDER_WAY = 8
"""Pieces that are lent need no memory; a letter that is there already saves the readers a wait."""


class Sum:
    """A reduction on its way: pieces that are not offered yet, and those that are, with the memory they lie in.

    A single tensor that lies in the segment is lent, piece by piece; all else is copied into blocks. The result is
    lent to those who copy slices of it. ``finish`` returns when nobody reads what was lent any more.
    """

    def __init__(
        self,
        segment: Segment,
        mailbox: Mailbox,
        tensors: Sequence[torch.Tensor],
        group: Sequence[int],
        reduction: str,
        tag: int,
        header: bytes,
    ) -> None:
        self._segment, self._mailbox = segment, mailbox
        self._group, self._reduction, self._tag, self._header = group, reduction, tag, header
        mine = group.index(mailbox.rank)
        self._others = [*group[mine + 1 :], *group[:mine]]  # so that not all read one rank's memory first
        self._dtype, numel = tensors[0].dtype, sum(tensor.numel() for tensor in tensors)
        num_bytes = numel * self._dtype.itemsize
        self._out = segment.empty((numel,), self._dtype)
        self._out_lies = segment.locate(self._out, num_bytes) if num_bytes >= LENT_FROM_BYTES else None
        lies = segment.locate(tensors[0], num_bytes) if len(tensors) == 1 and self._out_lies is not None else None
        self._loan = Loan(*lies) if lies is not None else None
        self._out_loan = Loan(*self._out_lies) if self._out_lies is not None else None
        self._pieces = deque(cut(tensors, PIECE_BYTES // self._dtype.itemsize))
        self._is_one_step = len(group) == 2 or num_bytes <= ONE_STEP_BYTES
        self._num_offered = 0
        self._offered: deque[tuple[torch.Tensor, Block | Loan]] = deque()
        for _ in range(_PIECES_UNDER_WAY if self._loan is None else _LENT_PIECES_UNDER_WAY):
            self._offer()

    def finish(self) -> torch.Tensor:
        """The reduced elements, one behind the other."""
        start = 0
        unfinished: torch.Tensor | None = None  # a piece of which the others' slices are still to be copied
        while self._offered:
            own, holder = self._offered.popleft()
            out = self._out[start : start + own.numel()]
            self._reduce(own, holder, out, start * self._dtype.itemsize)
            start += own.numel()
            self._offer()
            if unfinished is not None:
                self._collect(unfinished)
            unfinished = None if self._is_one_step else out
        if unfinished is not None:
            self._collect(unfinished)
        for loan in (self._loan, self._out_loan):
            if loan is not None:
                self._mailbox.settle(loan, self._others, self._header)
        return self._out

    def _offer(self) -> None:
        """Let the peers read this rank's next piece, if there is one."""
        if not self._pieces:
            return
        parts = self._pieces.popleft()
        num_bytes = sum(part.nbytes for part in parts)
        holder: Block | Loan
        if self._loan is not None:
            own, holder, skipped = parts[0].detach().view(-1), self._loan, self._num_offered
        else:
            holder, skipped = self._segment.allocate(num_bytes, self._header), 0
            own = pack(parts, out=self._segment.view(holder, (num_bytes // self._dtype.itemsize,), self._dtype))
        for rank in self._others:
            self._mailbox.links[rank].send(self._tag, holder, num_bytes, self._header, skipped)
        self._num_offered += num_bytes
        self._offered.append((own, holder))

    def _reduce(self, own: torch.Tensor, holder: Block | Loan, out: torch.Tensor, skipped: int) -> None:
        letters: dict[int, Letter] = {}
        terms: list[torch.Tensor] = []
        for rank in self._group:
            if rank == self._mailbox.rank:
                terms.append(own)
                continue
            letters[rank] = self._mailbox.take(rank, self._tag, self._header, own.nbytes)
            terms.append(self._mailbox.view(rank, letters[rank], own.shape, own.dtype))
        if self._is_one_step:
            combine(terms, out, self._reduction)
            self._mailbox.read_bytes += (len(terms) - 1) * own.nbytes
            self._acknowledge(letters)
        else:
            self._reduce_own_slice(terms, letters, out, holder, skipped)
        if isinstance(holder, Block):
            holder.leave()

    def _reduce_own_slice(
        self,
        terms: list[torch.Tensor],
        letters: dict[int, Letter],
        out: torch.Tensor,
        holder: Block | Loan,
        skipped: int,
    ) -> None:
        """The first of two steps: each rank reduces its slice of all terms, which the others will copy."""
        place = self._slices(out)[self._mailbox.rank]
        own = out[place]
        combine([term[place] for term in terms], own, self._reduction)
        self._mailbox.read_bytes += (len(terms) - 1) * own.nbytes
        self._acknowledge(letters)
        result: Block | Loan
        if self._out_loan is not None:
            result = self._out_loan
        else:  # in the place of this rank's own term, of which nobody else reads this slice
            assert isinstance(holder, Block)
            terms[self._group.index(self._mailbox.rank)][place].copy_(own)
            result, skipped = holder, 0
        for rank in self._others:
            self._mailbox.links[rank].send(self._tag | 1, result, out.nbytes, self._header, skipped)

    def _collect(self, out: torch.Tensor) -> None:
        """The second step: copy the slices that the others have reduced."""
        slices = self._slices(out)
        for rank in self._others:
            letter = self._mailbox.take(rank, self._tag | 1, self._header, out.nbytes)
            goal, place = out[slices[rank]], slices[rank]
            goal.copy_(self._mailbox.view(rank, letter, out.shape, out.dtype)[place])
            self._mailbox.read_bytes += goal.nbytes
            self._mailbox.links[rank].acknowledge(letter)

    def _slices(self, out: torch.Tensor) -> dict[int, slice]:
        bounds = balanced_bounds(out.numel(), len(self._group))
        return {rank: slice(*bound) for rank, bound in zip(self._group, bounds, strict=True)}

    def _acknowledge(self, letters: dict[int, Letter]) -> None:
        for rank, letter in letters.items():
            self._mailbox.links[rank].acknowledge(letter)
