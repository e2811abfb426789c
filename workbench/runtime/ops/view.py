"""Views and rearrangements: reshape on split dims, permutations, slices, joins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from workbench.core.layout import Shape, balanced_bounds
from workbench.core.rules import Signature
from workbench.core.sbp import Split, broadcast, partial_sum
from workbench.runtime.ops.equation_text import normalize_dims, term
from workbench.runtime.ops.registry import Call, LocalFunction, Resolution, rule
from workbench.runtime.tensor import GlobalTensor, Spec

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


@rule("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel", "view_as", "reshape_as")
def _reshape(call: Call) -> Resolution | None:
    """A split survives where it cuts between whole rows of the new shape; anything else has to be boxed first."""
    if any(isinstance(arg, torch.dtype) for arg in call.args):
        return None
    source, target = call.shapes[0], call.outputs[0][0]
    placement = call.operands[0]._spec.layout.placement
    parts = [placement.num_ranks] if placement.num_axes > 1 else [placement.shape[0]]
    pairs = _surviving_splits(source, target, parts[0], exact=placement.num_axes > 1)
    extra = (broadcast,) * (len(call.operands) - 1)
    found = [Signature((Split(a), *extra), (Split(b),), chr(97 + a)) for a, b in pairs]
    found += [Signature((partial_sum, *extra), (partial_sum,)), Signature((broadcast, *extra), (broadcast,))]
    return Resolution(found, _local_sizes)


def _local_sizes(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction:
    """The same view with this rank's sizes; -1 is resolved logically, because of an empty shard it says nothing."""
    sizes = outputs[0].local_shape
    if call.name in ("reshape", "reshape_as", "flatten", "ravel"):
        return lambda x, *_, **__: x.reshape(sizes)
    return lambda x, *_, **__: x.view(sizes)


def _surviving_splits(source: Shape, target: Shape, parts: int, exact: bool) -> list[tuple[int, int]]:
    """Pairs (dim of source, dim of target) whose balanced slices hold the same elements.

    Both shapes are cut into groups of equal size; in a group only the leading dims can correspond, and only if the
    boundaries of their slices are the same elements.
    """
    if math.prod(source) == 0:
        return [(d, d) for d in range(min(len(source), len(target))) if source == target]
    pairs, i, j = [], 0, 0
    while i < len(source) and j < len(target):
        if source[i] == 1 or target[j] == 1:
            i, j = i + (source[i] == 1), j + (source[i] != 1)
            continue
        a, b, i_end, j_end = source[i], target[j], i + 1, j + 1
        while a != b:
            if a < b:
                a, i_end = a * source[i_end], i_end + 1
            else:
                b, j_end = b * target[j_end], j_end + 1
        if _same_boundaries(source[i], target[j], a, parts, exact):
            pairs.append((i, j))
        i, j = i_end, j_end
    return pairs


