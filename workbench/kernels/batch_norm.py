"""The local part of global batch norm, for one shard, with torch's own kernels.

The ranks exchange the results of ``shard_statistics``; ``combine`` makes those of the batch from them, and moves the
running statistics; ``normalize`` computes the output. In backward, the sums of ``gradient_sums`` are summed over the
ranks, and ``input_gradient`` computes the gradient of the shard from the totals:

    dx = weight * invstd * (dy - sum(dy) / n - xhat * sum(dy * xhat) / n),   xhat = (x - mean) * invstd

(Ioffe and Szegedy, arXiv 1502.03167, section 3; torch.nn.SyncBatchNorm exchanges the same sums.) Channels are dim 1.

On GPUs the kernels are those of SyncBatchNorm: each function is one launch, but for the two that join what is
exchanged. They exchange ``invstd = 1 / sqrt(variance + eps)`` in place of variances, and sums of ``dy * (x - mean)``.
On CPUs torch has none of these, and its training kernel adds one number after another; torch's vectorized reductions
take a quarter of its time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from workbench.kernels.launch import accumulator

_backward = torch.ops.aten.native_batch_norm_backward.default
_HOSTS = frozenset({"cpu", "meta"})
"""Types of devices that lack the kernels of SyncBatchNorm."""


class Shares(NamedTuple):
    """The part of the batch in each shard, in the order of the rows of statistics. On the device of the shards.

    Attributes:
        fractions: of the elements of a channel; (shards, 1), 64 bits.
        counts: elements of a channel; (shards,), in the dtype of the statistics.
        int_counts: the same, of 32 bits.
        total: elements per channel of the batch.
    """

    fractions: torch.Tensor
    counts: torch.Tensor
    int_counts: torch.Tensor
    total: int

    @classmethod
    def of(cls, counts: list[int], dtype: torch.dtype, device: torch.device) -> Shares:
        """From the elements per channel of each shard, for statistics of ``dtype``."""
        exact = torch.tensor(counts, dtype=torch.float64)
        fractions = (exact / sum(counts)).unsqueeze(1)
        return cls(fractions.to(device), exact.to(device, dtype), exact.to(device, torch.int32), sum(counts))


class Statistics(NamedTuple):
    """Statistics of each channel of the batch, (channels,).

    Attributes:
        variance: None on GPUs.
        invstd: ``1 / sqrt(variance + eps)``.
    """

    mean: torch.Tensor
    variance: torch.Tensor | None
    invstd: torch.Tensor

    def unbiased(self, shares: Shares, eps: float) -> torch.Tensor:
        """The unbiased variance."""
        variance = self.invstd**-2 - eps if self.variance is None else self.variance
        return variance * (shares.total / (shares.total - 1))


Running = tuple[torch.Tensor, torch.Tensor]
"""Running mean and variance."""


def _has_kernels(x: torch.Tensor) -> bool:
    return x.device.type not in _HOSTS


def shard_statistics(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Mean and variance, on GPUs mean and ``invstd``, of each channel of ``x`` (samples, channels, ...).

    Returns:
        (2, channels), of at least 32 bits. Any finite numbers for a shard without samples, whose share is zero.

    >>> shard_statistics(torch.tensor([[1.0], [3.0]]), 1e-5).flatten().tolist()
    [2.0, 1.0]
    """
    dtype = accumulator(x.dtype)
    if x.numel() == 0:
        return torch.ones((2, x.shape[1]), dtype=dtype, device=x.device)
    if _has_kernels(x):
        return torch.stack(torch.batch_norm_stats(x, eps))
    dims = [0, *range(2, x.dim())]
    x = x.to(dtype)
    mean = x.mean(dims)
    return torch.stack([mean, (x - per_channel(mean, x.dim())).square_().mean(dims)])


