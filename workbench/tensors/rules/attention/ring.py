"""Attention over a split sequence, as a ring: keys and values pass the ranks in pieces, and partial softmaxes add up.

Each rank keeps its slice of queries, keys and values, for backward too. In every step it has one block of scores
(``core.ring_steps``), so never more than one slice of another rank. Backward takes the same steps again, and the
gradients of what came from another rank go back to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from workbench.core.ring_steps import Block, Interval, ring_steps
from workbench.core.sbp import broadcast
from workbench.errors import ExplicitBoxingError
from workbench.kernels.attention_blocks import BlockSettings, attend, attend_backward, peaks_of
from workbench.kernels.flash_attention import add_block
from workbench.tensors import random
from workbench.tensors.autocast import cast_for_product
from workbench.tensors.boxing.uneven import Account
from workbench.tensors.dispatch.local_call import can_read
from workbench.tensors.global_tensor import Spec, local_torch
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.rules.attention.with_dropout import Seed
from workbench.tensors.tensor_state import spread_zero

SEQUENCE = 2
"""The dim of queries, keys and values (batch, heads, sequence, width) that a ring splits."""
_QUERIES, _KEYS = 0, 1
"""The two sides of a block. A worker has one of them, and takes the other from the rank that has it."""
Tensors = Sequence[torch.Tensor]
Sides = tuple[Tensors, Tensors]
_FORWARD = (("query",), ("key", "value")), (("out", "lse"), ())
"""What a worker takes of each side, and what goes back to it."""
_BACKWARD = (("query", "out", "out", "lse"), ("key", "value")), (("query",), ("key", "value"))


@dataclass(frozen=True)
class Ring:
    """The local function of attention whose keys are split over a ring of ranks. It is called as torch's function, or
    as ``with_dropout.scaled_dot_product_attention``.

    Attributes:
        query, key, value, out: specs. The axes that split the sequence of ``key`` are those of the ring.
        num_tags: all exchanges of a call have one tag; those of its backward have another.
    """

    query: Spec
    key: Spec
    value: Spec
    out: Spec
    num_tags: int = 1

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's ring, in the order of their keys."""
        return self.key.layout.ranks_along(SEQUENCE, self.key.world.rank)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, seed: Seed | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """This rank's rows of the result."""
        context = self.key.world.context
        if not context.implicit_boxing_allowed:
            raise ExplicitBoxingError(
                f"attention on keys of {self.key.shape} in {self.key.layout}: keys and values pass the ranks, an "
                "exchange that the code does not write. Under wb.debug.explicit_boxing() box both first: write "
                f"x.to_global(sbp={self.key.layout.broadcast().sbp})."
            )
        query, key, value = cast_for_product((query, key, value), self.key.world.autocast_type)
        if attn_mask is not None:
            attn_mask = attn_mask[(None,) * (query.dim() - attn_mask.dim())]
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        settings = BlockSettings(scale, None, dropout_p, 0 if seed is None else seed.key)
        site = None if context.tracer is None else context.tracer.site()
        call = _Call(self, is_causal, settings, context.next_tag(), query.dtype, site)
        call.trace("forward", _FORWARD)
        out: torch.Tensor = _Ring.apply(call, query, key, value, attn_mask)
        return out

    def rows(self, spec: Spec, ranks: Sequence[int]) -> tuple[Interval, ...]:
        """The rows of the sequence that ranks hold."""
        return tuple(spec.layout.region(spec.shape, rank)[SEQUENCE] for rank in ranks)

    def steps(self, is_causal: bool, ranks: Sequence[int]) -> tuple[tuple[Block, ...], ...]:
        """The steps of a ring."""
        return ring_steps(self.rows(self.query, ranks), self.rows(self.key, ranks), is_causal)


