"""Attention with dropout by position: each score is kept or dropped by its logical place, on every shard alike.

The weights are the softmax of the scores; those that are kept are divided by the probability to be. Gradients follow
from the weights ``w``, the kept ones ``k = w * keep / (1 - p)`` and the gradient ``g`` of the result:

    value' = k^T g,    scores' = w * (keep / (1 - p) * g value^T - sum(g * result))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from workbench.kernels.launch import can_launch
from workbench.kernels.random_slice import fill_random

MAX_WIDTH = 128
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.library.custom_op("workbench::attention_dropout", mutates_args=())
def attention_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal_from: int | None,
    probability: float,
    seed: int,
    first: int,
    strides: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the log of the sum of exponentials of each row, for backward.

    Args:
        query: (batch, heads, rows, width); kernels take ``DTYPES`` and widths up to ``MAX_WIDTH``.
        key: (batch, heads, keys, width).
        value: (batch, heads, keys, its own width).
        mask: (batch, heads, rows, keys); True where a row sees a key, or addends. It gets no gradient. A row that sees
            no key has a result of zero.
        scale: of the products of queries and keys.
        causal_from: number of the first row; row n sees the keys up to n. None: rows see all keys.
        probability: of dropping a weight.
        seed: at most 63 bits, the same on all ranks.
        first: position of the first score in the logical scores.
        strides: row-major strides of the logical scores.

    Returns:
        (batch, heads, rows, width of the values), and 32 bits (batch, heads, rows).
    """
    settings = scale, causal_from, probability, seed, first, strides
    if can_launch(query):
        from workbench.kernels.attention_dropout_triton import forward

        return forward(query, key, value, mask, *settings)
    return attention_dropout_reference(query, key, value, mask, *settings)


@attention_dropout.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = query.shape[:-1]
    return query.new_empty(*rows, value.shape[-1]), query.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("workbench::attention_dropout_backward", mutates_args=())
def attention_dropout_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal_from: int | None,
    probability: float,
    seed: int,
    first: int,
    strides: Sequence[int],
) -> Tensors:
    """Gradients of query, key and value.

    Args:
        out, lse: of these rows over all keys, of which ``key`` and ``value`` may be some.
    """
    settings = scale, causal_from, probability, seed, first, strides
    if can_launch(query):
        from workbench.kernels.attention_dropout_triton import backward

        return backward(grad, query, key, value, mask, out, lse, *settings)
    return attention_dropout_backward_reference(grad, query, key, value, mask, *settings, of_all_keys=(out, lse))


@attention_dropout_backward.register_fake
def _(_: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any) -> Tensors:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))  # type: ignore[return-value]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, mask, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, mask, *output)


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    *operands, out, lse = ctx.saved_tensors
    if torch.is_grad_enabled():  # torch can differentiate the reference again
        grads = attention_dropout_backward_reference(grad, *operands, *ctx.settings)
    else:
        grads = attention_dropout_backward(grad, *operands, out, lse, *ctx.settings)
    return *grads, *[None] * 7


attention_dropout.register_autograd(_differentiate, setup_context=_save)


def attention_dropout_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attention_dropout`` in torch."""
    weights, kept, lse = _weights(query, key, mask, *settings)
    return weights.mul(kept) @ value, lse


def attention_dropout_backward_reference(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    *settings: Any,
    of_all_keys: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Tensors:
    """``attention_dropout_backward`` in torch. Without ``of_all_keys``, its ``out`` and ``lse``, these are all keys."""
    weights, kept, lse = _weights(query, key, mask, scale, *settings)
    of_weights = grad @ value.transpose(-2, -1) * kept
    product = (of_weights * weights).sum(-1, keepdim=True)
    if of_all_keys is not None:
        out, lse_of_all = of_all_keys
        share = (lse - lse_of_all).exp().to(weights.dtype).unsqueeze(-1)
        weights = (weights * share).masked_fill(weights == 0, 0.0)  # also of rows that see none of these keys
        product = (grad * out).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - product) * scale
    return of_scores @ key, of_scores.transpose(-2, -1) @ query, (weights * kept).transpose(-2, -1) @ grad


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal_from: int | None,
    probability: float,
    seed: int,
    first: int,
    strides: Sequence[int],
) -> Tensors:
    """The softmax, what dropout multiplies it by, and the log of the sum of exponentials."""
    scores = query @ key.transpose(-2, -1) * scale
    if causal_from is not None:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(causal_from)
        scores = scores.masked_fill(~visible, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    keep = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    fill_random(keep, "bernoulli", seed, first, strides, 1.0 - probability, 0.0)
    gain = 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)
    lse = scores.detach().float().logsumexp(-1)
    return torch._safe_softmax(scores, -1), keep.to(scores.dtype) * gain, lse.masked_fill(lse == -math.inf, 0.0)
