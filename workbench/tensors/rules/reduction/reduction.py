"""Functions that remove dims or work along one: rules for dims that are not split, and sums over split dims.

``extrema``, ``variance``, ``softmax``, ``cumulative`` and ``vector_norms`` are composites that reduce over split dims
without a gather. They leave all other calls to the rules here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from workbench.core.rules import Signature
from workbench.core.sbp import Split, broadcast, partial_sum
from workbench.tensors.dispatch.local_call import sum_terms
from workbench.tensors.dispatch.planning import as_autocast_gives, check_as_torch
from workbench.tensors.dispatch.registry import (
    Call,
    LocalFunction,
    Resolution,
    composite,
    elementwise_except,
    normalize_dims,
    reduction,
    rule,
    term,
)
from workbench.tensors.global_tensor import GlobalTensor, Spec
from workbench.tensors.rules.reduction.two_stage import splits, stages_of, two_stages
from workbench.tensors.rules.reduction.variance import LOW_PRECISION

_DIMS_AT: dict[str, tuple[int, Any]] = {
    "mode": (1, -1), "kthvalue": (2, -1), "linalg_vector_norm": (2, None), "linalg_matrix_norm": (2, (-2, -1)),
}  # fmt: skip
"""Position and default of ``dim``, where they are not 1 and all dims."""


def _reduced_dims(call: Call) -> list[int]:
    position, default = _DIMS_AT.get(call.name, (1, None))
    dims = call.arg(position, "dim", default)
    if call.name in ("all", "any") and dims in ((), []):
        return []  # to these, no dims are none; to others, all
    if isinstance(dims, (torch.dtype, bool)):
        dims = None
    return normalize_dims(dims, len(call.shapes[0]))


def _keepdim(call: Call, ndim: int) -> bool:
    return len(call.outputs[0][0]) == ndim and ndim > 0


@rule("sum", "nansum", "count_nonzero")
def _sum(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    linear = call.name == "sum" and call.kwargs.get("dtype") is None
    linear = linear and call.operands[0].dtype != torch.bool  # the terms of a bool are combined by "or"
    return Resolution(reduction(ndim, _reduced_dims(call), _keepdim(call, ndim), whole=False, addend=linear))


@composite("sum_to_size")
def sum_to_size(input: Any, *size: Any) -> Any:
    """The sum over dims that ``size`` lacks or has as one; the tensor itself where it has this size."""
    wanted = tuple(size[0]) if size and not isinstance(size[0], int) else size
    lead = input.dim() - len(wanted)
    if not wanted or lead < 0:
        return NotImplemented if wanted else input.sum()
    if any(target not in (1, own) for target, own in zip(wanted, input.shape[lead:], strict=True)):
        return NotImplemented
    dims = [d for d in range(input.dim()) if d < lead or wanted[d - lead] != input.shape[d]]
    return input.sum(dims, keepdim=True).view(wanted) if dims else input


@composite("nansum")
def nansum(input: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    """No dims are all dims; torch's kernel for metadata takes them as none."""
    return NotImplemented if dim not in ((), []) else torch.nansum(input, None, keepdim, **options)


