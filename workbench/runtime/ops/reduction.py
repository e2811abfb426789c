"""Functions that remove dims or work along one: sums, means, extrema, softmax, cumulative sums."""

from __future__ import annotations

import math
from typing import Any

import torch

from workbench.runtime.ops.equation_text import elementwise_except, normalize_dims, reduction
from workbench.runtime.ops.registry import Call, LocalFunction, Resolution, rule
from workbench.runtime.tensor import Spec


def _reduced_dims(call: Call) -> list[int]:
    dims = call.arg(1, "dim")
    if isinstance(dims, (torch.dtype, bool)):
        dims = None
    return normalize_dims(dims, len(call.shapes[0]))


def _keepdim(call: Call, ndim: int) -> bool:
    return len(call.outputs[0][0]) == ndim and ndim > 0


@rule("sum", "nansum", parameters="input dim keepdim")
def _sum(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    linear = call.name == "sum" and call.kwargs.get("dtype") is None
    return Resolution(reduction(ndim, _reduced_dims(call), _keepdim(call, ndim), whole=False, addend=linear))


@rule("mean", parameters="input dim keepdim")
def _mean(call: Call) -> Resolution:
    """Over a split dim, a mean is the sum of the shard over the logical count, whatever the shards' sizes."""
    ndim = len(call.shapes[0])
    dims = _reduced_dims(call)
    letters = {chr(ord("a") + dim) for dim in dims}
    count = math.prod(call.shapes[0][dim] for dim in dims)

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], split: tuple[str, ...]) -> LocalFunction | None:
        if not letters & set(split):
            return None
        keepdim = _keepdim(call, ndim)
        return lambda x, *_, dtype=None, **__: torch.sum(x, dims, keepdim, dtype=dtype) / count

    return Resolution(reduction(ndim, dims, _keepdim(call, ndim), whole=False, addend=True), localize)


@rule(
    "amax",
    "amin",
    "logsumexp",
    "prod",
    "all",
    "any",
    "argmax",
    "argmin",
    "var",
    "std",
    "median",
    "count_nonzero",
    "norm",
    parameters="input dim keepdim",
)
def _needs_whole_dims(call: Call) -> Resolution | None:
    ndim = len(call.shapes[0])
    if call.name == "norm":
        return None
    return Resolution(reduction(ndim, _reduced_dims(call), _keepdim(call, ndim), whole=True))


@rule("max", "min", parameters="input dim keepdim")
def _extremum(call: Call) -> Resolution:
    if len(call.operands) == 2:
        return Resolution("..., ... -> ...")
    ndim = len(call.shapes[0])
    text = reduction(ndim, _reduced_dims(call), _keepdim(call, ndim), whole=True)
    right = text.partition("->")[2]
    return Resolution(text + (f",{right}" if len(call.outputs) == 2 else ""))


def _along(call: Call, default: int | None = None, addend: bool = False) -> Resolution:
    ndim = len(call.shapes[0])
    dim: Any = call.arg(1, "dim", default)
    whole = normalize_dims(dim, ndim) if ndim else []
    return Resolution(elementwise_except(ndim, whole, addend))


@rule("softmax", "log_softmax", "softmin", "cumprod", "logcumsumexp", parameters="input dim")
def _softmax(call: Call) -> Resolution | None:
    return None if call.arg(1, "dim") is None else _along(call)


@rule("cumsum", "flip", parameters="input dim")
def _cumsum(call: Call) -> Resolution:
    return _along(call, addend=call.name != "cumsum" or call.kwargs.get("dtype") is None)


@rule("normalize", parameters="input p dim")
def _normalize(call: Call) -> Resolution | None:
    ndim = len(call.shapes[0])
    return Resolution(elementwise_except(ndim, normalize_dims(call.arg(2, "dim", 1), ndim)))
