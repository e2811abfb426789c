"""All-reduce over a group of ranks: each rank publishes its term and reads those of its peers, in the group's order.

A large reduction runs piece by piece. Where more than two ranks reduce a large piece, each rank reduces one slice of it
and its peers copy the result: two rounds of messages, but no rank reads more than it must.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from workbench.transport.base import pack
from workbench.transport.messaging.endpoint import Endpoint
from workbench.transport.messaging.link import Block, InPlaceBuffer, Message
from workbench.transport.messaging.transfer_plan import ONE_SHOT_BYTES
from workbench.transport.reduction import reduce_into, slices_of, split_pieces
from workbench.transport.shared.segment import MIN_IN_PLACE_BYTES, Segment

PIECE_BYTES = 4 * 2**20
"""Pieces need little memory for terms, and reuse the same blocks, whose pages are warm."""
_PENDING_PIECES = 2
_PENDING_IN_PLACE_PIECES = 8
"""Pieces that are read in place need no memory; a message sent early saves the readers a wait."""


class AllReduce:
    """A reduction in flight: the pieces that are not published yet, and the published ones with their memory.

    Peers read a single tensor that lies in the segment in place, piece by piece; other terms are copied into blocks.
    Peers also copy slices of the result in place. ``finish`` returns after the acks for both.
    """

    def __init__(
        self,
        segment: Segment,
        endpoint: Endpoint,
        tensors: Sequence[torch.Tensor],
        group: Sequence[int],
        reduction: str,
        tag: int,
        header: bytes,
    ) -> None:
        self._segment, self._endpoint = segment, endpoint
        self._group, self._reduction, self._tag, self._header = group, reduction, tag, header
        mine = group.index(endpoint.rank)
        # Ranks start with different peers, so that no memory is read by all at once
        self._others = [*group[mine + 1 :], *group[:mine]]
        self._dtype, numel = tensors[0].dtype, sum(tensor.numel() for tensor in tensors)
        num_bytes = numel * self._dtype.itemsize
        self._out = segment.empty((numel,), self._dtype)
        self._out_location = segment.locate(self._out, num_bytes) if num_bytes >= MIN_IN_PLACE_BYTES else None
        location = (
            segment.locate(tensors[0], num_bytes) if len(tensors) == 1 and self._out_location is not None else None
        )
        self._input_buffer = InPlaceBuffer(*location) if location is not None else None
        self._output_buffer = InPlaceBuffer(*self._out_location) if self._out_location is not None else None
        self._pieces = deque(split_pieces(tensors, PIECE_BYTES // self._dtype.itemsize))
        self._is_one_shot = len(group) == 2 or num_bytes <= ONE_SHOT_BYTES
        self._num_offered = 0
        self._offered: deque[tuple[torch.Tensor, Block | InPlaceBuffer]] = deque()
        for _ in range(_PENDING_PIECES if self._input_buffer is None else _PENDING_IN_PLACE_PIECES):
            self._offer()

    def finish(self) -> torch.Tensor:
        """Return the reduced elements as one flat tensor."""
        start = 0
        unfinished: torch.Tensor | None = None  # other ranks' slices of this piece are not copied yet
        while self._offered:
            own, holder = self._offered.popleft()
            out = self._out[start : start + own.numel()]
            self._reduce(own, holder, out, start * self._dtype.itemsize)
            start += own.numel()
            self._offer()
            if unfinished is not None:
                self._collect(unfinished)
            unfinished = None if self._is_one_shot else out
        if unfinished is not None:
            self._collect(unfinished)
        for buffer in (self._input_buffer, self._output_buffer):
            if buffer is not None:
                self._endpoint.wait_for_acks(buffer, self._others, self._header)
        return self._out

    def _offer(self) -> None:
        """Publish this rank's next piece, if there is one."""
        if not self._pieces:
            return
        parts = self._pieces.popleft()
        num_bytes = sum(part.nbytes for part in parts)
        holder: Block | InPlaceBuffer
        if self._input_buffer is not None:
            own, holder, skipped = parts[0].detach().view(-1), self._input_buffer, self._num_offered
        else:
            holder, skipped = self._segment.allocate(num_bytes, self._header), 0
            own = pack(parts, out=self._segment.view(holder, (num_bytes // self._dtype.itemsize,), self._dtype))
        for rank in self._others:
            self._endpoint.links[rank].send(self._tag, holder, num_bytes, self._header, skipped)
        self._num_offered += num_bytes
        self._offered.append((own, holder))

    def _reduce(self, own: torch.Tensor, holder: Block | InPlaceBuffer, out: torch.Tensor, skipped: int) -> None:
        messages: dict[int, Message] = {}
        terms: list[torch.Tensor] = []
        for rank in self._group:
            if rank == self._endpoint.rank:
                terms.append(own)
                continue
            messages[rank] = self._endpoint.receive(rank, self._tag, self._header, own.nbytes)
            terms.append(self._endpoint.view(rank, messages[rank], own.shape, own.dtype))
        if self._is_one_shot:
            reduce_into(terms, out, self._reduction)
            self._endpoint.read_bytes += (len(terms) - 1) * own.nbytes
            self._acknowledge(messages)
        else:
            self._reduce_own_slice(terms, messages, out, holder, skipped)
        if isinstance(holder, Block):
            holder.release()

    def _reduce_own_slice(
        self,
        terms: list[torch.Tensor],
        messages: dict[int, Message],
        out: torch.Tensor,
        holder: Block | InPlaceBuffer,
        skipped: int,
    ) -> None:
        """First of two steps: reduce this rank's slice of all terms and publish it."""
        place = slices_of(self._group, out.numel(), is_one_shot=False)[self._endpoint.rank]
        own = out[place]
        reduce_into([term[place] for term in terms], own, self._reduction)
        self._endpoint.read_bytes += (len(terms) - 1) * own.nbytes
        self._acknowledge(messages)
        result: Block | InPlaceBuffer
        if self._output_buffer is not None:
            result = self._output_buffer
        else:  # overwrites this slice of this rank's own term, which no peer reads
            assert isinstance(holder, Block)
            terms[self._group.index(self._endpoint.rank)][place].copy_(own)
            result, skipped = holder, 0
        for rank in self._others:
            self._endpoint.links[rank].send(self._tag | 1, result, out.nbytes, self._header, skipped)

    def _collect(self, out: torch.Tensor) -> None:
        """Second step: copy the slices that the peers have reduced."""
        slices = slices_of(self._group, out.numel(), is_one_shot=False)
        for rank in self._others:
            message = self._endpoint.receive(rank, self._tag | 1, self._header, out.nbytes)
            target, place = out[slices[rank]], slices[rank]
            target.copy_(self._endpoint.view(rank, message, out.shape, out.dtype)[place])
            self._endpoint.read_bytes += target.nbytes
            self._endpoint.links[rank].acknowledge(message)

    def _acknowledge(self, messages: dict[int, Message]) -> None:
        for rank, message in messages.items():
            self._endpoint.links[rank].acknowledge(message)
