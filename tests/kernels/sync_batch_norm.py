"""torch's kernels of ``SyncBatchNorm``, which exist for GPUs only: their formulas on the host, with their demands.

Importing this gives them to CPU tensors; the checked device counts each as one launch, as every operator.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.kernels.launch import accumulator

Tensor = torch.Tensor


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _wide(t: Tensor, like: Tensor) -> Tensor:
    return t.to(accumulator(like.dtype)).reshape([1, -1, *[1] * (like.dim() - 2)])


def _demand(dtype: torch.dtype, *tensors: Tensor | None) -> None:
    """torch reads the memory of these as this dtype."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype != dtype:
            raise RuntimeError(f"expected scalar type {dtype} but found {tensor.dtype}")


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and ``1 / sqrt(variance + eps)`` per channel."""
    variance, mean = torch.var_mean(x.to(accumulator(x.dtype)), _dims(x), correction=0)
    return mean, torch.rsqrt(variance + eps)


def batch_norm_gather_stats_with_counts(
    x: Tensor, means: Tensor, invstds: Tensor, running_mean: Any, running_var: Any, momentum: float, eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same of several shards; the running statistics are moved, and no version is counted."""
    read_as = x.dtype if running_mean is None else running_mean.dtype
    _demand(read_as, counts, running_mean, running_var)
    _demand(accumulator(read_as), means, invstds)
    mean, square, number = torch.zeros_like(means[0]), torch.zeros_like(means[0]), 0
    for count, m, invstd in zip(counts.tolist(), means, invstds, strict=True):
        of_shard = (invstd.reciprocal().square() - eps) * count
        factor = torch.tensor(1.0, dtype=means.dtype) / (number + count)
        square += of_shard + (mean - m).square() * number * count * factor
        mean = number * factor * mean + count * factor * m
        number += int(count)
    for running, found in ((running_mean, mean), (running_var, square / (number - 1))):
        if running is not None:
            running.data.copy_((1 - momentum) * running + momentum * found)
    return mean, torch.rsqrt(square / number + eps)


def batch_norm_elemt(x: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    """The output."""
    if {t.dtype for t in (weight, bias) if t is not None} - {x.dtype, mean.dtype}:
        raise RuntimeError(f"batch_norm_elemt: weights of {weight.dtype} for {x.dtype}")
    _demand(accumulator(x.dtype), mean, invstd)
    y = (x - _wide(mean, x)) * _wide(invstd, x)
    y = y if weight is None else y * _wide(weight, x)
    return (y if bias is None else y + _wide(bias, x)).to(x.dtype)


def batch_norm_backward_reduce(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, input_g: bool, weight_g: bool, bias_g: bool
) -> tuple[Tensor, ...]:
    """Sums of ``dy`` and ``dy * (x - mean)``, and the gradients of weight and bias."""
    _demand(accumulator(x.dtype), mean, invstd, weight)
    if weight is None and (weight_g or bias_g):
        raise RuntimeError("tensor does not have a device")
    dy = dy.to(accumulator(dy.dtype))
    sums = dy.sum(_dims(x)), (dy * (x - _wide(mean, x))).sum(_dims(x))
    none = mean.new_empty(0)
    return *(sums if input_g else (none, none)), sums[1] * invstd if weight_g else none, sums[0] if bias_g else none


def batch_norm_backward_elemt(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, sum_dy: Tensor, sum_dy_xmu: Tensor, counts: Tensor
) -> Tensor:
    """The gradient of the input."""
    _demand(accumulator(x.dtype), mean, invstd, weight, sum_dy, sum_dy_xmu)
    _demand(torch.int32, counts)
    number = int(counts.sum())
    off = dy - _wide(sum_dy, x) / number
    off = off - (x - _wide(mean, x)) * _wide(invstd * invstd * sum_dy_xmu / number, x)
    return (off * _wide(invstd if weight is None else invstd * weight, x)).to(x.dtype)


_library = torch.library.Library("aten", "IMPL", "CPU")
for _kernel in (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
):
    _library.impl(_kernel.__name__, _kernel)