@dataclass(frozen=True)
class _Call:
    """One call of a ring."""

    ring: Ring
    is_causal: bool
    settings: BlockSettings
    tag: int
    dtype: torch.dtype
    site: Any

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which blocks add up."""
        return torch.promote_types(self.dtype, torch.float32)

    def with_peaks(self, mask: torch.Tensor | None) -> _Call:
        """The call with the peaks of a mask, which has this rank's rows for all keys."""
        if mask is None or mask.dtype == torch.bool:
            return self
        peaks = peaks_of(mask)
        has_none = can_read(peaks) and not bool(peaks.any())
        return self if has_none else replace(self, settings=replace(self.settings, peaks=peaks))

    def run(
        self, given: Sides, results: Sides, compute: Callable[..., Sides], add: Callable[..., None], tag: int
    ) -> None:
        """All steps.

        Args:
            given: this rank's tensors of both sides, with the sequence as dim 2.
            results: tensors with the shapes and dtypes of the results for all of this rank's queries, and keys.
            compute: the results of a block for both sides, from the block and the tensors of both.
            add: takes a block, a side and its results, which are of this rank.
        """
        ring = self.ring
        here = ring.ranks.index(ring.key.world.rank)
        keys = ring.rows(ring.key, ring.ranks)
        for step in ring.steps(self.is_causal, ring.ranks):
            mine = [block for block in step if block.worker == here]
            others = [
                (block, side) for block in step if block.worker != here
                for side, owner in enumerate((block.queries, block.keys)) if owner == here
            ]  # fmt: skip
            sends = [(block.worker, [_cut(x, block, side) for x in given[side]]) for block, side in others]
            wanted = [
                (owner, [_resized(x, block, side, keys) for x in given[side]]) for block in mine
                for side, owner in enumerate((block.queries, block.keys)) if owner != here
            ]  # fmt: skip
            arrived, back = self._exchange(sends, wanted, tag), []
            for block in mine:
                owners = block.queries, block.keys
                sides = [
                    [_cut(x, block, side) for x in given[side]] if owner == here else arrived.pop(0)
                    for side, owner in enumerate(owners)
                ]
                for side, (owner, found) in enumerate(zip(owners, compute(block, *sides), strict=True)):
                    if owner == here and found:
                        add(block, side, found)
                    elif found:
                        back.append((owner, found))
            others = [(block, side) for block, side in others if results[side]]
            wanted = [(block.worker, [_resized(x, block, side, keys) for x in results[side]]) for block, side in others]
            for (block, side), found in zip(others, self._exchange(back, wanted, tag), strict=True):
                add(block, side, found)

    def _exchange(
        self, sends: Sequence[tuple[int, Tensors]], wanted: Sequence[tuple[int, list[torch.Tensor]]], tag: int
    ) -> list[list[torch.Tensor]]:
        """Send tensors to other places of the ring and fill those that are ``wanted`` from others."""
        ranks, world = self.ring.ranks, self.ring.key.world
        started = world.traffic.now()
        outgoing = [(ranks[place], tensor) for place, tensors in sends for tensor in tensors]
        incoming = [(ranks[place], tensor) for place, tensors in wanted for tensor in tensors]
        if outgoing or incoming:
            world.transport.exchange(outgoing, incoming, tag, "a step of ring attention")
            world.traffic.add("ring", sum(tensor.nbytes for _, tensor in outgoing), started)
        return [tensors for _, tensors in wanted]

    def settings_of(self, block: Block) -> BlockSettings:
        """The settings with the place of a block in the logical scores."""
        ring = self.ring
        start = ring.rows(ring.query, ring.ranks)[block.queries][0]
        keys = ring.rows(ring.key, ring.ranks)[block.keys]
        rows = start + block.rows[0], start + block.rows[1]
        region = (*ring.out.layout.region(ring.out.shape, ring.key.world.rank)[:SEQUENCE], rows, keys)
        first, strides = random.place_of((*ring.out.shape[:-1], ring.key.shape[SEQUENCE]), region)
        causal_from = rows[0] - keys[0] if self.is_causal else None
        return replace(self.settings, causal_from=causal_from, first=first, strides=tuple(strides))

    def trace(self, direction: str, exchanged: Any) -> None:
        """Add the bytes that each rank sends to an open trace."""
        ring = self.ring
        tracer = ring.key.world.context.tracer
        if tracer is None:
            return
        sent: dict[int, int] = {}
        for ranks in {ring.key.layout.ranks_along(SEQUENCE, rank) for rank in ring.key.layout.placement}:
            for block in (block for step in ring.steps(self.is_causal, ranks) for block in step):
                for side, place in enumerate((block.queries, block.keys)):
                    if place == block.worker:
                        continue
                    rows = block.rows[1] - block.rows[0] if side == _QUERIES else None
                    there, back = (
                        sum(self._bytes(name, ranks[place], rows) for name in names[side]) for names in exchanged
                    )
                    sent[ranks[place]] = sent.get(ranks[place], 0) + there
                    sent[ranks[block.worker]] = sent.get(ranks[block.worker], 0) + back
        layout, axes = ring.key.layout, ring.key.layout.axes_splitting(SEQUENCE)
        passed = layout.with_sbp(tuple(broadcast if axis in axes else e for axis, e in enumerate(layout.sbp)))
        account = Account(layout, passed, ring.key.shape, sent, "ring")
        tracer.add(self.site or tracer.site(), direction, account, self.dtype)

    def _bytes(self, name: str, rank: int, rows: int | None) -> int:
        spec: Spec = self.ring.out if name == "lse" else getattr(self.ring, name)
        shape = list(spec.layout.local_shape(spec.shape, rank))
        shape[SEQUENCE] = shape[SEQUENCE] if rows is None else rows
        return math.prod(shape[:-1]) * self.wide.itemsize if name == "lse" else math.prod(shape) * self.dtype.itemsize


