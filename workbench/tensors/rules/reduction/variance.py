"""Variances and standard deviations over split dims, from the moments of each shard.

The moments of the whole come from the shards' means and sums of squared differences (Chan, Golub, LeVeque 1979). This
is as stable as torch's two passes, and needs one exchange of two rows per rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from workbench.core.layout import Layout
from workbench.core.sbp import Split
from workbench.tensors.dispatch.local_call import on_shards, sum_terms
from workbench.tensors.dispatch.planning import check_as_torch
from workbench.tensors.dispatch.registry import composite, normalize_dims
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.rules.reduction.two_stage import Stages, dropped, shard_sizes, splits, stages_of

LOW_PRECISION = (torch.bfloat16, torch.float16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least 32 bits, so that the ranks' contributions to a sum are not rounded to 16."""
    return torch.float32 if dtype in LOW_PRECISION else dtype


def moments(x: GlobalTensor, dims: Sequence[int]) -> tuple[GlobalTensor, GlobalTensor]:
    """Mean, and mean squared difference from it, over ``dims``. Dims are kept; the results are whole along the axes
    that split ``dims``.

    Both have at least 32 bits. For a complex tensor the second is complex too, with imaginary part zero.
    """
    stages, listed = stages_of(x, dims), list(dims)
    dtype = accumulation_dtype(x.dtype)
    if not stages.axes:
        out = [(stages.layout, stages.rows_shape, dtype)] * 2
        mean, square = on_shards(lambda t: _own_moments(t.to(dtype), listed), [x], [stages.layout], out, "var")
        return mean, square
    # Differences of large 32-bit means are inexact, so the rounding errors of the means are sent too.
    sends_rest = x.dtype == torch.float32

    def rows_of(t: torch.Tensor) -> torch.Tensor:
        t = t.to(dtype)
        mean, square = _own_moments(t, listed)
        if not sends_rest:
            return torch.stack([mean, square])
        with torch.no_grad():
            rest = (t - mean).mean(listed, keepdim=True) if t.numel() else torch.zeros_like(mean)
        return torch.stack([mean, square, rest])

    layout, gathered = (behind_new_dim(each) for each in (stages.layout, stages.gathered))
    rows_shape = (2 + sends_rest, *stages.rows_shape)
    rows = on_shards(rows_of, [x], [stages.layout], [(layout, rows_shape, dtype)], "var")
    share = shares_of(x, stages, dtype)

    def combine(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = share.to(rows.device)
        start = (rows[0] * weight).sum(listed, keepdim=True)
        off = rows[0] - start + rows[2] if sends_rest else rows[0] - start
        shift = (off * weight).sum(listed, keepdim=True)
        off = off - shift
        return start + shift, ((rows[1] + off * off.conj()) * weight).sum(listed, keepdim=True)

    mean, square = on_shards(combine, rows, [gathered], [stages.result(True, dtype)] * 2, "var")
    return mean, square


def _own_moments(t: torch.Tensor, dims: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and mean squared difference of a shard; zeros for an empty one."""
    if t.numel() == 0:
        nothing = t.sum(dims, keepdim=True)
        return nothing, nothing.clone()
    if t.is_complex():
        mean = t.mean(dims, keepdim=True)
        difference = t - mean
        return mean, (difference * difference.conj()).mean(dims, keepdim=True)
    variance, mean = torch.var_mean(t, dims, correction=0, keepdim=True)
    return mean, variance


def behind_new_dim(layout: Layout) -> Layout:
    """The layout of a stack of tensors along a new first dim."""
    return layout.with_sbp(tuple(Split(e.dim + 1) if isinstance(e, Split) else e for e in layout.sbp))


def shares_of(x: GlobalTensor, stages: Stages, dtype: torch.dtype) -> torch.Tensor:
    """The part of the reduced elements in each shard, in the shape of the rows."""
    shares = torch.ones([1] * len(stages.rows_shape), dtype=dtype)
    for dim in stages.dims:
        sizes = torch.tensor(shard_sizes(x, dim), dtype=dtype)
        shares = shares * sizes.reshape([-1 if d == dim else 1 for d in range(len(stages.rows_shape))])
    return shares / math.prod(x._spec.shape[dim] for dim in stages.dims)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float, bool]:
    """(dim, correction, keepdim) of the overloads ``var(unbiased)``, ``var(dim, unbiased, keepdim)``, ``var(dim, *,
    correction, keepdim)``.
    """
    if args and isinstance(args[0], bool):
        args = (None, *args)
    named = dict(zip(("dim", "unbiased", "keepdim"), args, strict=False)) | kwargs
    unbiased = named.get("unbiased", True)
    correction = named.get("correction")
    if correction is None:
        correction = 1 if unbiased is None or unbiased else 0
    return named.get("dim"), correction, named.get("keepdim", False)


def _spread(is_root: bool, with_mean: bool, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Variance or standard deviation over split dims from the shards' moments."""
    if type(input) is not GlobalTensor or kwargs.get("out") is not None:
        return NotImplemented
    dim, correction, keepdim = _arguments(args, kwargs)
    shape = input._spec.shape
    dims = normalize_dims(dim, len(shape))
    if not splits(input, dims) or 0 in shape or not (input.is_floating_point() or input.is_complex()):
        return NotImplemented
    x = sum_terms(input)
    stages, dtype = stages_of(x, dims), x.dtype
    count = math.prod(shape[d] for d in dims)
    scale = count / max(0.0, count - correction) if count > correction else math.inf
    mean, square = moments(x, dims)

    def finish(m: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        variance = (s.real if s.is_complex() else s) * scale
        return root(variance) if is_root else variance, m

    out = [stages.result(True, dtype.to_real()), stages.result(True, dtype)]
    found = on_shards(
        lambda m, s: [r.to(o[2]) for r, o in zip(finish(m, s), out, strict=True)][: 1 + with_mean],
        [mean, square], [stages.gathered] * 2, out[: 1 + with_mean], "var",
    )  # fmt: skip
    found = found if keepdim else [dropped(part, stages) for part in found]
    return tuple(found) if with_mean else found[0]


def root(square: torch.Tensor) -> torch.Tensor:
    """Square root with gradient zero at zero, as in torch's standard deviations and norms."""
    is_zero = square == 0
    return torch.where(is_zero, square.detach(), torch.where(is_zero, 1, square).sqrt())


for _name, _is_root in (("var", False), ("std", True)):
    composite(_name)(partial(_spread, _is_root, False))
    composite(f"{_name}_mean")(partial(_spread, _is_root, True))


@composite("cov")
def cov(input: Any, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Covariance of the rows: the product of the differences from their means."""
    if type(input) is not GlobalTensor or fweights is not None or aweights is not None or input.dim() > 2:
        return NotImplemented
    check_as_torch(torch.cov, input, correction=correction)
    x = input if input.dim() == 2 else input.reshape(1, -1)
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    off = x - sum_terms(x.mean(1, keepdim=True))
    return ((off @ off.conj().t()) / max(0, x.shape[1] - correction)).squeeze()


@composite("corrcoef")
def corrcoef(input: Any) -> Any:
    """Covariance of the rows over their standard deviations."""
    if type(input) is not GlobalTensor or input.is_complex():
        return NotImplemented
    covariance: Any = sum_terms(torch.cov(input))
    if covariance.dim() == 0:
        return covariance / covariance
    deviation = covariance.diagonal().sqrt()
    return (covariance / deviation.unsqueeze(1) / deviation).clamp(-1, 1)
