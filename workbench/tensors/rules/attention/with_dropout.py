"""Attention with dropout on shards, in blocks of query rows.

The flash kernels of torch draw their mask by the indices of the shard, so that a split batch or split heads would drop
other weights than one device. Here a weight's logical position decides. Scores of one block exist at a time, and
backward computes them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.core.layout import Region, Shape
from workbench.kernels.launch import runs_on
from workbench.kernels.random_slice import dropout_slice, fill_random
from workbench.tensors import random
from workbench.tensors.global_tensor import local_torch

_BLOCK_BYTES = 64 << 20
"""Scores of one block. Attention with fewer scores keeps them for backward."""


@dataclass(frozen=True, slots=True)
class Seed:
    """The key of a mask. All are equal: one plan serves them."""

    key: int = field(compare=False)


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
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    num_rows, num_keys = query.shape[-2], key.shape[-2]
    sizes = (*batch, num_rows, num_keys)
    shape, region = part or (sizes, tuple((0, size) for size in sizes))
    first, strides = random.place_of(shape, region)
    query = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)

    def attend(start: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
        scores = query @ key.transpose(-2, -1)
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(region[-2][0] + start)
        if mask is not None:
            is_added = mask.dtype != torch.bool
            scores = scores + mask if is_added else scores.masked_fill(mask.logical_not(), -math.inf)
        weights = scores.softmax(-1)
        return _dropped(weights, dropout_p, seed.key, first + start * strides[-2], strides) @ value

    block = max(1, _BLOCK_BYTES // max(1, math.prod(batch) * num_keys * query.element_size()))
    if block >= num_rows:
        return attend(0, query, key, value, attn_mask)
    result: torch.Tensor = _InBlocks.apply(attend, block, query, key, value, attn_mask)
    return result


class _InBlocks(torch.autograd.Function):
    """``attend`` on ``block`` rows of the query and of the mask at a time."""

    @staticmethod
    def forward(ctx: Any, attend: Any, block: int, *operands: Any) -> torch.Tensor:
        ctx.attend, ctx.block = attend, block
        ctx.save_for_backward(*operands)
        return torch.cat([attend(*rows) for rows in _blocks(block, *operands)], -2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Its own gradient exists where autograd asks for it."""
        again = torch.is_grad_enabled()
        with local_torch(), torch.enable_grad():
            operands = [
                x if again or x is None else x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors
            ]
            wanted = [x for x, is_needed in zip(operands, ctx.needs_input_grad[2:], strict=True) if is_needed]
            totals: list[torch.Tensor] = []
            for start, *rows in _blocks(ctx.block, *operands):
                part = grad[..., start : start + ctx.block, :]
                terms = torch.autograd.grad(ctx.attend(start, *rows), wanted, part, create_graph=again)
                totals = [total + term for total, term in zip(totals, terms, strict=True)] if totals else list(terms)
        found = iter(totals)
        return None, None, *(next(found) if is_needed else None for is_needed in ctx.needs_input_grad[2:])


def _blocks(block: int, query: Any, key: Any, value: Any, mask: Any) -> Iterator[tuple[Any, ...]]:
    has_rows = mask is not None and mask.shape[-2] > 1
    for start in range(0, query.shape[-2], block):
        rows = slice(start, start + block)
        yield start, query[..., rows, :], key, value, mask[..., rows, :] if has_rows else mask


def _dropped(weights: torch.Tensor, p: float, key: int, first: int, strides: list[int]) -> torch.Tensor:
    if runs_on(weights.device):
        dropped: torch.Tensor = dropout_slice(weights, key, first, strides, p)
        return dropped
    keep = torch.empty(weights.shape, dtype=torch.bool, device=weights.device)  # a CPU draws slowly: once
    fill_random(keep, "bernoulli", key, first, strides, 1.0 - p, 0.0)
    return weights * keep * (0.0 if p == 1.0 else 1.0 / (1.0 - p))
