"""Cumulative functions over a split dim: scan each shard, then add the total of the shards before it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from workbench.core.sbp import Split
from workbench.tensors.dispatch.local_call import on_shards, sum_terms
from workbench.tensors.dispatch.placeholder_calls import autocast_state
from workbench.tensors.dispatch.registry import Call, Resolution, composite, normalize_dims, rule, term
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.rules.reduction.two_stage import gathered_rows, shard_sizes, splits, stages_of
from workbench.tensors.rules.reduction.variance import LOW_PRECISION


def _scan(
    scan: Any, total: Any, input: Any, dim: Any = None, *, dtype: torch.dtype | None = None, out: Any = None
) -> Any:
    """``scan`` along a split dim. ``total`` reduces a shard to the row from which later shards start. Both may return
    a wider dtype, as torch's do of integers.
    """
    if out is not None or type(input) is not GlobalTensor or not isinstance(dim, int) or not input._spec.shape:
        return NotImplemented
    dims = normalize_dims(dim, len(input._spec.shape))
    if not splits(input, dims) or 0 in input._spec.shape:
        return NotImplemented
    dim, result_dtype = dims[0], _result_dtype(input.dtype, dtype)
    if scan is torch.logcumsumexp and result_dtype == torch.int64:
        return NotImplemented  # torch refuses integers
    if autocast_state() and result_dtype in LOW_PRECISION:
        return NotImplemented  # autocast decides the dtype of the result
    x = sum_terms(input if input.dtype == result_dtype else input.to(result_dtype))
    stages = stages_of(x, dims)
    rows = gathered_rows(x, stages, lambda t: total(t, dim, keepdim=True).to(result_dtype), [result_dtype], "cumsum")[0]
    number = shard_number(x, dim)
    front, behind = ((slice(None),) * dim + (part,) for part in (slice(number), slice(number, None)))

    def add_before(t: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        # Also the rows behind: second gradients are exchanged in the order of their dependences, which all ranks need
        # alike, and torch's gradients do not depend on what is empty, or one element alone.
        joined = torch.cat([before[front], t, before[behind]], dim)
        return scan(joined, dim).to(result_dtype).narrow(dim, number, t.shape[dim]).contiguous()

    out_spec = [(stages.layout, x._spec.shape, result_dtype)]
    return on_shards(add_before, [x, rows], [stages.layout, stages.gathered], out_spec, "cumsum")[0]


def _result_dtype(given: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The dtype of the result: 64 bits for sums and products of integers."""
    if asked is not None:
        return asked
    return given if given.is_floating_point or given.is_complex else torch.int64


def shard_number(x: GlobalTensor, dim: int) -> int:
    """The number of shards of ``dim`` before this rank's."""
    spec = x._spec
    if spec.is_placeholder:
        return 0
    placement = spec.layout.placement
    coordinates = placement.coordinates(spec.world.rank)
    number = 0
    for axis, entry in enumerate(spec.layout.sbp):
        if isinstance(entry, Split) and entry.dim == dim:
            number = number * placement.shape[axis] + coordinates[axis]
    return number


for _name, _total in (("cumsum", torch.sum), ("cumprod", torch.prod), ("logcumsumexp", torch.logsumexp)):
    composite(_name)(partial(_scan, getattr(torch, _name), _total))


def _extremes(name: str, input: Any, dim: Any = None, *, out: Any = None) -> Any:
    """Running extrema and their positions; of equal values the last position, as in torch."""
    if out is not None or type(input) is not GlobalTensor or not isinstance(dim, int) or not input._spec.shape:
        return NotImplemented
    dims = normalize_dims(dim, len(input._spec.shape))
    if not splits(input, dims) or 0 in input._spec.shape or input.dtype == torch.bool:
        return NotImplemented
    dim, x = dims[0], sum_terms(input)
    scan: Any = getattr(torch, name)
    stages, number = stages_of(x, dims), shard_number(x, dim)
    sizes = shard_sizes(x, dim)
    start, filled = sum(sizes[:number]), [n for n, size in enumerate(sizes) if size]
    earlier, others = ([n for n in filled if (n < number) is is_earlier] for is_earlier in (True, False))

    def last(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if t.shape[dim] == 0:
            row = t.sum(dim, keepdim=True).to(t.dtype)
            return row, torch.zeros_like(row, dtype=torch.int64)
        values, indices = scan(t, dim)
        return values.narrow(dim, t.shape[dim] - 1, 1), indices.narrow(dim, t.shape[dim] - 1, 1) + start

    def add_before(t: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.arange(start, start + t.shape[dim], device=t.device)
        own = own.reshape([-1 if d == dim else 1 for d in range(t.dim())]).expand(t.shape)
        front, behind = (torch.tensor(chosen, dtype=torch.int64, device=t.device) for chosen in (earlier, others))
        joined, origin = (  # also with the rows behind, as in _scan
            torch.cat([row.index_select(dim, front), part, row.index_select(dim, behind)], dim)
            for row, part in ((rows, t), (places, own))
        )
        values, indices = scan(joined, dim)
        kept = [part.narrow(dim, len(earlier), t.shape[dim]) for part in (values, origin.gather(dim, indices))]
        return kept[0].contiguous(), kept[1].contiguous()

    pair = gathered_rows(x, stages, last, [x.dtype, torch.int64], name)
    outs = [(stages.layout, x._spec.shape, d) for d in (x.dtype, torch.int64)]
    found = on_shards(add_before, [x, *pair], [stages.layout, stages.gathered, stages.gathered], outs, name)
    return getattr(torch.return_types, name)(tuple(found))


for _name in ("cummax", "cummin"):
    composite(_name)(partial(_extremes, _name))


@rule("trapezoid", "trapz", "cumulative_trapezoid")
def _trapezoid(call: Call) -> Resolution | None:
    """The integral of ``y`` along one dim. The points ``x`` are one row for all, or have the shape of ``y``."""
    ndim = len(call.shapes[0])
    dims = normalize_dims(call.kwargs.get("dim", -1), ndim)
    values = term(ndim, dims)
    places = {1: "X", ndim: values}.get(len(call.shapes[-1]))
    if places is None or (len(call.operands) == 2 and len(call.shapes[1]) == ndim and call.shapes[0] != call.shapes[1]):
        return None
    result = values if call.name == "cumulative_trapezoid" else term(ndim, dropped=dims)
    return Resolution(f"{values}{f', {places}' * (len(call.operands) - 1)} -> {result}")
