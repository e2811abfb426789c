"""Extrema over split dims: a local extremum per shard, and an exchange of one row per rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from workbench.core.boxing import plan_boxing
from workbench.kernels.launch import identity_element
from workbench.tensors.boxing.box import box_implicitly
from workbench.tensors.dispatch.local_call import local_call, on_shards, sum_terms
from workbench.tensors.dispatch.planning import itemsize_of
from workbench.tensors.dispatch.registry import composite, normalize_dims
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.rules.reduction.two_stage import (
    Stages,
    dropped,
    gathered_rows,
    needs_grad,
    own_rows,
    shard_sizes,
    splits,
    stages_of,
    terms,
    with_gradient_of,
)

Dims = int | Sequence[int] | None


def local_extremum(x: torch.Tensor, dims: Sequence[int], largest: bool) -> torch.Tensor:
    """``amax`` or ``amin`` with the dims kept; for an empty shard, the value that never wins."""
    if any(x.shape[d] == 0 for d in dims):
        return x.sum(list(dims), keepdim=True).to(x.dtype) + identity_element(x.dtype, "max" if largest else "min")
    return (torch.amax if largest else torch.amin)(x, list(dims), keepdim=True)


def extremum(x: GlobalTensor, dims: Sequence[int], keepdim: bool, largest: bool) -> GlobalTensor:
    """The extremum over ``dims``, some of which are split, as terms of P(max) or P(min). It has no gradient."""
    stages = stages_of(x, dims)
    with torch.no_grad():
        return terms(
            lambda t: local_extremum(t, dims, largest), [x], [stages.layout], stages, keepdim, x.dtype,
            "amax" if largest else "amin", "max" if largest else "min",
        )  # fmt: skip


def _amax(input: Any, dim: Dims = (), keepdim: bool = False, *, largest: bool, out: Any = None) -> Any:
    """``amax`` or ``amin``. Over split dims the result is P(max) or P(min), or B if it needs a gradient."""
    if out is not None or type(input) is not GlobalTensor:
        return NotImplemented
    ndim = len(input._spec.shape)
    dims = normalize_dims(dim, ndim)
    if not splits(input, dims) or any(input._spec.shape[d] == 0 for d in dims):
        return NotImplemented
    x = sum_terms(input)
    if x.dtype == torch.bool:
        whole_number: Any = _amax(x.to(torch.uint8), dims, keepdim, largest=largest)
        return whole_number.to(torch.bool)
    if not needs_grad(x):
        return extremum(x, dims, keepdim, largest)
    value = _differentiable(x, sum_terms(extremum(x, dims, True, largest), "amax"), dims)
    return value if keepdim else dropped(value, stages_of(x, dims))


def _differentiable(x: GlobalTensor, value: GlobalTensor, dims: Sequence[int]) -> GlobalTensor:
    """An extremum whose gradient goes in equal parts to all elements that attain it, as in torch."""
    stages = stages_of(x, dims)
    layouts = [stages.layout, stages.gathered]

    def attains(t: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (t == v) | (t.isnan() & v.isnan())

    with torch.no_grad():
        attained = terms(
            lambda t, v: attains(t, v).sum(list(dims), keepdim=True).to(t.dtype),
            [x, value], layouts, stages, True, x.dtype, "amax",
        )  # fmt: skip
    count = sum_terms(attained, "amax")
    parts = terms(
        lambda t, v, n: (attains(t, v).to(t.dtype) * t).sum(list(dims), keepdim=True) / n,
        [x, value, count], [*layouts, stages.gathered], stages, True, x.dtype, "amax",
    )  # fmt: skip
    return with_gradient_of(value, parts)


@composite("aminmax")
def aminmax(input: Any, *, dim: int | None = None, keepdim: bool = False, out: Any = None) -> Any:
    """Both extrema."""
    if out is not None or not splits(input, None if dim is None else normalize_dims(dim, input.dim())):
        return NotImplemented
    dims = () if dim is None else dim
    return torch.return_types.aminmax((torch.amin(input, dims, keepdim), torch.amax(input, dims, keepdim)))


def _max(largest: bool, input: Any, *args: Any, **kwargs: Any) -> Any:
    """``max()``, ``max(dim, keepdim)``; ``max(other)`` is the pointwise maximum and has a rule."""
    dim = args[0] if args else kwargs.get("dim")
    if isinstance(dim, torch.Tensor) or "other" in kwargs or kwargs.get("out") is not None:
        return NotImplemented
    if dim is None:
        return _amax(input, (), False, largest=largest)
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    found = values_and_indices(input, dim, keepdim, largest, want_values=True)
    if found is NotImplemented:
        return NotImplemented
    return (torch.return_types.max if largest else torch.return_types.min)(found)


def _argmax(largest: bool, input: Any, dim: int | None = None, keepdim: bool = False, *, out: Any = None) -> Any:
    """Index of the largest (or the smallest) value; of equal values the first."""
    if out is not None:
        return NotImplemented
    if dim is not None:
        found = values_and_indices(input, dim, keepdim, largest, want_values=False)
        return found if found is NotImplemented else found[1]
    if not splits(input) or 0 in input._spec.shape:
        return NotImplemented
    return _flat_argmax(sum_terms(input), keepdim, largest)


for _largest, _suffix in ((True, "max"), (False, "min")):
    composite(f"a{_suffix}")(partial(_amax, largest=_largest))
    composite(_suffix)(partial(_max, _largest))
    composite(f"arg{_suffix}")(partial(_argmax, _largest))


def values_and_indices(input: Any, dim: int, keepdim: bool, largest: bool, want_values: bool) -> Any:
    """Extremum along one split dim and its logical index: first of each shard, then the best of these."""
    if type(input) is not GlobalTensor or not input._spec.shape:
        return NotImplemented
    dims = normalize_dims(dim, len(input._spec.shape))
    dim = dims[0]
    if not splits(input, dims) or input._spec.shape[dim] == 0:
        return NotImplemented
    x = sum_terms(input)
    if x.dtype == torch.bool:
        values, indices = values_and_indices(x.to(torch.uint8), dim, keepdim, largest, want_values)
        return values.to(torch.bool), indices
    stages, (start, _), filled = stages_of(x, dims), own_rows(x._spec, dim), filled_shards(x, dim)
    best = torch.max if largest else torch.min

    def first(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if t.shape[dim] == 0:
            value = local_extremum(t, dims, largest)
            return value, torch.zeros_like(value, dtype=torch.int64)
        value, index = best(t, dim, keepdim=True)
        return value, index + start

    with torch.set_grad_enabled(torch.is_grad_enabled() and want_values):
        values, indices = gathered_rows(x, stages, first, [x.dtype, torch.int64], "max")
        out = [stages.result(keepdim, x.dtype), stages.result(keepdim, torch.int64)]

        def second(value: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            value, index = (keep_rows(rows, dim, filled) for rows in (value, index))
            found, at = best(value, dim, keepdim=True)
            index = index.gather(dim, at)
            return (found, index) if keepdim else (found.squeeze(dim), index.squeeze(dim))

        return tuple(on_shards(second, [values, indices], [stages.gathered] * 2, out, "max"))


def filled_shards(x: GlobalTensor, dim: int) -> list[int] | None:
    """Numbers of the shards of ``dim`` that are not empty; None if all have rows."""
    sizes = shard_sizes(x, dim)
    return None if all(sizes) else [number for number, size in enumerate(sizes) if size]


def keep_rows(rows: torch.Tensor, dim: int, kept: list[int] | None) -> torch.Tensor:
    """The listed rows; all rows for None."""
    return rows if kept is None else rows.index_select(dim, torch.tensor(kept, device=rows.device))


def _flat_argmax(x: GlobalTensor, keepdim: bool, largest: bool) -> GlobalTensor:
    """Index into the flattened tensor: the smallest index among the ranks with the best value."""
    spec = x._spec
    dims = list(range(len(spec.shape)))
    stages = stages_of(x, dims)
    region = None if spec.is_placeholder else spec.layout.region(spec.shape, spec.world.rank)

    def first(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ones = [1] * t.dim()
        if t.numel() == 0 or region is None:
            never = identity_element(t.dtype, "max" if largest else "min")
            value = torch.full(ones, never, dtype=t.dtype, device=t.device)
            return value, torch.full(ones, torch.iinfo(torch.int64).max, device=t.device)
        at = torch.unravel_index((torch.argmax if largest else torch.argmin)(t), t.shape)
        position = torch.zeros((), dtype=torch.int64, device=t.device)
        for coordinate, (start, _), size in zip(at, region, spec.shape, strict=True):
            position = position * size + coordinate + start
        return t[at].reshape(ones), position.reshape(ones)

    def second(value: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        held = position != torch.iinfo(torch.int64).max
        best = (torch.amax if largest else torch.amin)(value[held])
        attains = held & ((value == best) | ((value != value) & (best != best)))
        found = position[attains].min()
        return found.reshape([1] * value.dim()) if keepdim else found

    number: Any = x.to(torch.uint8) if x.dtype == torch.bool else x
    with torch.no_grad():
        pair = gathered_rows(number, stages, first, [number.dtype, torch.int64], "argmax")
        return local_call(second, pair, [stages.gathered] * 2, stages.result(keepdim, torch.int64), "argmax")


@composite("topk")
def topk(input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *, out: Any = None) -> Any:
    """The best k of the best k of each shard. Only these candidates are gathered."""
    if out is not None or not splits(input, normalize_dims(dim, input.dim())):
        return NotImplemented
    x = sum_terms(input)
    shape, dim = x._spec.shape, dim % len(x._spec.shape)
    stages, (start, _), sizes = stages_of(x, [dim]), own_rows(x._spec, dim), shard_sizes(x, dim)
    if k == 0 or k > shape[dim] or _gathering_is_as_cheap(x, stages, k, dim):
        return NotImplemented

    def first(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = t.topk(min(k, t.shape[dim]), dim, largest, False)
        missing = [0, 0] * (t.dim() - dim - 1) + [0, k - values.shape[dim]]
        return torch.nn.functional.pad(values, missing), torch.nn.functional.pad(indices + start, missing)

    candidates = (*stages.rows_shape[:dim], k * len(sizes), *stages.rows_shape[dim + 1 :])
    outs = [(stages.layout, candidates, dtype) for dtype in (x.dtype, torch.int64)]
    pair = [
        box_implicitly(rows, stages.gathered, "topk") for rows in on_shards(first, [x], [stages.layout], outs, "topk")
    ]
    real = [number * k + row for number, size in enumerate(sizes) for row in range(min(k, size))]

    def second(values: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(real) < values.shape[dim]:
            values, indices = keep_rows(values, dim, real), keep_rows(indices, dim, real)
        best, at = values.topk(k, dim, largest, sorted)
        return best, indices.gather(dim, at)

    found = (*shape[:dim], k, *shape[dim + 1 :])
    results = [(stages.gathered, found, dtype) for dtype in (x.dtype, torch.int64)]
    best = on_shards(second, pair, [stages.gathered] * 2, results, "topk")
    return torch.return_types.topk((best[0], best[1]))


def _gathering_is_as_cheap(x: GlobalTensor, stages: Stages, k: int, dim: int) -> bool:
    """Whether there are as many candidates as elements: then the rule may gather the tensor itself."""
    spec = x._spec
    candidates = list(spec.shape)
    candidates[dim] = stages.rows_shape[dim] * k
    whole_bytes = plan_boxing(spec.layout, stages.gathered, spec.shape, itemsize_of(x)).wire_bytes
    return plan_boxing(spec.layout, stages.gathered, tuple(candidates), itemsize_of(x) + 8).wire_bytes >= whole_bytes