@rule("mean")
def _mean(call: Call) -> Resolution:
    """Over a split dim, a mean is the sum of each shard over the logical count, for any sizes of shards."""
    ndim = len(call.shapes[0])
    dims = _reduced_dims(call)
    letters = {chr(ord("a") + dim) for dim in dims}
    count = math.prod(call.shapes[0][dim] for dim in dims) if ndim else 1
    wanted = call.kwargs.get("dtype")

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], split: tuple[str, ...]) -> LocalFunction | None:
        if not letters & set(split):
            return None
        keepdim = _keepdim(call, ndim)

        def mean(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            result = wanted or x.dtype  # one plan serves all dtypes
            # The sum of a shard may overflow the mean's dtype.
            if result in LOW_PRECISION:
                return (torch.sum(x, dims, keepdim, dtype=torch.float32) / count).to(result)
            return torch.sum(x, dims, keepdim, dtype=result) / count

        return mean

    linear = wanted is None
    return Resolution(reduction(ndim, dims, _keepdim(call, ndim), whole=False, addend=linear), localize)


@composite("nanmean")
def nanmean(input: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: Any = None) -> Any:
    """The sum of all values that are not nan, over their number."""
    if type(input) is not GlobalTensor or out is not None:
        return NotImplemented
    check_as_torch(torch.nanmean, input, dim, keepdim, dtype=dtype)
    dims = normalize_dims(dim, input.dim())
    total = torch.nansum(input, dims, keepdim, dtype=dtype)
    return sum_terms(total) / sum_terms(input.isnan().logical_not().sum(dims, keepdim))


@rule(
    "amax", "amin", "aminmax", "logsumexp", "prod", "all", "any", "argmax", "argmin", "median", "nanmedian", *_DIMS_AT,
)  # fmt: skip
def _needs_whole_dims(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    return _several(call, reduction(ndim, _reduced_dims(call), _keepdim(call, ndim), whole=True))


@rule("var", "std", "var_mean", "std_mean")
def _variance(call: Call) -> Resolution:
    """Of an empty shard torch warns that it has too few degrees of freedom."""
    ndim, dims = len(call.shapes[0]), _reduced_dims(call)
    return _several(call, reduction(ndim, dims, _keepdim(call, ndim), whole=True), term(ndim, dropped=dims))


def _several(call: Call, text: str, filled: str = "") -> Resolution:
    """An equation with as many equal results as the call has."""
    left, _, right = text.partition("->")
    return Resolution(f"{left}->{','.join([right] * len(call.outputs))}", filled=filled)


composite("_is_all_true")(torch.all)  # checks of distributions ask for these
composite("_is_any_true")(torch.any)


@rule("max", "min")
def _extremum(call: Call) -> Resolution | None:
    return Resolution("..., ... -> ...") if len(call.operands) == 2 else _needs_whole_dims(call)


@rule("quantile", "nanquantile")
def _quantile(call: Call) -> Resolution:
    """A list of quantiles adds a dim before those of the result."""
    ndim = len(call.shapes[0])
    dims = normalize_dims(call.arg(2, "dim"), ndim)
    many = isinstance(call.args[1], torch.Tensor) and call.args[1].dim() == 1
    left, _, right = reduction(ndim, dims, len(call.outputs[0][0]) - many == ndim and ndim > 0, whole=True).partition(
        "->"
    )
    listed = ["", ", Q" if many else ", "][len(call.operands) - 1]
    kept = term(ndim, dropped=dims)
    return Resolution(f"{left}{listed} -> {'Q' * many}{right}", filled=kept)


@rule("topk", "sort", "argsort", "msort", "cummax", "cummin")
def _sort(call: Call) -> Resolution:
    """Along a dim that stays whole; other dims may be split."""
    ndim = len(call.shapes[0])
    dim = 0 if call.name == "msort" else call.arg(2 if call.name == "topk" else 1, "dim", -1)
    if isinstance(dim, bool):  # torch also accepts the order sort(stable, dim)
        dim = call.arg(2, "dim", -1)
    return _several(call, elementwise_except(ndim, normalize_dims(dim, ndim) if ndim else []))


@rule("diff")
def _diff(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    text = term(ndim, normalize_dims(call.arg(2, "dim", -1), ndim))
    # The difference of bools is an exclusive or, which is not linear
    addend = "+" * (call.operands[0].dtype != torch.bool)
    return Resolution(f"{', '.join([addend + text] * len(call.operands))} -> {text}")


@rule("gradient")
def _gradient(call: Call) -> Resolution | None:
    """Differences of neighbours along some dims; the others may be split."""
    if len(call.operands) > 1:  # coordinates along the dims
        return None
    ndim = len(call.shapes[0])
    return _several(call, elementwise_except(ndim, normalize_dims(call.kwargs.get("dim"), ndim), addend=True))


@rule("histc")
def _histc(call: Call) -> Resolution:
    """The counts of shards add up if the bins do not depend on the values."""
    ndim = len(call.shapes[0])
    whole_only = Signature((broadcast,), (broadcast,))
    if call.arg(2, "min", 0) == call.arg(3, "max", 0):
        return Resolution([whole_only])
    counted = [Signature((Split(d),), (partial_sum,), chr(97 + d)) for d in range(ndim)]
    return Resolution([*counted, whole_only])


@rule("softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp")
def _along(call: Call) -> Resolution | None:
    dim: Any = call.arg(1, "dim")
    if dim is None:
        return None
    ndim = len(call.shapes[0])
    is_linear = call.name == "cumsum" and call.kwargs.get("dtype") is None
    return Resolution(elementwise_except(ndim, normalize_dims(dim, ndim) if ndim else [], is_linear))


def _in_two_stages(name: str, function: Callable[..., torch.Tensor]) -> None:
    """A reduction whose partial results can be reduced again: a product of products, any of any."""

    def reduce(input: Any, dim: Any = None, keepdim: bool = False, *, out: Any = None, **options: Any) -> Any:
        if type(input) is not GlobalTensor or out is not None or dim in ((), []):
            return NotImplemented
        dims = normalize_dims(dim, len(input._spec.shape))
        if not splits(input, dims):
            return NotImplemented
        x = sum_terms(as_autocast_gives(input, getattr(torch, name), input))
        stages = stages_of(x, dims)
        dtype = function(torch.empty([1] * max(1, len(dims)), dtype=x.dtype), [0], **options).dtype
        return two_stages(
            x, stages, keepdim, lambda t: function(t, dims, **options), lambda t: function(t, dims, **options),
            (dtype, dtype), name,
        )  # fmt: skip

    composite(name)(reduce)


def _product(x: torch.Tensor, dims: list[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    for dim in dims:
        x = x.prod(dim, keepdim=True, dtype=dtype)
    return x


_in_two_stages("prod", _product)
_in_two_stages("all", lambda x, dims: torch.all(x, dims, keepdim=True))
_in_two_stages("any", lambda x, dims: torch.any(x, dims, keepdim=True))
