"""torch's ``flex_attention``: samples, heads and rows of queries may be split.

Its functions of scores and masks get logical positions on every rank. Where queries are split along the sequence, they
go over heads if these suffice, else every rank gathers the keys. Tensors that the functions read are whole.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from workbench.core.layout import Layout, Region
from workbench.core.sbp import NdSbp, Sbp, Split, broadcast
from workbench.tensors.boxing.box import box_implicitly
from workbench.tensors.captured_tensors import with_plain_captures
from workbench.tensors.conversion import from_local, from_local_once
from workbench.tensors.dispatch.local_map import plain_alias
from workbench.tensors.dispatch.placeholder_calls import OutputInfo, placeholder_outputs
from workbench.tensors.dispatch.registry import composite
from workbench.tensors.global_tensor import GlobalTensor, local_torch, spec_of, wrap

_SAMPLES, _HEADS, _ROWS = Split(0), Split(1), Split(2)
_NAME = "flex_attention"
_one_at_a_time = threading.Lock()
"""torch's tracer does not work for two threads, as simulated ranks are."""
_COUNTS_AND_INDICES = 4
"""Tensors of a block mask by query block, behind its two lengths; those by key block follow from them."""


@composite(_NAME)
def flex_attention(
    query: Any, key: Any, value: Any, score_mod: Callable[..., Any], block_mask: tuple[Any, ...], scale: float,
    kernel_options: dict[str, Any], *buffers: Any,
) -> Any:  # fmt: skip
    """torch's operator below ``torch.nn.attention.flex_attention.flex_attention``, which has checked the arguments."""
    if any(buffers):
        return NotImplemented
    known = next(x for x in (query, key, value) if isinstance(x, GlobalTensor))._spec
    world, placement = known.world, known.layout.placement
    query, key, value = (
        x if isinstance(x, GlobalTensor) else from_local_once(x, world, known.layout) for x in (query, key, value)
    )
    given = query._spec.layout
    entries = _entries(given, tuple(query.shape), tuple(key.shape), block_mask)
    split = Layout(placement, tuple(of_query for of_query, _ in entries))
    of_keys = Layout(placement, tuple(of_key for _, of_key in entries))
    operands: list[Any] = [box_implicitly(x, to, _NAME) for x, to in ((query, split), (key, of_keys), (value, of_keys))]

    def replace(tensor: torch.Tensor) -> Any:
        known = tensor if isinstance(tensor, GlobalTensor) else from_local(tensor, world, split)
        operands.append(box_implicitly(known, split.broadcast(), _NAME))
        return plain_alias(operands[-1])

    score_mod, mask_mod = (with_plain_captures(function, replace) for function in (score_mod, block_mask[-1]))
    shape = (*query.shape[:-1], value.shape[-1])
    specs = [spec_of(world, split, s) for s in (shape, shape[:-1], shape[:-1])]
    wide = torch.promote_types(query.dtype, torch.float32)
    if specs[0].is_placeholder:
        links = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
        infos: list[OutputInfo] = [
            (spec.shape, dtype, links) for spec, dtype in zip(specs, (query.dtype, wide, wide), strict=True)
        ]
        found = placeholder_outputs(infos, operands, world.device)
    else:
        region = split.region(tuple(query.shape), world.rank)
        shards = [plain_alias(x) for x in operands]
        if 0 in specs[0].local_shape:
            with local_torch():
                nothing = sum(x.sum() * 0 for x in shards)
                found = [query.new_zeros(spec.local_shape, dtype=wide) + nothing for spec in specs]
                found[0] = found[0].to(query.dtype)
        else:
            mask = _cut(block_mask, shape, region, _shifted(mask_mod, region))
            found = _call(*shards[:3], _shifted(score_mod, region), mask, scale, kernel_options)
    out: Any
    pairs = zip(found, specs, strict=True)
    out, *others = (
        wrap(t, spec) if t.dim() == len(spec.shape) else t for t, spec in pairs
    )  # what is not wanted is empty
    return box_implicitly(out, _as_given(given, split), _NAME), *others


