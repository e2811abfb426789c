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
        (batch, heads, rows, width of the values), and 32 bits (for float64: 64) (batch, heads, rows).
    """
    settings = scale, causal_from, probability, seed, first, strides
    if can_launch(query):
        from workbench.kernels.attention_dropout_triton import forward

        return forward(query, key, value, mask, *settings)
    return attention_dropout_reference(query, key, value, mask, *settings)


@attention_dropout.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = query.shape[:-1]
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*rows, value.shape[-1]), query.new_empty(rows, dtype=wide)


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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float,
    causal_from: int | None, probability: float, *place: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``attention_dropout`` in torch."""
    scores = with_mask(query @ key.transpose(-2, -1) * scale, mask, causal_from)
    keep = kept_of(scores.shape, scores.device, probability, *place)
    weights, lse = torch._safe_softmax(scores, -1).to(value.dtype), log_sums(scores.detach())
    return drop(weights, keep, probability) @ value, lse.masked_fill(lse == -math.inf, 0.0)


def attention_dropout_backward_reference(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    scale: float, causal_from: int | None, probability: float, *place: Any,
    of_all_keys: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Tensors:  # fmt: skip
    """``attention_dropout_backward`` in torch. Without ``of_all_keys``, its ``out`` and ``lse``, these are all keys."""
    scores = with_mask(query @ key.transpose(-2, -1) * scale, mask, causal_from)
    keep = kept_of(scores.shape, scores.device, probability, *place)
    if of_all_keys is None:
        weights = torch._safe_softmax(scores, -1).to(value.dtype)
        return backward_of(
            grad, query, key, value, weights, keep, probability, scale, drop(weights, keep, probability) @ value
        )
    out, lse = of_all_keys
    return backward_of(grad, query, key, value, weights_of(scores, lse, key.dtype), keep, probability, scale, out)


# ---- the formula, which attention in blocks computes too ------------------------------------------------------------


def with_mask(scores: torch.Tensor, mask: torch.Tensor | None, causal_from: int | None) -> torch.Tensor:
    """Scores with the addends of a mask; minus infinity where a row does not see a key."""
    if causal_from is not None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(causal_from)
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def kept_of(
    shape: Sequence[int], device: torch.device, probability: float, seed: int, first: int, strides: Sequence[int]
) -> torch.Tensor:
    """Which scores dropout keeps."""
    keep = torch.empty(shape, dtype=torch.bool, device=device)
    fill_random(keep, "bernoulli", seed, first, strides, 1.0 - probability, 0.0)
    return keep


def drop(weights: torch.Tensor, keep: torch.Tensor | None, probability: float) -> torch.Tensor:
    """Weights, or their gradient, behind dropout. Without ``keep``, all stay."""
    if keep is None:
        return weights
    return weights * keep * (0.0 if probability == 1.0 else 1.0 / (1.0 - probability))


def log_sums(scores: torch.Tensor) -> torch.Tensor:
    """The log of the sum of exponentials of each row, in at least 32 bits."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32)).logsumexp(-1)


def weights_of(scores: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights of some keys; ``lse`` is of all keys, and finite."""
    return (scores.to(lse.dtype) - lse.unsqueeze(-1)).exp_().to(dtype)


def backward_of(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, weights: torch.Tensor,
    keep: torch.Tensor | None, probability: float, scale: float, out: torch.Tensor,
) -> Tensors:  # fmt: skip
    """Gradients of query, key and value; ``out`` is of all keys."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    of_weights = drop(grad @ value.transpose(-2, -1), keep, probability)
    product = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True).to(weights.dtype)
    of_scores = weights * (of_weights - product) * scale
    of_value = drop(weights, keep, probability).transpose(-2, -1) @ grad
    return of_scores @ key, of_scores.transpose(-2, -1) @ query, of_value
