"""Scaled dot-product attention: batch, heads, query rows and the width of values may be split."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from workbench.core.rules import Signature, signatures
from workbench.core.sbp import Split, broadcast
from workbench.tensors import random
from workbench.tensors.dispatch.dispatcher import call_by_plan
from workbench.tensors.dispatch.registry import Call, LocalFunction, Resolution, composite, rule
from workbench.tensors.global_tensor import GlobalTensor, Spec
from workbench.tensors.rules.attention import with_dropout
from workbench.tensors.rules.reduction.empty_shards import zeros


@rule("scaled_dot_product_attention")
def _attention(call: Call) -> Resolution | None:
    """Keys and the width of queries stay whole: the softmax and the scores need all of them."""
    if min(map(len, call.shapes)) < 2:
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
    """A slice of the query rows needs its rows of the causal mask, and of the scores its dropped ones."""
    if any(0 in spec.local_shape for spec in inputs):
        return zeros(call, outputs)
    spec = outputs[0]
    if spec.is_placeholder:
        return None
    region, num_keys = spec.layout.region(spec.shape, spec.world.rank), call.shapes[1][-2]
    if call.func is with_dropout.scaled_dot_product_attention:
        part = (*spec.shape[:-1], num_keys), (*region[:-1], (0, num_keys))
        return partial(with_dropout.scaled_dot_product_attention, part=part)
    if "l" not in letters or not call.arg(5, "is_causal", False):
        return None
    return partial(_attend_rows, *region[-2])


def _attend_rows(start: int, stop: int, query: Any, key: Any, value: Any, *_: Any, **options: Any) -> Any:
    """Causal attention of the query rows from ``start`` to ``stop``. These see no key from ``stop`` on; without those,
    the last row sees all keys, which is a mask that flash attention has.
    """
    scale, grouped = options.get("scale"), options.get("enable_gqa", False)
    key, value = key[..., :stop, :], value[..., :stop, :]
    if key.shape[-2] == stop and has_aligned_flash(query.device):
        from torch.nn.attention.bias import CausalBias, causal_lower_right  # loads torch's compiler

        # torch gets there by ``__torch_function__``, which is off among shards.
        return CausalBias._dispatch(
            query, key, value, causal_lower_right(stop - start, stop), scale=scale, enable_gqa=grouped
        )
    is_square = start == 0 and key.shape[-2] == stop
    mask = None if is_square else query.new_ones(stop - start, key.shape[-2], dtype=torch.bool).tril(start)
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_square, scale=scale, enable_gqa=grouped)


def has_aligned_flash(device: torch.device) -> bool:
    """Whether torch has flash attention here whose causal mask ends in the lower right corner."""
    return device.type == "cuda"


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
    """Attention with dropout of our own: the dropped weights depend on their logical position only."""
    if dropout_p == 0.0:
        return NotImplemented
    if is_causal and attn_mask is not None:
        raise RuntimeError("scaled_dot_product_attention: set either attn_mask or is_causal=True, not both")
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    spec = next(x for x in (query, key, value, attn_mask) if isinstance(x, GlobalTensor))._spec
    seed = with_dropout.Seed(random.draw_key(spec.world, is_used=not spec.is_placeholder))
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, seed)
    return call_by_plan(with_dropout.scaled_dot_product_attention, arguments)
