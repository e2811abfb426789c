"""Joins, cuts and rearrangements along a dim: cat, stack, chunk, flip, roll, repeat, pad.

All other dims keep their split. Along a split dim, rows move between the ranks that need them (see ``row_moves``);
nothing is gathered.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.core.layout import Shape
from workbench.core.rules import Signature
from workbench.core.sbp import Sbp, Split, broadcast, partial_sum
from workbench.tensors.dispatch.planning import check_as_torch
from workbench.tensors.dispatch.registry import (
    Call,
    LocalFunction,
    Resolution,
    composite,
    elementwise_except,
    rule,
    term,
)
from workbench.tensors.global_tensor import Spec
from workbench.tensors.rules.views.row_moves import MAX_SEGMENTS, RowPlan, Segment, Side, move_rows, plan_rows
from workbench.tensors.world import World


@dataclass
class RowFunction:
    """A local function that moves rows. For the results of a view, ``items`` are their parts of the base."""

    world: World
    plans: list[RowPlan]
    items: list[Any] | None = None
    finish: Callable[..., Any] | None = None
    prepare: Callable[..., list[torch.Tensor]] | None = None
    num_tags: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tags = len(self.plans)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shards: list[torch.Tensor] = [args[0]] if self.prepare is None else self.prepare(*args, **kwargs)
        for plan in self.plans:
            shards = move_rows(plan, self.world, shards)
        if self.finish is not None:
            return self.finish(*shards)
        return shards[0] if len(shards) == 1 else tuple(shards)


def splits_dim(spec: Spec, dim: int) -> bool:
    """Whether an axis splits the dim."""
    return Split(dim) in spec.layout.sbp


def row_plans(source: Spec, target: Shape, maps: Mapping[int, Sequence[Segment]]) -> list[RowPlan]:
    """One plan for each dim of ``maps``, which gets its size in ``target``; the others stay."""
    plans, before = [], Side(source.layout, source.shape)
    for dim, segments in maps.items():
        after = Side(source.layout, (*before.shape[:dim], target[dim], *before.shape[dim + 1 :]))
        plans.append(plan_rows(dim, tuple(segments), (before,), (after,)))
        before = after
    return plans


@rule("chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split", "split_with_sizes", "unbind")
@rule("hsplit", "vsplit", "dsplit")
def _cut(call: Call) -> Resolution:
    """Pieces along a dim. Along a split dim, each piece becomes a balanced split of its own, or B if it is small."""
    shape = call.shapes[0]
    ndim = len(shape)
    drops = call.name == "unbind"
    dim = _cut_dim(call, ndim)
    sizes = [1 if drops else out[dim] for out, _ in call.outputs]
    firsts = [0, *itertools.accumulate(sizes)]
    parts = call.operands[0]._spec.layout.placement.num_ranks
    keeps = not drops and min(sizes, default=0) >= parts
    found = []
    for d in range(ndim):
        after: Sbp = Split(d - (drops and d > dim)) if d != dim or keeps else broadcast
        found.append(Signature((Split(d),), (after,) * len(sizes), chr(97 + d)))
    found += [Signature((entry,), (entry,) * len(sizes)) for entry in (partial_sum, broadcast)]
    segments = [Segment(0, firsts[k], 1, k, 0, size) for k, size in enumerate(sizes)]

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> Any:
        if not sizes or not splits_dim(inputs[0], dim):
            return None
        sides = [
            Side(
                inputs[0].layout.with_sbp(
                    tuple(broadcast if entry == Split(dim) and not keeps else entry for entry in inputs[0].layout.sbp)
                ),
                (*shape[:dim], size, *shape[dim + 1 :]),
            )
            for size in sizes
        ]
        plan = plan_rows(dim, tuple(segments), (Side(inputs[0].layout, shape),), tuple(sides))
        before = (slice(None),) * dim
        items = [(*before, firsts[k] if drops else slice(firsts[k], firsts[k] + size)) for k, size in enumerate(sizes)]
        finish = (lambda *shards: tuple(shard.squeeze(dim) for shard in shards)) if drops else lambda *shards: shards
        return RowFunction(inputs[0].world, [plan], items, finish)

    return Resolution(found, localize)


def _cut_dim(call: Call, ndim: int) -> int:
    if call.name == "unbind":
        return int(call.arg(1, "dim", 0)) % ndim
    if call.name in ("hsplit", "vsplit", "dsplit"):
        return {"hsplit": min(1, ndim - 1), "vsplit": 0, "dsplit": 2}[call.name]
    return int(call.arg(2, "dim", 0)) % ndim


@rule("cat")
def _cat(call: Call) -> Resolution:
    """All operands have equal layouts. Along a split dim, the rows move to a balanced split. Empty tensors of one dim
    are ignored.
    """
    ndim = len(call.outputs[0][0])
    dim = int(call.arg(1, "dim", 0)) % max(1, ndim)
    counted = [k for k, other in enumerate(call.shapes) if len(other) == ndim]
    firsts = [0, *itertools.accumulate(call.shapes[k][dim] if ndim else 0 for k in counted)]
    segments = [Segment(i, 0, 1, 0, firsts[i], call.shapes[k][dim]) for i, k in enumerate(counted)]
    entries: list[Sbp] = [Split(d) for d in range(ndim)]
    found = [_beside_empty(call, counted, entry, chr(97 + d)) for d, entry in enumerate(entries)]
    found += [_beside_empty(call, counted, entry, "") for entry in (partial_sum, broadcast)]

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> Any:
        if not splits_dim(outputs[0], dim):
            return None
        sources, results = (
            tuple(Side(spec.layout, spec.shape) for spec in specs) for specs in ([inputs[k] for k in counted], outputs)
        )
        plan = plan_rows(dim, tuple(segments), sources, results)
        return RowFunction(outputs[0].world, [plan], prepare=_tensors_of(counted))

    return Resolution(found, localize)


def _beside_empty(call: Call, counted: Sequence[int], entry: Sbp, letter: str) -> Signature:
    inputs = tuple(entry if k in counted else broadcast for k in range(len(call.operands)))
    return Signature(inputs, (entry,), letter)


def _tensors_of(counted: Sequence[int]) -> Callable[..., list[torch.Tensor]]:
    def prepare(tensors: Sequence[torch.Tensor], *_: Any, **__: Any) -> list[torch.Tensor]:
        dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        return [tensors[k].to(dtype) for k in counted]

    return prepare


@rule("stack")
def _stack(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    at = int(call.arg(1, "dim", 0)) % (ndim + 1)
    inner = term(ndim)
    return Resolution(", ".join(["+" + inner] * len(call.operands)) + f" -> {inner[:at]}1{inner[at:]}")


def listed(tensors: Any) -> list[Any]:
    """Tensors that are given one by one, or as one list."""
    return list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else list(tensors)


@composite("hstack")
def hstack(tensors: Any, **kwargs: Any) -> Any:
    """torch.hstack: along the second dim, or the first of vectors."""
    joined = [t.reshape(1) if t.dim() == 0 else t for t in tensors]
    return torch.cat(joined, 0 if joined[0].dim() == 1 else 1)


@composite("vstack", "row_stack")
def vstack(tensors: Any, **kwargs: Any) -> Any:
    """torch.vstack: rows under rows."""
    return torch.cat([t.reshape(1, -1) if t.dim() < 2 else t for t in tensors], 0)


@composite("dstack")
def dstack(tensors: Any, **kwargs: Any) -> Any:
    """torch.dstack: along the third dim."""
    return torch.cat([torch.atleast_3d(t) for t in tensors], 2)


@composite("column_stack")
def column_stack(tensors: Any, **kwargs: Any) -> Any:
    """torch.column_stack: vectors become columns."""
    return torch.cat([t.reshape(-1, 1) if t.dim() < 2 else t for t in tensors], 1)


@rule("flip", "fliplr", "flipud")
def _flip(call: Call) -> Resolution:
    shape = call.shapes[0]
    ndim = len(shape)
    named = call.kwargs.get("dims", call.args[1:])
    listed = list(named[0]) if named and isinstance(named[0], (list, tuple)) else list(named)
    flipped = {"fliplr": [1], "flipud": [0]}.get(call.name) or [d % max(1, ndim) for d in listed]

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> Any:
        split = [d for d in flipped if splits_dim(inputs[0], d)]
        if not split:
            return None
        plans = row_plans(inputs[0], shape, {d: [Segment(0, shape[d] - 1, -1, 0, 0, shape[d])] for d in split})
        rest = [d for d in flipped if d not in split]
        return RowFunction(inputs[0].world, plans, finish=(lambda x: x.flip(rest)) if rest else None)

    return Resolution(elementwise_except(ndim, [], addend=True), localize)


@rule("roll")
def _roll(call: Call) -> Resolution | None:
    shape = call.shapes[0]
    shifts, dims = call.arg(1, "shifts"), call.arg(2, "dims", ())
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    if not dims:
        return None
    totals = dict.fromkeys((d % len(shape) for d in dims), 0)
    for d, shift in zip(dims, shifts, strict=True):
        totals[d % len(shape)] += shift

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> Any:
        split = [d for d in totals if splits_dim(inputs[0], d)]
        if not split:
            return None
        plans = row_plans(inputs[0], shape, {d: _rolled(shape[d], totals[d]) for d in split})
        rest = {d: shift for d, shift in totals.items() if d not in split}
        finish = (lambda x: torch.roll(x, [*rest.values()], [*rest])) if rest else None
        return RowFunction(inputs[0].world, plans, finish=finish)

    return Resolution(elementwise_except(len(shape), [], addend=True), localize)


def _rolled(size: int, shift: int) -> list[Segment]:
    shift %= max(1, size)
    return [Segment(0, 0, 1, 0, shift, size - shift), Segment(0, size - shift, 1, 0, 0, shift)]


@composite("roll")
def roll(input: Any, shifts: Any, dims: Any = ()) -> Any:
    """Without dims, it rolls the flattened elements."""
    if dims or isinstance(dims, int):
        return NotImplemented
    return torch.roll(input.reshape(-1), shifts, 0).reshape(input.shape)


@rule("repeat", "tile")
def _repeat(call: Call) -> Resolution:
    """New leading dims are whole. Along a split dim, the rows move to a balanced split."""
    shape, target = call.shapes[0], call.outputs[0][0]
    named = call.kwargs.get("repeats", call.kwargs.get("dims", call.args[1:]))
    times = [int(count) for count in (listed(named) if isinstance(named, (tuple, list)) else [named])]
    times = [1] * (len(target) - len(times)) + times
    offset = len(target) - len(shape)
    kept = [d for d in range(len(shape)) if times[offset + d] <= MAX_SEGMENTS]
    found = [Signature((Split(d),), (Split(offset + d),), chr(97 + d)) for d in kept]
    found += [Signature((entry,), (entry,)) for entry in (partial_sum, broadcast)]

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction:
        split = [d for d in range(len(shape)) if times[offset + d] != 1 and splits_dim(inputs[0], d)]
        rest = [1 if at - offset in split else count for at, count in enumerate(times)]
        if not split:
            return lambda x, *_, **__: x.repeat(rest)
        maps = {d: [Segment(0, 0, 1, 0, i * shape[d], shape[d]) for i in range(times[offset + d])] for d in split}
        plans = row_plans(inputs[0], target[offset:], maps)
        return RowFunction(inputs[0].world, plans, finish=lambda x: x.repeat(rest))

    return Resolution(found, localize)


@composite("block_diag")
def block_diag(*tensors: Any) -> Any:
    """torch.block_diag, from pads and a concatenation."""
    check_as_torch(torch.block_diag, *listed(tensors))
    blocks = [t.reshape(1, -1) if t.dim() < 2 else t for t in listed(tensors)]
    width = sum(block.shape[1] for block in blocks)
    rows, start = [], 0
    for block in blocks:
        rows.append(torch.nn.functional.pad(block, (start, width - start - block.shape[1])))
        start += block.shape[1]
    return torch.cat(rows, 0)


@rule("pad", "constant_pad_nd")
def _pad(call: Call) -> Resolution | None:
    """Dims without padding keep their split. Along split dims the rows move, one dim after the other."""
    shape = call.shapes[0]
    ndim = len(shape)
    sizes = list(call.arg(1, "pad"))
    mode = call.arg(2, "mode", "constant") if call.name == "pad" else "constant"
    value = call.arg(3, "value") if call.name == "pad" else call.arg(2, "value")
    padded = {ndim - 1 - i: (sizes[2 * i], sizes[2 * i + 1]) for i in range(len(sizes) // 2)}
    padded = {d: around for d, around in padded.items() if around != (0, 0)}
    linear = mode != "constant" or not value
    segments = {d: padded_segments(shape[d], *around, mode) for d, around in padded.items()}
    whole = [d for d in padded if not linear or len(segments[d]) > MAX_SEGMENTS]

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> Any:
        split = [d for d in padded if splits_dim(inputs[0], d)]
        if not split and all(inputs[0].local_shape):
            return None
        plans = row_plans(inputs[0], outputs[0].shape, {d: segments[d] for d in split})
        return RowFunction(inputs[0].world, plans, finish=_pad_rest(sizes, split, mode, value, ndim, outputs[0]))

    return Resolution(elementwise_except(ndim, whole, linear), localize)


def _pad_rest(sizes: list[int], done: list[int], mode: str, value: Any, ndim: int, out: Spec) -> LocalFunction:
    rest = list(sizes)
    for dim in done:
        at = 2 * (ndim - 1 - dim)
        rest[at : at + 2] = [0, 0]

    def finish(shard: torch.Tensor) -> torch.Tensor:
        if not any(rest):
            return shard
        if 0 in shard.shape and mode != "constant":  # torch cannot reflect an empty tensor
            return shard.sum() + shard.new_zeros(out.local_shape)
        if mode == "constant":  # F.pad takes no complex value
            return torch.constant_pad_nd(shard, rest, value or 0)
        return torch.nn.functional.pad(shard, rest, mode)

    return finish


def padded_segments(size: int, left: int, right: int, mode: str) -> list[Segment]:
    """The row map of a pad with zeros or with rows of the tensor. Negative numbers remove rows."""
    cut = (max(0, -left), max(0, -right))
    inner = Segment(0, cut[0], 1, 0, max(0, left), max(0, size - cut[0] - cut[1]))
    left, right = max(0, left), max(0, right)
    end = inner.first + inner.length
    if mode == "reflect":
        return [Segment(0, left, -1, 0, 0, left), inner, Segment(0, size - 2, -1, 0, end, right)]
    if mode == "circular":
        # A circular pad skips the rows that a negative pad removes on the other side.
        return [Segment(0, size - cut[1] - left, 1, 0, 0, left), inner, Segment(0, cut[0], 1, 0, end, right)]
    if mode == "replicate":
        before = [Segment(0, 0, 1, 0, i, 1) for i in range(left)]
        return [*before, inner, *[Segment(0, size - 1, 1, 0, end + i, 1) for i in range(right)]]
    return [inner]
