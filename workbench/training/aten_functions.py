"""Functions below autograd: their usual names, and the work of matrix products among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from workbench.core.model_costs import AttentionSize

NAMES = {
    "mm": "linear", "addmm": "linear", "bmm": "matmul", "baddbmm": "matmul", "native_layer_norm": "layer_norm",
    "_fused_rms_norm": "rms_norm", "native_group_norm": "group_norm", "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm", "_softmax": "softmax", "_safe_softmax": "softmax",
    "_log_softmax": "cross_entropy", "nll_loss_forward": "cross_entropy", "nll_loss2d_forward": "cross_entropy",
    "native_dropout": "dropout", "_grouped_mm": "matmul",
    "bernoulli": "dropout", "max_pool2d_with_indices": "max_pool2d", "_to_copy": "to",
}  # fmt: skip
"""aten's name -> the usual name. Other names only lose their underscores."""
ATTENTION = "scaled_dot_product_attention"
TO_COPY = torch.ops.aten._to_copy.default
BY_EXPERT = torch.ops.aten._grouped_mm


def name_of(func: Any, inputs: Mapping[int, torch.Tensor]) -> str:
    """The name of a function that reads these tensors."""
    base = func._schema.name.rpartition("::")[2]
    if "scaled_dot_product" in base:
        return ATTENTION
    if base == "convolution":
        return f"conv{max(tensor.ndim for tensor in inputs.values()) - 2}d"
    return NAMES.get(base) or NAMES.get(base.strip("_")) or base.strip("_")


def matmul_work(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[float, int]:
    """Floating point operations of a matrix product, and the size that it sums over; zeros for other functions."""
    packet = func._overloadpacket
    base = func._schema.name.rpartition("::")[2]
    if "scaled_dot_product" in base:
        # torch's formula has as many heads of keys as of queries in 2.11, and none for CPUs
        query, key, value = args[:3]
        width, queries = query.shape[-1], query.numel() // query.shape[-1]
        return 2.0 * queries * key.shape[-2] * (width + value.shape[-1]), width
    if packet is BY_EXPERT and args[0].ndim == 2:  # rows of all experts, one matrix each
        return 2.0 * args[0].numel() * args[1].shape[-1], args[0].shape[-1]
    if packet not in flop_registry:
        return _OTHERS[base](*args) if base in _OTHERS else (0.0, 0)
    flops = float(flop_registry[packet](*args, **kwargs, out_val=out))
    if base in ("addmm", "baddbmm"):
        return flops, args[1].shape[-1]
    if base == "convolution":
        return flops, args[1].numel() // args[1].shape[0]
    return flops, args[0].shape[-1]


def _of_bilinear(
    first: torch.Tensor, second: torch.Tensor, third: torch.Tensor, *at: Sequence[int]
) -> tuple[float, int]:
    """Of ``_trilinear``: products of three tensors, which get dims of 1 ``at`` these places, summed over some dims."""
    shapes = []
    for tensor, places in zip((first, second, third), at, strict=False):
        shape = list(tensor.shape)
        for place in places:
            shape.insert(place, 1)
        shapes.append(shape)
    return 2.0 * math.prod(torch.broadcast_shapes(*shapes)), first.shape[-1]


def _of_rows(rows: torch.Tensor, other: torch.Tensor, *_: Any) -> tuple[float, int]:
    """A sum over the last dim for each row, or pair of a row and one of the other tensor's."""
    return 2.0 * rows.numel() * (other.shape[-2] if other.ndim > 1 else 1), rows.shape[-1]


_OTHERS: dict[str, Callable[..., tuple[float, int]]] = {
    "mv": _of_rows, "dot": _of_rows, "_euclidean_dist": _of_rows, "_cdist_forward": _of_rows,
    "_trilinear": _of_bilinear,
}  # fmt: skip
"""The work of products that torch's counter leaves out."""


def attention_size(func: Any, args: Any, kwargs: Any) -> AttentionSize | None:
    """The sizes of attention; None for operands of other than four dims."""
    query, key, value = (tuple(x.shape) for x in args[:3])
    if {len(query), len(key), len(value)} != {4}:
        return None
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask = given.get("attn_mask")
    has_mask = mask is not None and mask.ndim > 1 and mask.shape[-2] > 1 and (mask.ndim < 3 or mask.shape[-3] == 1)
    is_causal = bool(given.get("is_causal", False))
    return AttentionSize(query[1], key[1], query[2], key[2], (query[3], value[3]), is_causal, has_mask)
