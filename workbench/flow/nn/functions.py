"""Functions of layers. In a job they run on the devices of its scope, outside of jobs on those of their operands.

Names and arguments are those of the older documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from workbench.core.layout import Layout
from workbench.core.sbp import Split
from workbench.flow.jobs.context import in_scope, running
from workbench.flow.nn.padding import Pads, edges, pad_window, pair, to_channels_first, to_channels_last
from workbench.tensors import random


@in_scope
def leaky_relu(x: Any, alpha: float = 0.2) -> Any:
    """``x`` above zero, ``alpha * x`` below."""
    return F.leaky_relu(x, alpha)


@in_scope
def softmax(logits: Any, axis: int = -1) -> Any:
    """Exponentials that sum to one along ``axis``."""
    return torch.softmax(logits, axis)


@in_scope
def bias_add(value: Any, bias: Any, data_format: str = "NCHW") -> Any:
    """Add ``bias`` along the channels: dim 1 for ``"NCHW"``, the last dim for ``"NHWC"``."""
    if data_format == "NHWC" or value.dim() <= 2:
        return value + bias
    return value + bias.reshape([-1] + [1] * (value.dim() - 2))


@in_scope
def conv2d(
    input: Any,
    filters: Any,
    strides: int | Sequence[int] = 1,
    padding: str | Pads = "VALID",
    data_format: str = "NCHW",
    dilations: int | Sequence[int] = 1,
    groups: int = 1,
) -> Any:
    """Convolution with ``filters`` (out, in, height, width).

    ``padding="SAME"`` gives ``ceil(size / stride)`` outputs. An odd padding adds one more row after the image than
    before it; ``"SAME_LOWER"`` adds it before the image.
    """
    x = to_channels_first(input, data_format)
    strides, dilations = pair(strides), pair(dilations)
    pads = edges(padding, x.shape[2:], filters.shape[2:], strides, dilations, data_format)
    if pads.is_even:
        y = F.conv2d(x, filters, None, strides, pads.before, dilations, groups)
    else:
        y = F.conv2d(pad_window(x, pads, 0.0), filters, None, strides, 0, dilations, groups)
    return to_channels_last(y, data_format)


@in_scope
def max_pool2d(
    input: Any,
    ksize: int | Sequence[int],
    strides: int | Sequence[int],
    padding: str | Pads,
    data_format: str = "NCHW",
) -> Any:
    """Maximum over windows. Padding does not count."""
    x = to_channels_first(input, data_format)
    ksize, strides = pair(ksize), pair(strides)
    pads = edges(padding, x.shape[2:], ksize, strides, (1, 1), data_format)
    padded = x if pads.is_zero else pad_window(x, pads, float("-inf"))
    return to_channels_last(F.max_pool2d(padded, ksize, strides), data_format)


@in_scope
def avg_pool2d(
    input: Any,
    ksize: int | Sequence[int],
    strides: int | Sequence[int],
    padding: str | Pads,
    data_format: str = "NCHW",
) -> Any:
    """Mean over windows, of the elements inside the image."""
    x = to_channels_first(input, data_format)
    ksize, strides = pair(ksize), pair(strides)
    pads = edges(padding, x.shape[2:], ksize, strides, (1, 1), data_format)
    if pads.is_zero:
        return to_channels_last(F.avg_pool2d(x, ksize, strides), data_format)
    inside = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype)
    share = F.avg_pool2d(pad_window(inside, pads, 0.0), ksize, strides).to(x.device)
    return to_channels_last(F.avg_pool2d(pad_window(x, pads, 0.0), ksize, strides) / share, data_format)


@in_scope
def dropout(x: Any, rate: float = 0.5, noise_shape: Any = None, seed: int | None = None) -> Any:
    """In training jobs, set a share ``rate`` of the elements to zero and scale the others. In other jobs, return ``x``.

    The job, its step and the logical positions decide which elements are zero. So they are the same for every number of
    devices and in both views.

    Raises:
        ValueError: ``rate`` is outside of [0, 1).
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout(rate={rate}): the share of elements to drop is from 0 to below 1, e.g. 0.5.")
    job = running.get()
    if job is None:
        return F.dropout(x, rate)
    if not job.trains or rate == 0.0:
        return x
    if not job.is_mirrored:
        return F.dropout(x, rate)
    return x * _own_mask(x, rate, job)


def _own_mask(x: torch.Tensor, rate: float, job: Any) -> torch.Tensor:
    """This device's rows of the mask of the whole batch. Moves no data."""
    world, devices = job.store.world, job.placement.num_ranks
    shape = (x.shape[0] * devices, *x.shape[1:])
    layout = Layout(job.placement, (Split(0),))
    kept = random.sample_shard(
        random.bernoulli_sampler(1.0 - rate), random.draw_key(world), layout, shape, x.dtype, world
    )
    return kept / (1.0 - rate)


@in_scope
def sparse_softmax_cross_entropy_with_logits(labels: Any, logits: Any) -> Any:
    """Cross-entropy of each row: ``logits`` (rows, classes), ``labels`` (rows,) of whole numbers. Shape (rows,)."""
    return F.cross_entropy(logits, labels.long(), reduction="none")


@in_scope
def softmax_cross_entropy_with_logits(labels: Any, logits: Any) -> Any:
    """Cross-entropy of each row, for ``labels`` (rows, classes) of probabilities. Shape (rows,)."""
    return -(labels * torch.log_softmax(logits, -1)).sum(-1)


@in_scope
def sigmoid_cross_entropy_with_logits(labels: Any, logits: Any) -> Any:
    """Binary cross-entropy of each element."""
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
