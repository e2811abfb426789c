"""Softmax and logsumexp over split dims: the global maximum first, then the sum of the exponentials.

The ranks exchange one row each, twice in forward and once in backward. The tensor itself never moves.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from workbench.tensors.dispatch.local_call import local_call, sum_terms
from workbench.tensors.dispatch.planning import as_autocast_gives
from workbench.tensors.dispatch.registry import composite, normalize_dims
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.rules.reduction.extrema import extremum
from workbench.tensors.rules.reduction.two_stage import dropped, splits, stages_of, terms
from workbench.tensors.rules.reduction.variance import accumulation_dtype


def finite(peak: torch.Tensor) -> torch.Tensor:
    """Zero in place of an infinite maximum, because infinity minus infinity is nan."""
    return torch.where(peak.isinf(), 0, peak)


@composite("logsumexp")
def logsumexp(input: Any, dim: Any = None, keepdim: bool = False, *, out: Any = None) -> Any:
    """Logarithm of the sum of exponentials: the global maximum, plus the logarithm of the shifted sum."""
    if type(input) is not GlobalTensor or dim is None or out is not None:
        return NotImplemented
    dims = normalize_dims(dim, len(input._spec.shape))
    if not splits(input, dims) or 0 in input._spec.shape or input.is_complex():
        return NotImplemented
    x = sum_terms(as_autocast_gives(input, torch.logsumexp, input, dim))
    if not x.is_floating_point():
        x = sum_terms(x.to(torch.get_default_dtype()))
    stages, dtype = stages_of(x, dims), x.dtype
    wide = accumulation_dtype(dtype)
    peak = sum_terms(extremum(x, dims, True, largest=True), "logsumexp")
    total = terms(
        lambda t, m: (t.to(wide) - finite(m).to(wide)).exp().sum(dims, keepdim=True),
        [x, peak], [stages.layout, stages.gathered], stages, True, wide, "logsumexp",
    )  # fmt: skip
    result = local_call(
        lambda m, s: (s.log() + finite(m)).to(dtype), [peak, sum_terms(total, "logsumexp")], [stages.gathered] * 2,
        stages.result(True, dtype), "logsumexp",
    )  # fmt: skip
    return result if keepdim else dropped(result, stages)


def _softmax(
    logarithm: bool, input: Any, dim: int | None = None, *rest: Any, dtype: torch.dtype | None = None, **_: Any
) -> Any:
    """Softmax or its logarithm over a split dim: two exchanges of a row per rank in forward, one in backward."""
    if type(input) is not GlobalTensor or dim is None:
        return NotImplemented
    dims = normalize_dims(dim, len(input._spec.shape))
    if not splits(input, dims) or 0 in input._spec.shape:
        return NotImplemented
    dtype = next((option for option in (*rest, dtype) if isinstance(option, torch.dtype)), None)
    function: Any = torch.log_softmax if logarithm else torch.softmax
    x = sum_terms(as_autocast_gives(input, function, input, dim) if dtype is None else input.to(dtype))
    if not x.is_floating_point():
        function(torch.zeros(1, dtype=x.dtype), 0)  # torch's error
    stages, out_dtype = stages_of(x, dims), x.dtype
    wide = accumulation_dtype(out_dtype)
    peak = sum_terms(extremum(x, dims, True, largest=True), "softmax")

    def shifted(t: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        moved = t.to(wide) - m.to(wide)
        return moved if logarithm else moved.exp()

    def add_up(t: torch.Tensor) -> torch.Tensor:
        return (t.exp() if logarithm else t).sum(dims, keepdim=True)

    def finish(t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return (t - s.log() if logarithm else t / s).to(out_dtype)

    own, shape = stages.layout, x._spec.shape
    weights = local_call(shifted, [x, peak], [own, stages.gathered], (own, shape, wide), "softmax")
    total = sum_terms(terms(add_up, [weights], [own], stages, True, wide, "softmax"), "softmax")
    return local_call(finish, [weights, total], [own, stages.gathered], (own, shape, out_dtype), "softmax")


composite("softmax")(partial(_softmax, False))
composite("log_softmax")(partial(_softmax, True))


@composite("_safe_softmax")
def safe_softmax(input: Any, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Softmax that is zero for rows that are masked as a whole."""
    if type(input) is not GlobalTensor:
        return NotImplemented
    masked = (input == -torch.inf).all(dim, keepdim=True)
    return torch.softmax(input.masked_fill(masked, 0.0), dim, dtype=dtype).masked_fill(masked, 0.0)
