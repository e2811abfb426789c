"""Scaled dot-product attention: batch, heads, query rows and the width of values may be split.

Keys may be split along the sequence, too, as queries are: in a ring they pass the ranks. Where fewer bytes move so,
queries, keys and values are boxed from slices of the sequence to slices of the heads instead.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from workbench.core.rules import Signature, signatures
from workbench.core.sbp import NdSbp, Sbp, Split, broadcast
from workbench.tensors import random
from workbench.tensors.conversion import from_local_once
from workbench.tensors.dispatch.dispatcher import call_by_plan
from workbench.tensors.dispatch.registry import Call, LocalFunction, Resolution, composite, rule
from workbench.tensors.global_tensor import GlobalTensor, Spec
from workbench.tensors.rules.attention import with_dropout
from workbench.tensors.rules.attention.ring import SEQUENCE, Ring
from workbench.tensors.rules.reduction.empty_shards import zeros

RING = "ring"
"""The letter of keys that are split."""


@rule("scaled_dot_product_attention")
def _attention(call: Call) -> Resolution | None:
    """The width of queries stays whole: the scores need all of it. Keys stay whole but in a ring."""
    if min(map(len, call.shapes)) < 2:
        return None
    mask, grouped = ", ...lS" if len(call.operands) == 4 else "", _is_grouped(call)
    text = f"...lE, ...SE, ...Sv{mask} -> ...lv"
    if grouped:  # The dims before the heads are the batch. Heads of queries split only together with heads of keys.
        mask = mask and (", lS" if len(call.shapes[3]) == 2 else ", ...HlS")
        text = f"...HlE, ...GSE, ...GSv{mask} -> ...Hlv"
    found = signatures(text, call.shapes, [len(call.outputs[0][0])])
    return Resolution(
        [*_in_a_ring(call), *(_over_heads(call) if grouped else ()), *found], _localize, accepts=partial(_accepts, call)
    )


def _in_a_ring(call: Call) -> list[Signature]:
    """Queries, keys and values split along the sequence. Forward moves half of the keys if queries see the earlier
    ones only.
    """
    (query, key, value), has_mask = call.shapes[:3], len(call.operands) == 4
    if {len(query), len(key), len(value)} != {4} or not query[0] == key[0] == value[0] or key[1] != value[1]:
        return []
    if _learns_mask(call) or query[1] % key[1]:
        return []
    entries: list[Sbp] = [Split(SEQUENCE)] * 3
    if has_mask:
        mask = call.shapes[3]
        has_rows = len(mask) > 1 and mask[-2] == query[SEQUENCE] > 1
        entries.append(Split(len(mask) - 2) if has_rows else broadcast)
    exchanged = (entries[0], broadcast, broadcast, *entries[3:])
    sees_earlier = call.arg(5, "is_causal", False) and query[SEQUENCE] == key[SEQUENCE]
    return [Signature(tuple(entries), (Split(SEQUENCE),), RING, exchanged, 0.5 if sees_earlier else 1.0)]


def _learns_mask(call: Call) -> bool:
    """Whether the mask has a gradient. The composite says so, as a plan also serves calls with other masks."""
    seeds = [arg for arg in call.args if isinstance(arg, with_dropout.Seed)]
    return call.func is scaled_dot_product_attention or any(seed.learns_mask for seed in seeds)


def _accepts(call: Call, inputs: tuple[NdSbp, ...], _: tuple[NdSbp, ...]) -> bool:
    """Whether heads or samples suffice: axes that split heads of keys get whole groups, and an axis that leaves the
    sequence for another dim gets as many of it as the others, and its part of a mask that has a row for each query.
    """
    query, key, layout = call.shapes[0], call.shapes[1], call.operands[0]._spec.layout

    def parts(entry: Sbp) -> int:
        sizes = zip(inputs[0], layout.placement.shape, strict=True)
        return math.prod(size for other, size in sizes if other == entry)

    if _is_grouped(call) and key[-3] != 1 and key[-3] % parts(Split(len(query) - 3)):
        return False
    sequence = Split(len(query) - 2)
    left = [entry for before, entry in zip(layout.sbp, inputs[0], strict=True) if before == sequence != entry]
    mask = call.shapes[3] if len(call.operands) == 4 else ()
    mask = (1,) * (len(query) - len(mask)) + mask
    return all(
        query[entry.dim] % parts(entry) == 0 and (mask[-2] == 1 or mask[entry.dim] == query[entry.dim])
        for entry in left
        if isinstance(entry, Split)
    )


def _is_grouped(call: Call) -> bool:
    return bool(call.kwargs.get("enable_gqa", False)) and len({shape[-3] for shape in call.shapes[:3]}) > 1


def _over_heads(call: Call) -> list[Signature]:
    """Query heads split together with their key heads: slices must hold whole groups."""
    query, key = call.shapes[0], call.shapes[1]
    if key[-3] != call.shapes[2][-3]:
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
    if RING in letters:
        return Ring(inputs[0], inputs[1], inputs[2], outputs[0])
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


def scaled_dot_product_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """torch's function for a mask that has a gradient. As a function of its own, it has plans of its own."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


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
    """Attention with dropout of our own: the dropped weights depend on their logical position only. A mask that has a
    gradient goes to plans of its own.
    """
    if type(attn_mask) is torch.Tensor and type(query) is GlobalTensor:
        attn_mask = from_local_once(attn_mask, query._spec.world, query._spec.layout)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    learns_mask = attn_mask is not None and attn_mask.requires_grad
    if dropout_p == 0.0:
        if not learns_mask:
            return NotImplemented
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return call_by_plan(scaled_dot_product_attention, (query, key, value, attn_mask, 0.0, is_causal), options)
    if is_causal and attn_mask is not None:
        raise RuntimeError("scaled_dot_product_attention: set either attn_mask or is_causal=True, not both")
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    spec = next(x for x in (query, key, value, attn_mask) if isinstance(x, GlobalTensor))._spec
    seed = with_dropout.Seed(random.draw_key(spec.world, is_used=not spec.is_placeholder), learns_mask)
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, seed)
    return call_by_plan(with_dropout.scaled_dot_product_attention, arguments)
