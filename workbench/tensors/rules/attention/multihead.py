"""Multi-head attention as in torch, but with batch and heads as separate dims.

torch's version merges steps and batch into one dim before the output projection, and batch and heads into one before
the product. A slice of the batch is not a slice of the merged dims, so each layer would box its input.

The weights of queries, keys and values are one tensor. Of a slice of it, a rank makes queries, keys and values of the
same heads: rows of the weight move between the ranks, or features of the results, whichever are fewer.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional

from workbench.core.sbp import Split
from workbench.core.weight_splits import moves_weights
from workbench.tensors.dispatch.registry import composite
from workbench.tensors.global_tensor import GlobalTensor

F: Any = torch.nn.functional
"""Its helpers for masks and projections are not declared."""
_ROWS = (Split(0), Split(1))


@composite("multi_head_attention_forward")
def multi_head_attention_forward(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """Shapes: query (T, B, E), key and value (S, B, E), inside (B, H, T, D)."""
    is_batched = F._mha_shape_check(query, key, value, key_padding_mask, attn_mask, num_heads)
    if not is_batched:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    num_steps, batch, width = query.shape
    _check_sizes(width, embed_dim_to_check, num_heads, is_causal, attn_mask)
    if use_separate_proj_weight:
        q, k, v = _project(query, key, value, (q_proj_weight, k_proj_weight, v_proj_weight), in_proj_bias)
    elif not _splits_rows(in_proj_weight):
        q, k, v = F._in_projection_packed(query, key, value, in_proj_weight, in_proj_bias)
    elif query is key and key is value and not moves_weights(_rows_here(query), width):
        q, k, v = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    else:
        q, k, v = _project(query, key, value, in_proj_weight.chunk(3), in_proj_bias)
    num_added = 0
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, bias_k.expand(1, batch, width)])
        v = torch.cat([v, bias_v.expand(1, batch, width)])
        num_added = 1
    q, k, v = (x.view(x.shape[0], batch, num_heads, -1).permute(1, 2, 0, 3) for x in (q, k, v))
    k = k if static_k is None else static_k.view(batch, num_heads, *static_k.shape[1:])
    v = v if static_v is None else static_v.view(batch, num_heads, *static_v.shape[1:])
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        num_added += 1
    if is_causal and key_padding_mask is None and not need_weights:
        mask = None
    else:
        mask = _mask(attn_mask, key_padding_mask, (batch, num_heads, num_steps), q.dtype, num_added)
        is_causal = is_causal and key_padding_mask is None and mask is None
    dropout_p = dropout_p if training else 0.0
    shares = None
    if need_weights:
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
        shares = (scores if mask is None else scores + mask.to(scores.dtype)).softmax(-1)
        shares = F.dropout(shares, dropout_p) if dropout_p > 0.0 else shares
        out = shares @ v
        shares = shares.mean(dim=1) if average_attn_weights else shares
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
    out = F.linear(out.permute(2, 0, 1, 3).reshape(num_steps, batch, width), out_proj_weight, out_proj_bias)
    if not is_batched:
        return out.squeeze(1), None if shares is None else shares.squeeze(0)
    return out, shares


def _project(query: Any, key: Any, value: Any, weights: Any, bias: Any) -> list[Any]:
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]


def _splits_rows(weight: Any) -> bool:
    return isinstance(weight, GlobalTensor) and Split(0) in weight._spec.layout.sbp


def _rows_here(query: Any) -> int:
    """Steps of samples on a rank, by the sizes of the axes that split them: all ranks find the same."""
    num_rows = math.prod(query.shape[:2])
    if isinstance(query, GlobalTensor):
        layout = query._spec.layout
        parts = (size for size, entry in zip(layout.placement.shape, layout.sbp, strict=True) if entry in _ROWS)
        num_rows //= math.prod(parts)
    return num_rows


def _check_sizes(width: int, expected: int, num_heads: int, is_causal: bool, attn_mask: Any) -> None:
    if width != expected:
        raise AssertionError(f"was expecting embedding dimension of {expected}, but got {width}")
    if width % num_heads:
        raise AssertionError(f"embed_dim {width} not divisible by num_heads {num_heads}")
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")


def _mask(
    attn_mask: Any, key_padding_mask: Any, sizes: tuple[int, int, int], dtype: torch.dtype, num_added: int
) -> Any:
    """Both masks as one addend that broadcasts to (B, H, T, S); None without any. Added keys are never masked."""
    batch, num_heads, num_steps = sizes
    padding = F._canonical_mask(
        key_padding_mask, "key_padding_mask", F._none_or_dtype(attn_mask), "attn_mask", target_type=dtype
    )
    mask = F._canonical_mask(attn_mask, "attn_mask", None, "", target_type=dtype, check_other=False)
    if mask is not None and mask.dim() == 3:
        if mask.shape[:2] != (batch * num_heads, num_steps):
            raise RuntimeError(
                f"The shape of the 3D attn_mask is {tuple(mask.shape)}, but should start with "
                f"{(batch * num_heads, num_steps)}."
            )
        mask = mask.view(batch, num_heads, num_steps, -1)
    if padding is not None:
        padding = padding.view(batch, 1, 1, -1)
        mask = padding if mask is None else mask + padding
    return mask if mask is None or not num_added else F.pad(mask, (0, num_added))