def _cut(x: torch.Tensor, block: Block, side: int) -> torch.Tensor:
    """The rows of the block."""
    return x[:, :, slice(*block.rows)] if side == _QUERIES else x


def _resized(x: torch.Tensor, block: Block, side: int, keys: Sequence[Interval]) -> torch.Tensor:
    """A new tensor like ``x`` with the rows of the block."""
    start, stop = block.rows if side == _QUERIES else keys[block.keys]
    return x.new_empty((*x.shape[:SEQUENCE], stop - start, *x.shape[SEQUENCE + 1 :]))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        with hidden_from_modes():
            call = call.with_peaks(mask)
            out, lse = _attend(call, query, key, value, mask)
        ctx.call = call
        ctx.save_for_backward(query, key, value, mask, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        query, key, value, mask, out, lse = ctx.saved_tensors
        if grad is None:  # the other ranks wait for this one
            grad = spread_zero(out.shape, out.dtype, out.device)
        with local_torch(), hidden_from_modes():
            ctx.call.trace("backward", _BACKWARD)
            return None, *_backward(ctx.call, grad, query, key, value, mask, out, lse), None


def _attend(
    call: _Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the log of the sum of exponentials, of this rank's queries."""
    totals: list[torch.Tensor] = []

    def compute(block: Block, queries: Tensors, keys: Tensors) -> Sides:
        part = _mask_of(call, block, mask)
        return (
            ([], []) if _hides_all(part) else (attend(queries[0], keys[0], keys[1], part, call.settings_of(block)), [])
        )

    def add(block: Block, side: int, found: Tensors) -> None:
        if totals:
            add_block(*(_cut(total, block, side) for total in totals), *found)
        else:  # the first block has all of this rank's queries
            totals.extend(x.to(call.wide) for x in found)

    shape = (*query.shape[:-1], value.shape[-1])
    like = query.new_empty(()).expand(shape), query.new_empty((), dtype=call.wide).expand(shape[:-1])
    call.run(([query], [key, value]), (like, []), compute, add, call.tag)
    if not totals:  # no block has a score that counts
        return query.new_zeros(shape), query.new_full(shape[:-1], -math.inf, dtype=call.wide)
    return totals[0].to(query.dtype), totals[1]


def _backward(
    call: _Call, grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    mask: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor,
) -> Tensors:  # fmt: skip
    """The gradients of this rank's queries, keys and values."""
    given = [query, grad, out, lse], [key, value]
    results = [query], [key, value]
    totals: tuple[list[torch.Tensor], ...] = [], []

    def compute(block: Block, queries: Tensors, keys: Tensors) -> Sides:
        part = _mask_of(call, block, mask)
        if _hides_all(part):
            return [], [torch.zeros_like(x) for x in keys]
        (q, of_result, result, sums), settings = queries, call.settings_of(block)
        of_query, *of_keys = attend_backward(of_result, q, keys[0], keys[1], part, result, sums, settings)
        return [of_query], of_keys

    def add(block: Block, side: int, found: Tensors) -> None:
        if not totals[side]:  # the first block has all of this rank's queries, and of its keys
            totals[side].extend(x.to(call.wide) for x in found)
            return
        for total, term in zip(totals[side], found, strict=True):
            _cut(total, block, side).add_(term)

    call.run(given, results, compute, add, call.tag | 1)
    return [
        total.to(call.dtype) for side, like in zip(totals, results, strict=True)
        for total in side or map(torch.zeros_like, like)
    ]  # fmt: skip


def _mask_of(call: _Call, block: Block, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The part of the mask for a block. It has this rank's rows: with a mask, every rank works for its own queries."""
    if mask is None:
        return None
    start, stop = call.ring.rows(call.ring.key, call.ring.ranks)[block.keys]
    return mask[..., start:stop] if mask.shape[-1] > 1 else mask


def _hides_all(mask: torch.Tensor | None) -> bool:
    """Whether no score of a block counts, as far outside of a window."""
    if mask is None or not can_read(mask):
        return False
    return not bool((mask if mask.dtype == torch.bool else mask != -math.inf).any())