def _entries(layout: Layout, query: Sequence[int], key: Sequence[int], block_mask: tuple[Any, ...]) -> list[Any]:
    """For each axis, the entries of queries and of keys."""

    def parts(*wanted: Sbp) -> int:
        sizes = zip(layout.sbp, layout.placement.shape, strict=True)
        return math.prod(size for entry, size in sizes if entry in wanted)

    over_heads = key[1] % parts(_HEADS, _ROWS) == 0
    has_heads = key[1] == query[1] or key[1] % parts(_HEADS) == 0

    def of(entry: Sbp) -> tuple[Sbp, Sbp]:
        if entry == _SAMPLES:
            return entry, broadcast if key[0] == 1 else entry
        if entry == _HEADS and key[1] == 1:
            return entry, broadcast
        if (entry == _HEADS and has_heads) or (entry == _ROWS and over_heads):
            return _HEADS, _HEADS
        if entry == _ROWS and _begin_with_blocks(layout, query, block_mask):
            return entry, broadcast
        return broadcast, broadcast

    return [of(entry) for entry in layout.sbp]


def _begin_with_blocks(layout: Layout, query: Sequence[int], block_mask: tuple[Any, ...]) -> bool:
    """Whether the rows of each rank begin where a block of the mask does."""
    starts = (layout.region(tuple(query), rank)[2][0] for rank in layout.placement)
    return block_mask[2].shape[-1] == 1 or all(start % block_mask[-3] == 0 for start in starts)


def _as_given(given: Layout, split: Layout) -> Layout:
    """The layout of the result: the queries' splits of dims that it has, too."""
    pairs = zip(given.sbp, split.sbp, strict=True)
    sbp: NdSbp = tuple(entry if entry in (_SAMPLES, _HEADS, _ROWS) else other for entry, other in pairs)
    return given.with_sbp(sbp)


def _shifted(function: Callable[..., Any], region: Region) -> Callable[..., Any]:
    """``function`` of logical positions, for positions in a region."""
    first, second, third = (start for start, _ in region[:3])
    if not (first or second or third):
        return function

    def shifted(*args: Any) -> Any:
        *values, sample, head, row, column = args
        return function(*values, sample + first, head + second, row + third, column)

    return shifted


def _cut(
    block_mask: tuple[Any, ...], sizes: Sequence[int], region: Region, mask_mod: Callable[..., Any]
) -> tuple[Any, ...]:
    """The part of a block mask for a region of queries of these sizes."""
    (rows, keys), tensors = block_mask[:2], block_mask[2 : 2 + _COUNTS_AND_INDICES]
    if block_mask[-3] >= sizes[2]:  # one block has all rows
        blocks = slice(None)
    else:
        rows, (first, stop) = region[2][1] - region[2][0], region[2]
        blocks = slice(first // block_mask[-3], -(-stop // block_mask[-3]))
    wanted = *(slice(*region[dim]) if sizes[dim] > 1 else slice(None) for dim in (0, 1)), blocks

    def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        cuts = (cut if tensor.shape[dim] > 1 else slice(None) for dim, cut in enumerate(wanted))
        return tensor[tuple(cuts)]

    parts = [part(tensor) for tensor in tensors]
    if all(mine is None or mine.shape == whole.shape for mine, whole in zip(parts, tensors, strict=True)):
        return rows, keys, *block_mask[2:-1], mask_mod
    from torch.nn.attention.flex_attention import BlockMask  # loads torch's compiler

    make: Any = BlockMask.from_kv_blocks
    made: tuple[Any, ...] = make(*parts, block_mask[-3:-1], mask_mod, (rows, keys)).as_tuple()
    return made


def _call(*args: Any) -> list[torch.Tensor]:
    """torch's operator on shards, as torch calls it: compiled, because its gradients of captured tensors need that."""
    from torch._higher_order_ops.utils import setup_compilation_env

    def run(*args: Any) -> Any:
        return torch.ops.higher_order.flex_attention(*args)

    with local_torch(), _one_at_a_time:
        if args[0].device.type == "cuda":
            return list(torch.compile(run, fullgraph=True)(*args))
        with setup_compilation_env() as backend:
            return list(torch.compile(run, backend=backend, fullgraph=True)(*args))
