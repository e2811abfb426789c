"""Views that keep every element: reshapes on split dims, permutations, expansions, complex pairs."""

from __future__ import annotations

import math
from typing import Any

import torch

from workbench.core.layout import Layout, Region, Shape
from workbench.core.rules import Signature
from workbench.core.sbp import NdSbp, Split, broadcast, partial_sum
from workbench.tensors.dispatch.registry import Call, LocalFunction, Resolution, composite, normalize_dims, rule, term
from workbench.tensors.global_tensor import Spec

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)


@rule("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel")
def _reshape(call: Call) -> Resolution | None:
    """A split survives if its shards hold the same elements before and after. Any other split is boxed first."""
    if any(isinstance(arg, torch.dtype) for arg in (*call.args, *call.kwargs.values())):
        return _reinterpret(call)
    source, target = call.shapes[0], call.outputs[0][0]
    placement = call.operands[0]._spec.layout.placement
    grouped = groups(source, target)

    def accepts(inputs: tuple[NdSbp, ...], outputs: tuple[NdSbp, ...]) -> bool:
        if inputs[0] == outputs[0] and not any(isinstance(entry, Split) for entry in inputs[0]):
            return True
        before, after = Layout(placement, inputs[0]), Layout(placement, outputs[0])
        return all(
            same_elements(before.region(source, rank), after.region(target, rank), source, target, grouped)
            for rank in placement
        )

    pairs = [(i, j) for dims, others in grouped for i in dims for j in others]
    pairs += [(i, j) for i, size in enumerate(source) for j, other in enumerate(target) if size == other == 1]
    if placement.num_axes == 1:
        pairs = [(i, j) for i, j in pairs if accepts(((Split(i),),), ((Split(j),),))]
    found = [Signature((Split(i),), (Split(j),), chr(97 + i)) for i, j in dict.fromkeys(pairs)]
    found += [Signature((partial_sum,), (partial_sum,)), Signature((broadcast,), (broadcast,))]
    return Resolution(found, _local_sizes, accepts=accepts)


def _local_sizes(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction:
    """The same view with this rank's sizes; -1 is resolved on the logical shape, because an empty shard cannot resolve
    it.
    """
    sizes = outputs[0].local_shape
    if call.name in ("reshape", "flatten", "ravel"):
        return lambda x, *_, **__: x.reshape(sizes)

    def view(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        try:
            return x.view(sizes)
        except RuntimeError:  # a shard may have strides that the whole tensor has not
            return x.reshape(sizes)

    return view


def _reinterpret(call: Call) -> Resolution:
    """``x.view(dtype)``: a change of the element's size changes the last dim."""
    ndim = len(call.shapes[0])
    whole = [] if call.shapes[0] == call.outputs[0][0] else [ndim - 1]
    return Resolution(f"{term(ndim, whole)} -> {term(ndim, whole)}", goes_by_dtype=True)


Groups = list[tuple[list[int], list[int]]]
"""Dims of the source and of the target that together hold the same elements."""


def groups(source: Shape, target: Shape) -> Groups:
    """Cut two shapes of one size into the smallest runs of dims with equal products.

    >>> groups((6, 4), (2, 3, 4))
    [([0], [0, 1]), ([1], [2])]
    """
    if math.prod(source) == 0:
        return [(list(range(len(source))), list(range(len(target))))]
    found, i, j = [], 0, 0
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
        found.append((list(range(i, i_end)), list(range(j, j_end))))
        i, j = i_end, j_end
    return found


def same_elements(before: Region, after: Region, source: Shape, target: Shape, grouped: Groups) -> bool:
    """Whether two regions hold the same elements in the same order."""
    empty = [any(start == stop for start, stop in region) for region in (before, after)]
    if any(empty):
        return all(empty)
    for dims, others in grouped:
        held = _interval([before[d] for d in dims], [source[d] for d in dims])
        if held is None or held != _interval([after[d] for d in others], [target[d] for d in others]):
            return False
    return True


def _interval(region: list[tuple[int, int]], shape: list[int]) -> tuple[int, int] | None:
    """The interval of a region's elements in the flattened dims, if they are consecutive."""
    first, length, stride = 0, 1, math.prod(shape)
    for (start, stop), size in zip(region, shape, strict=True):
        stride //= size
        if length > 1 and stop - start != size:
            return None
        first, length = first + start * stride, length * (stop - start)
    return first, length


for _name in ("view", "reshape", "expand"):  # of the other tensor they use the shape, not its layout
    composite(f"{_name}_as")(lambda tensor, other, name=_name: getattr(tensor, name)(other.shape))


@rule("permute", "transpose", "t", "get:T", "get:mT", "movedim", "adjoint", "get:H", "get:mH")
def _permute(call: Call) -> Resolution | None:
    """A meta tensor with prime sizes shows the permutation."""
    ndim = len(call.shapes[0])
    if ndim > len(_PRIMES):
        return None
    probe = torch.empty(_PRIMES[:ndim], device="meta")
    keywords = {name: value for name, value in call.kwargs.items() if name not in ("input", "self")}
    moved = _out_of_place(call)(probe, *call.args[1:], **keywords).shape
    order = "".join(chr(97 + _PRIMES.index(size)) for size in moved)
    return Resolution(f"+{term(ndim)} -> {order}")


def _out_of_place(call: Call) -> Any:
    name = getattr(call.func, "__name__", "")
    return getattr(torch.Tensor, name[:-1]) if name.endswith("_") and not name.endswith("__") else call.func


@rule("expand", "broadcast_to")
def _expand(call: Call) -> Resolution:
    source, target = call.shapes[0], call.outputs[0][0]
    offset = len(target) - len(source)
    kept = [offset + d for d in range(len(source)) if source[d] == target[offset + d]]
    right = "".join(chr(97 + d) if d in kept else "1" for d in range(len(target)))
    left = "".join(chr(97 + offset + d) if offset + d in kept else "1" for d in range(len(source)))

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction:
        sizes = outputs[0].local_shape
        return lambda x, *_, **__: x.expand(sizes)

    return Resolution(f"+{left} -> {right}", localize)


@rule("diagonal")
def _diagonal(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    pair = normalize_dims([call.arg(2, "dim1", 0), call.arg(3, "dim2", 1)], ndim)
    return Resolution(f"+{term(ndim, pair)} -> {term(ndim, dropped=pair)}Z")


@composite("linalg_diagonal")
def linalg_diagonal(A: Any, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:  # noqa: N803 - torch's name
    """``torch.diagonal`` of the last two dims."""
    return A.diagonal(offset, dim1, dim2)


def windows(call: Call) -> Resolution:
    """``Tensor.unfold``: windows along one dim, which stays whole. (``nn.functional.unfold`` is another function.)"""
    ndim = len(call.shapes[0])
    whole = [call.arg(1, "dimension") % ndim] if ndim else []
    return Resolution(f"+{term(ndim, whole)} -> {term(ndim, whole)}Z")


@rule("view_as_complex")
def _view_as_complex(call: Call) -> Resolution:
    """The pairs stay together. A shard may have other strides than the whole tensor."""
    text = term(len(call.shapes[0]), [len(call.shapes[0]) - 1])

    def view(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.view_as_complex(x)
        except RuntimeError:
            return torch.view_as_complex(x.clone(memory_format=torch.contiguous_format))

    return Resolution(f"+{text} -> {text[:-1]}", lambda *_: view)