def _same_boundaries(size: int, other: int, group: int, parts: int, exact: bool) -> bool:
    if exact:
        return size == other or (size % parts == 0 and other % parts == 0)
    starts = [[start * (group // n) for start, _ in balanced_bounds(n, parts)] for n in (size, other)]
    return starts[0] == starts[1]


@rule("permute", "transpose", "t", "get:T", "get:mT", "movedim", "adjoint", "get:H")
def _permute(call: Call) -> Resolution:
    """The permutation is read off a meta tensor with prime sizes."""
    ndim = len(call.shapes[0])
    probe = torch.empty(_PRIMES[:ndim], device="meta")
    moved = call.func(probe, *call.args[1:], **call.kwargs).shape
    order = "".join(chr(97 + _PRIMES.index(size)) for size in moved)
    return Resolution(f"+{term(ndim)} -> {order}")


@rule("expand", "expand_as", "broadcast_to")
def _expand(call: Call) -> Resolution:
    source, target = call.shapes[0], call.outputs[0][0]
    offset = len(target) - len(source)
    kept = [offset + d for d in range(len(source)) if source[d] == target[offset + d]]
    right = "".join(chr(97 + d) if d in kept else "1" for d in range(len(target)))
    left = "".join(chr(97 + offset + d) if offset + d in kept else "1" for d in range(len(source)))
    others = ", ..." * (len(call.operands) - 1)

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction:
        sizes = outputs[0].local_shape
        return lambda x, *_, **__: x.expand(sizes)

    return Resolution(f"+{left}{others} -> {right}" if not others else f"{left}{others} -> {right}", localize)


@rule("chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split", "split_with_sizes")
def _chunk(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    whole = [call.arg(2, "dim", 0) % ndim]
    return Resolution(f"+{term(ndim, whole)} -> {term(ndim, whole)}")


@rule("narrow", "index_select", parameters="input dim index")
def _narrow(call: Call) -> Resolution | None:
    ndim = len(call.shapes[0])
    whole = [call.arg(1, "dim") % ndim]
    if call.name == "index_select":
        return Resolution(f"{term(ndim, whole)}, Z -> {term(ndim, whole)}")
    return Resolution(f"+{term(ndim, whole)} -> {term(ndim, whole)}")


@rule("select", "unbind")
def _select(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    dim = call.arg(1, "dim", 0) % ndim
    return Resolution(f"+{term(ndim, [dim])} -> {term(ndim, dropped=[dim])}")


@rule("cat", "stack")
def _join(call: Call) -> Resolution:
    """All operands alike; the dim along which they are joined stays whole."""
    ndim = max(len(shape) for shape in call.shapes)
    dim = call.arg(1, "dim", 0)
    if call.name == "stack":
        at = dim % (ndim + 1)
        inner = term(ndim)
        return Resolution(", ".join(["+" + inner] * len(call.operands)) + f" -> {inner[:at]}1{inner[at:]}")
    text = term(ndim, [dim % ndim])
    # torch.cat takes an empty tensor of one dim beside any others, and caches of transformers begin with one.
    terms = ["+" + text if len(shape) == ndim else "Z" for shape in call.shapes]
    return Resolution(", ".join(terms) + f" -> {text}")


@rule("getitem")
def _getitem(call: Call) -> Resolution | None:
    """Numbers, slices, None and ``...``: dims that are taken whole keep their split."""
    items = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if any(isinstance(item, (torch.Tensor, GlobalTensor, list, bool)) or hasattr(item, "__array__") for item in items):
        return None
    ndim = len(call.shapes[0])
    num_indexed = sum(item is not None and item is not Ellipsis for item in items)
    left, right = "", ""
    dim = 0
    for item in (*items, Ellipsis)[: len(items) + (Ellipsis not in items)]:
        if item is Ellipsis:
            rest = term(ndim)[dim : dim + ndim - num_indexed]
            left, right, dim = left + rest, right + rest, dim + ndim - num_indexed
        elif item is None:
            right += "1"
        else:
            letter = chr(97 + dim)
            kept = isinstance(item, slice) and item == slice(None)
            left += letter if kept else letter.upper()
            right += letter if kept else "" if not isinstance(item, slice) else letter.upper()
            dim += 1
    return Resolution(f"+{left} -> {right}")


@rule("repeat")
def _repeat(call: Call) -> Resolution | None:
    sizes: Sequence[Any] = call.args[1] if isinstance(call.args[1], (tuple, list)) else call.args[1:]
    ndim = len(call.shapes[0])
    offset = len(sizes) - ndim
    whole = [d for d in range(ndim) if sizes[offset + d] != 1]
    return Resolution(f"+{term(ndim, whole)} -> {'1' * offset}{term(ndim, whole)}")


@rule("tril", "triu")
def _triangle(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    whole = normalize_dims([-2, -1], ndim)
    return Resolution(f"+{term(ndim, whole)} -> {term(ndim, whole)}")


@rule("pad", parameters="input pad mode value")
def _pad(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    whole = list(range(ndim - len(call.arg(1, "pad")) // 2, ndim))
    return Resolution(f"{term(ndim, whole)} -> {term(ndim, whole)}")
