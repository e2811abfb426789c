"""Attention with dropout on shards, by a flash kernel, or in blocks of query rows.

The flash kernels of torch draw their mask by the indices of the shard, so that a split batch or split heads would drop
other weights than one device. Here a weight's logical position decides. Where no kernel of ours runs, scores of one
block exist at a time, and backward computes them again; on a CPU, the mask stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from workbench.core.layout import Region, Shape
from workbench.kernels.attention_dropout import DTYPES, MAX_WIDTH, attention_dropout, drop, kept_of, with_mask
from workbench.kernels.launch import runs_on
from workbench.tensors import random
from workbench.tensors.autocast import cast_for_product
from workbench.tensors.global_tensor import local_torch


@dataclass(frozen=True, slots=True)
class Seed:
    """The key of what is dropped. All are equal: one plan serves them. Attention masks that have a gradient need
    another.
    """

    key: int = field(compare=False)
    learns_mask: bool = False


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    seed: Seed,
    part: tuple[Shape, Region] | None = None,
) -> torch.Tensor:
    """torch's function on a slice of the scores.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale: as in torch, without groups of heads.
        seed: decides which weights are dropped.
        part: shape of the logical scores, and the slice of them that these are; default: all of them.
    """
    batch: Shape = np.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    num_rows, num_keys = query.shape[-2], key.shape[-2]
    sizes = (*batch, num_rows, num_keys)
    shape, region = part or (sizes, tuple((0, size) for size in sizes))
    first, strides = random.place_of(shape, region)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if fits_kernel(batch, query, key, value, attn_mask):
        settings = scale, region[-2][0] if is_causal else None, dropout_p, seed.key, first, strides
        return _by_kernel(batch, query, key, value, attn_mask, *settings)
    query = query * scale

    def draw(start: int, num: int) -> torch.Tensor:
        place = seed.key, first + start * strides[-2], strides
        return kept_of((*batch, num, num_keys), query.device, dropout_p, *place)

    def attend(
        start: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, keep: torch.Tensor | None
    ) -> torch.Tensor:
        scores = with_mask(query @ key.transpose(-2, -1), mask, region[-2][0] + start if is_causal else None)
        weights = scores.softmax(-1) if mask is None else torch._safe_softmax(scores, -1)  # a row may see no key
        return drop(weights, draw(start, query.shape[-2]) if keep is None else keep, dropout_p) @ value

    block = max(1, _block_bytes(query.device) // max(1, math.prod(batch) * num_keys * query.element_size()))
    if block >= num_rows:
        return attend(0, query, key, value, attn_mask, draw(0, num_rows))
    draw_early: Any = (lambda *_: None) if runs_on(query.device) else draw  # a GPU draws again in backward
    result: torch.Tensor = _InBlocks.apply(attend, draw_early, block, query, key, value, attn_mask)
    return result


def fits_kernel(batch: Shape, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> bool:
    """Whether the flash kernel computes this. It has no gradient of a mask."""
    return (
        runs_on(query.device)
        and len(batch) <= 2
        and np.broadcast_shapes(batch, value.shape[:-2]) == batch
        and query.dtype == key.dtype == value.dtype
        and query.dtype in DTYPES
        and max(query.shape[-1], value.shape[-1]) <= MAX_WIDTH
        and not (mask is not None and mask.requires_grad)
    )


def _by_kernel(
    batch: Shape, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *settings: Any
) -> torch.Tensor:
    """The flash kernel takes a batch of two dims, and casts nothing."""
    (*first, strides), missing = settings, (None,) * (2 - len(batch))
    cast = cast_for_product((query, key, value), query.device.type)
    operands = [x.expand(*batch, *x.shape[-2:])[missing] for x in cast]
    mask = None if mask is None else mask.expand(*batch, query.shape[-2], key.shape[-2])[missing]
    out: torch.Tensor = attention_dropout(*operands, mask, *first, [0] * len(missing) + strides)[0]
    return out.view(*batch, *out.shape[-2:])


class _InBlocks(torch.autograd.Function):
    """``attend`` on ``block`` rows of the query and of the mask at a time."""

    @staticmethod
    def forward(ctx: Any, attend: Any, draw: Any, block: int, *operands: Any) -> torch.Tensor:
        ctx.attend, ctx.block, num_rows = attend, block, operands[0].shape[-2]
        kept = [draw(start, min(block, num_rows - start)) for start in range(0, num_rows, block)]
        ctx.save_for_backward(*operands, *kept)
        return torch.cat([attend(*rows) for rows in _blocks(block, *operands, *kept)], -2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Its own gradient exists where autograd asks for it."""
        again, needed = torch.is_grad_enabled(), ctx.needs_input_grad[3:]
        with local_torch(), torch.enable_grad():
            saved = [x if again or x is None else x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
            wanted = [x for x, is_needed in zip(saved, needed, strict=False) if is_needed]
            totals: list[torch.Tensor] = []
            for start, *rows in _blocks(ctx.block, *saved):
                part = grad[..., start : start + ctx.block, :]
                terms = torch.autograd.grad(ctx.attend(start, *rows), wanted, part, create_graph=again)
                totals = [total + term for total, term in zip(totals, terms, strict=True)] if totals else list(terms)
        found = iter(totals)
        return None, None, None, *(next(found) if is_needed else None for is_needed in needed)


def _blocks(block: int, query: Any, key: Any, value: Any, mask: Any, *kept: Any) -> Iterator[tuple[Any, ...]]:
    """The arguments of ``attend`` for each block."""
    has_rows = mask is not None and mask.shape[-2] > 1
    for start, keep in zip(range(0, query.shape[-2], block), kept, strict=True):
        rows = slice(start, start + block)
        yield start, query[..., rows, :], key, value, mask[..., rows, :] if has_rows else mask, keep


def _block_bytes(device: torch.device) -> int:
    """Scores of one block. Attention with fewer scores keeps them for backward: on a CPU, which has more memory and
    computes more slowly, most does.
    """
    return 64 << 20 if runs_on(device) else 1 << 30
