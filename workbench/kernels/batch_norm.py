"""The local part of global batch norm, for one shard, with torch's own kernels.

The ranks exchange the results of ``shard_statistics``, which give mean and variance of the batch, and ``normalize``
computes the output. In backward, ``gradient_sums`` are summed over the ranks, and ``input_gradient`` computes the
gradient of the shard from the totals:

    dx = weight * invstd * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n),   xhat = (x - mean) * invstd

(Ioffe and Szegedy, arXiv 1502.03167, section 3; torch.nn.SyncBatchNorm exchanges the same sums.) Channels are dim 1.
On CUDA the kernels are those of SyncBatchNorm. On CPUs torch's training kernel adds one number after another; torch's
vectorized reductions take a quarter of its time.
"""

from __future__ import annotations

import torch

from workbench.kernels.launch import accumulator

_backward = torch.ops.aten.native_batch_norm_backward.default


def shard_statistics(x: torch.Tensor) -> torch.Tensor:
    """Mean and variance of each channel of ``x`` (samples, channels, ...); zeros if there is no sample.

    Returns:
        (2, channels), of at least 32 bits.

    >>> shard_statistics(torch.tensor([[1.0], [3.0]])).flatten().tolist()
    [2.0, 1.0]
    """
    dtype = accumulator(x.dtype)
    if x.numel() == 0:
        return torch.zeros((2, x.shape[1]), dtype=dtype, device=x.device)
    if x.is_cuda:
        return torch.stack(torch.batch_norm_update_stats(x, None, None, 0.0))
    dims = [0, *range(2, x.dim())]
    x = x.to(dtype)
    mean = x.mean(dims)
    return torch.stack([mean, (x - per_channel(mean, x.dim())).square_().mean(dims)])


def normalize(
    x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:  # fmt: skip
    """``(x - mean) / sqrt(variance + eps) * weight + bias``, in the dtype of ``x``."""
    weight, bias = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
    if x.numel() == 0:
        return torch.empty_like(x)
    if x.is_cuda:
        return torch.batch_norm_elemt(x, weight, bias, mean, torch.rsqrt(variance + eps), eps)
    return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]


def gradient_sums(dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor) -> torch.Tensor:
    """Sums per channel of ``dy`` and of ``dy * xhat``, (2, channels): also the gradients of bias and weight."""
    if x.numel() == 0:
        return mean.new_zeros((2, len(mean)))
    if x.is_cuda:
        sums = torch.batch_norm_backward_reduce(dy, x, mean, invstd, None, True, False, False)
        return torch.stack([sums[0], sums[1] * invstd])
    # The training kernel computes the sums only, from the given statistics.
    _, of_weight, of_bias = _backward(dy, x, None, None, None, mean, invstd, True, 0.0, [False, True, True])
    return torch.stack([of_bias, of_weight]).to(mean.dtype)


def input_gradient(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, invstd: torch.Tensor,
    weight: torch.Tensor | None, eps: float, totals: torch.Tensor, count: int,
) -> torch.Tensor:  # fmt: skip
    """The gradient of the shard ``x``.

    Args:
        totals: the results of ``gradient_sums``, summed over the ranks.
        count: elements per channel of the logical batch.
    """
    if x.numel() == 0:
        return torch.empty_like(x)
    if x.is_cuda:
        counts = torch.tensor([count], dtype=torch.int32, device=x.device)
        return torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, totals[0], totals[1] / invstd, counts)
    # -(sum(dy) + xhat * sum(dy * xhat)) / n normalizes x again, with the totals as weight and bias.
    offset, slope = totals / -count
    taken = normalize(x.to(mean.dtype), mean, variance, slope, offset, eps)
    scale = invstd if weight is None else invstd * weight
    return taken.add_(dy).mul_(per_channel(scale, x.dim())).to(x.dtype)


def per_channel(values: torch.Tensor, ndim: int) -> torch.Tensor:
    """A vector over channels in a shape that broadcasts with a tensor of ``ndim`` dims."""
    return values.reshape([-1] + [1] * (ndim - 2))
