"""Scaled dot-product attention: batch, heads, query rows and the width of values may be split."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from workbench.core.rules import Signature, signatures
from workbench.core.sbp import Split, broadcast
from workbench.tensors.dispatch.registry import Call, LocalFunction, Resolution, composite, rule
from workbench.tensors.global_tensor import Spec
from workbench.tensors.rules.reduction.empty_shards import zeros


@rule("scaled_dot_product_attention")
def _attention(call: Call) -> Resolution | None:
    """Keys and the width of queries stay whole: the softmax and the scores need all of them."""
    if call.arg(4, "dropout_p", 0.0) > 0 or min(map(len, call.shapes)) < 2:
        return None
    mask = ", ...lS" if len(call.operands) == 4 else ""
    if not _is_grouped(call):
        return Resolution(f"...lE, ...SE, ...Sv{mask} -> ...lv", _localize)
    # The dims before the heads are the batch. Heads of queries split only together with heads of keys.
    text = f"...HlE, ...GSE, ...GSv{mask.replace('...', '...H')} -> ...Hlv"
    found = signatures(text, call.shapes, [len(call.outputs[0][0])])
    return Resolution([*_over_heads(call), *found], _localize)


def _is_grouped(call: Call) -> bool:
    return bool(call.kwargs.get("enable_gqa", False)) and len({shape[-3] for shape in call.shapes[:3]}) > 1


def _over_heads(call: Call) -> list[Signature]:
    """Query heads split together with their key heads: slices must hold whole groups."""
    query, key = call.shapes[0], call.shapes[1]
    placement = call.operands[0]._spec.layout.placement
    if key[-3] != call.shapes[2][-3] or (key[-3] % placement.num_ranks and key[-3] != 1):
        return []
    keys = broadcast if key[-3] == 1 else Split(len(key) - 3)
    entries = [Split(len(query) - 3), keys, keys if key[-3] == 1 else Split(len(call.shapes[2]) - 3)]
    if len(call.operands) == 4:
        mask = call.shapes[3]
        has_heads = len(mask) >= 3 and mask[-3] == query[-3]
        entries.append(Split(len(mask) - 3) if has_heads else broadcast)
    return [Signature(tuple(entries), (Split(len(call.outputs[0][0]) - 3),), "h")]


def _localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction | None:
    """A slice of the query rows needs its rows of the causal mask."""
    if any(0 in spec.local_shape for spec in inputs):
        return zeros(call, outputs)
    if "l" not in letters or not call.arg(5, "is_causal", False) or outputs[0].is_placeholder:
        return None
    spec = inputs[0]
    start, stop = spec.layout.region(spec.shape, spec.world.rank)[-2]
    num_keys = call.shapes[1][-2]

    def attend(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        mask = torch.ones(stop - start, num_keys, dtype=torch.bool, device=query.device).tril(start)
        scale, grouped = options.get("scale"), options.get("enable_gqa", False)
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)

    return attend


@composite("scaled_dot_product_attention")
def attention_with_dropout(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attention with explicit dropout: the dropped weights depend on their logical position only."""
    if dropout_p == 0.0:
        return NotImplemented
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        if attn_mask is not None:
            raise RuntimeError("scaled_dot_product_attention: set either attn_mask or is_causal=True, not both")
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p) @ value