def combine(rows: torch.Tensor, shares: Shares, eps: float, running: Running | None, momentum: float) -> Statistics:
    """The statistics of the batch, from those of its shards.

    Args:
        rows: results of ``shard_statistics``, (shards, 2, channels).
        running: statistics of the dtype of ``rows``, which are moved towards the batch's.

    >>> rows, shares = torch.tensor([[[2.0], [1.0]], [[5.0], [0.0]]]), Shares.of([2, 1], torch.float32, "cpu")
    >>> [round(float(t), 3) for t in combine(rows, shares, 0.0, None, 0.1)[:2]]
    [3.0, 2.667]
    """
    means, spreads = rows.unbind(1)
    if _has_kernels(rows) and rows.shape[2]:
        running_mean, running_var = running or (None, None)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            means, means, spreads, running_mean, running_var, momentum, eps, shares.counts
        )
        if running is not None:
            torch.autograd.graph.increment_version(t for t in running if not t.is_inference())
        return Statistics(mean, None, invstd)
    mean = (means * shares.fractions).sum(0)
    variance = (means - mean).square_().add_(spreads).mul_(shares.fractions).sum(0)
    if running is not None:
        unbiased = variance * (shares.total / (shares.total - 1))
        for old, new in zip(running, (mean, unbiased), strict=True):
            old.lerp_(new.to(old.dtype), momentum)
    mean, variance = mean.to(rows.dtype), variance.to(rows.dtype)
    return Statistics(mean, variance, torch.rsqrt(variance + eps))


def normalize(
    x: torch.Tensor, statistics: Statistics, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """``(x - mean) * invstd * weight + bias``, in the dtype of ``x``. Weight and bias are of the statistics' dtype."""
    mean, variance, invstd = statistics
    if x.numel() == 0:
        return torch.empty_like(x)
    if variance is None:
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, eps)
    return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]


def gradient_sums(
    dy: torch.Tensor, x: torch.Tensor, statistics: Statistics, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums per channel of a shard.

    Returns:
        the two sums that the ranks add, (2, channels); the gradients of bias and weight (where there is no weight, any
        tensor).
    """
    mean, variance, invstd = statistics
    if x.numel() == 0:
        sums = mean.new_zeros((2, len(mean)))
        return sums, *sums
    if variance is None:
        has_weight = weight is not None
        found = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, has_weight, False)
        return torch.stack(found[:2]), found[0], found[2]
    # The training kernel computes the sums only, from the given statistics.
    dy, x = in_one_space_dim(dy), in_one_space_dim(x)
    _, of_weight, of_bias = _backward(dy, x, None, None, None, mean, invstd, True, 0.0, [False, True, True])
    sums = torch.stack([of_bias, of_weight]).to(mean.dtype)
    return sums, *sums


def input_gradient(
    dy: torch.Tensor, x: torch.Tensor, statistics: Statistics, weight: torch.Tensor | None, eps: float,
    totals: torch.Tensor, shares: Shares,
) -> torch.Tensor:  # fmt: skip
    """The gradient of the shard ``x``. ``totals`` are the sums of ``gradient_sums``, summed over the ranks."""
    mean, variance, invstd = statistics
    if x.numel() == 0:
        return torch.empty_like(x)
    if variance is None:
        return torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, totals[0], totals[1], shares.int_counts)
    # -(sum(dy) + xhat * sum(dy * xhat)) / n normalizes x again, with the totals as weight and bias.
    offset, slope = totals / -shares.total
    taken = normalize(x.to(mean.dtype), statistics, slope, offset, eps)
    scale = invstd if weight is None else invstd * weight
    return taken.add_(dy).mul_(per_channel(scale, x.dim())).to(x.dtype)


def in_one_space_dim(x: torch.Tensor) -> torch.Tensor:
    """One sample (1, channels, positions), which torch's kernels for CPUs normalize right in backward, too.

    With more dims they take a sample whose channels lie together for channels last, and mix up its numbers with those
    of one that lies otherwise (torch 2.13; channels lie together behind ``flatten(2).transpose(1, 2)``). A batch of
    several samples is left as it is.
    """
    return x.flatten(2) if len(x) == 1 and x.dim() > 3 else x


def per_channel(values: torch.Tensor, ndim: int) -> torch.Tensor:
    """A vector over channels in a shape that broadcasts with a tensor of ``ndim`` dims."""
    return values.reshape([-1] + [1] * (ndim - 2))
