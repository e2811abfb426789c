"""Batch norm over the logical batch: one exchange of two numbers per channel in forward, of two sums in backward.

Each rank runs torch's kernels on its shard (``kernels/batch_norm``). The ranks gather the statistics of the shards and
combine them as in Chan, Golub and LeVeque (1979), on CPUs in 64 bits; shards may be uneven or empty. In backward, the
ranks add the two sums. Split channels need no exchange.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from workbench.core.layout import Shape
from workbench.core.sbp import Sbp, Split, broadcast, partial_sum
from workbench.kernels.batch_norm import (
    Shares,
    Statistics,
    combine,
    gradient_sums,
    in_one_space_dim,
    input_gradient,
    normalize,
    per_channel,
    shard_statistics,
)
from workbench.tensors.boxing.box import box_gradient, box_implicitly
from workbench.tensors.conversion import from_local
from workbench.tensors.dispatch.local_call import sum_terms
from workbench.tensors.dispatch.placeholder_calls import placeholder_outputs, recipe_of, write_placeholder
from workbench.tensors.dispatch.registry import Call, LocalFunction, Localize, Resolution, composite, rule
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, spec_of, wrap
from workbench.tensors.patch_table import patch
from workbench.tensors.rules.reduction.two_stage import needs_grad
from workbench.tensors.rules.reduction.variance import accumulation_dtype
from workbench.tensors.tensor_state import applying, new_placeholder, spread_zero


@rule("batch_norm")
def _batch_norm_frozen(call: Call) -> Resolution | None:
    """With given statistics, channels are independent."""
    if call.arg(5, "training", False) or len(call.shapes[0]) < 2 or any(len(shape) != 1 for shape in call.shapes[1:]):
        return None
    return Resolution(f"nc...{', c' * (len(call.operands) - 1)} -> nc...", of_one_sample(F.batch_norm), filled="nc")


def of_one_sample(function: LocalFunction) -> Localize:
    """A norm of samples and channels that is right for shards of one sample on CPUs, too."""

    def local(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        return function(in_one_space_dim(x), *args, **options).view(x.shape)

    return lambda call, inputs, outputs, letters: local if inputs[0].local_shape[0] == 1 else None


@composite("batch_norm")
def batch_norm(
    input: Any, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5, *_: Any,
) -> Any:  # fmt: skip
    """Batch norm with the statistics of the logical batch: data parallelism gives the numbers of one device."""
    if not training or input.dim() < 2:
        return NotImplemented
    shape = tuple(input.shape)
    count = math.prod(shape) // max(1, shape[1])
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    if 0 in shape or eps <= 0 or not fit_channels(shape, running_mean, running_var, weight, bias):
        return NotImplemented
    x = sum_terms(global_input(input, running_mean, running_var, weight, bias))
    layouts = _layouts_of(x)
    moved = (running_mean, running_var) if _can_move(running_mean, running_var, layouts) else None
    statistics = _statistics(x, layouts, eps, moved, momentum)
    if moved is None and (running_mean is not None or running_var is not None):
        with torch.no_grad(), local_torch():
            unbiased = statistics.unbiased(layouts.shares, eps)
        move_running(running_mean, wrap(statistics.mean, layouts.channel), momentum)
        move_running(running_var, wrap(unbiased, layouts.channel), momentum)
    return _normalized(x, statistics, weight, bias, eps, layouts)


def fit_channels(shape: Shape, running_mean: Any, running_var: Any, weight: Any, bias: Any) -> bool:
    """Whether all have one number per channel, or are None. Others are left to torch, which refuses most of them."""
    tensors = (running_mean, running_var, weight, bias)
    is_pair = (running_mean is None) == (running_var is None)
    return is_pair and all(tensor is None or tensor.shape == shape[1:2] for tensor in tensors)


@dataclass(frozen=True)
class _Layouts:
    """The layouts in which a batch norm of one spec is computed.

    Attributes:
        dtype: of the statistics.
        dims: the dims of the average.
        rows, all_rows: layouts of the shards' statistics, (shards, 2, channels): one row on the rank of the shard, and
            all on every rank.
        shares: the part of the batch in each shard.
        channel_terms, channel: layouts of a sum per channel: as terms of the shards, and added over the axes that split
            the batch, on all ranks that have the channel.
        grad_terms, grad_sums: the same for the gradient's two sums per channel. Along axes where the tensor is B its
            gradient has terms, before and after the sum.
    """

    dtype: torch.dtype
    dims: list[int]
    rows: Spec
    all_rows: Spec
    shares: Shares
    channel_terms: Spec
    channel: Spec
    grad_terms: Spec
    grad_sums: Spec


def _layouts_of(x: GlobalTensor) -> _Layouts:
    spec, dtype = x._spec, accumulation_dtype(x.dtype)
    key = ("batch_norm", spec, dtype)
    found: _Layouts | None = spec.plans.get(key)
    if found is None:
        found = spec.plans[key] = _make_layouts(spec, dtype)
    return found


def _make_layouts(spec: Spec, dtype: torch.dtype) -> _Layouts:
    shape, layout, world = spec.shape, spec.layout, spec.world
    dims = [dim for dim in range(len(shape)) if dim != 1]
    splits_batch = [isinstance(entry, Split) and entry != Split(1) for entry in layout.sbp]

    def placed(size: Shape, channels: Split, batch: Sbp, rest: Sbp) -> Spec:
        """The entries for axes that split the channels, for those that split the batch, and for the others."""
        entries = [batch if splits else rest for splits in splits_batch]
        entries = [channels if old == Split(1) else new for old, new in zip(layout.sbp, entries, strict=True)]
        return spec_of(world, layout.with_sbp(tuple(entries)), size)

    num_shards = math.prod(itertools.compress(layout.placement.shape, splits_batch))
    of_shards, pairs = (num_shards, 2, shape[1]), (2, shape[1])
    rows = placed(of_shards, Split(2), Split(0), broadcast)
    regions = {rows.layout.region(of_shards, rank)[0][0]: layout.region(shape, rank) for rank in layout.placement}
    counts = [math.prod(stop - start for start, stop in (regions[row][dim] for dim in dims)) for row in sorted(regions)]
    return _Layouts(
        dtype,
        dims,
        rows=rows,
        all_rows=placed(of_shards, Split(2), broadcast, broadcast),
        shares=Shares.of(counts, dtype, world.device),
        channel_terms=placed(shape[1:2], Split(0), partial_sum, broadcast),
        channel=placed(shape[1:2], Split(0), broadcast, broadcast),
        grad_terms=placed(pairs, Split(1), partial_sum, partial_sum),
        grad_sums=placed(pairs, Split(1), broadcast, partial_sum),
    )


def _can_move(running_mean: Any, running_var: Any, layouts: _Layouts) -> bool:
    """Whether every rank holds of the running statistics what it knows of the batch's, in the same dtype."""
    return all(
        type(running) is GlobalTensor and running._spec is layouts.channel and running.dtype == layouts.dtype
        for running in (running_mean, running_var)
    )


def _statistics(
    x: GlobalTensor, layouts: _Layouts, eps: float, moved: tuple[GlobalTensor, GlobalTensor] | None, momentum: float
) -> Statistics:
    """This rank's part of the statistics of the logical batch, without history; moves the running ones."""
    device, is_placeholder = x._spec.world.device, layouts.rows.is_placeholder
    with torch.no_grad():
        with local_torch():
            if is_placeholder:
                rows = new_placeholder(layouts.rows.shape, layouts.dtype, device)
            else:
                rows = shard_statistics(x, eps).unsqueeze(0)
        gathered = box_implicitly(wrap(rows, layouts.rows), layouts.all_rows.layout, "batch_norm")
        if is_placeholder:
            for running in moved or ():
                write_placeholder(running, [running])
            return Statistics(*(new_placeholder(layouts.channel.shape, layouts.dtype, device) for _ in range(3)))
        with local_torch():
            return combine(gathered, layouts.shares, eps, moved, momentum)


def _normalized(
    x: GlobalTensor, statistics: Statistics, weight: Any, bias: Any, eps: float, layouts: _Layouts
) -> GlobalTensor:
    spec = x._spec
    weight, bias = _on_channels(weight, x, layouts), _on_channels(bias, x, layouts)
    tag = spec.world.context.next_tag()
    site = None if spec.world.context.tracer is None else spec.world.context.tracer.site("batch_norm")
    with local_torch():
        if not spec.is_placeholder:
            return wrap(_apply(x, weight, bias, *statistics, eps, layouts, tag, site), spec)
        operands = [each for each in (x, weight, bias) if each is not None]
        info = (spec.shape, x.dtype, needs_grad(*operands))
        recipe = recipe_of(F.batch_norm, (x, None, None, weight, bias, True, 0.0, eps), {})
        return wrap(placeholder_outputs([info], operands, spec.world.device, recipe)[0], spec)


def _on_channels(weight: Any, x: GlobalTensor, layouts: _Layouts) -> GlobalTensor | None:
    """The part of a weight for a rank's channels."""
    if weight is None:
        return None
    if type(weight) is not GlobalTensor:
        weight = from_local(weight, x._spec.world, x._spec.layout)
    return box_implicitly(weight, layouts.channel.layout, "batch_norm")


class _BatchNorm(torch.autograd.Function):
    """The output from given statistics, with a gradient that includes the dependence of the statistics on the input."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, variance: torch.Tensor | None,
        invstd: torch.Tensor, eps: float, layouts: _Layouts, tag: int, site: Any,
    ) -> torch.Tensor:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, mean, variance, invstd)
        ctx.call, ctx.dtypes = (eps, layouts, tag | 1, site), [t if t is None else t.dtype for t in (weight, bias)]
        statistics = Statistics(mean, variance, invstd)
        return normalize(x, statistics, _in(weight, mean.dtype), _in(bias, mean.dtype), eps)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, weight, *saved), (eps, layouts, tag, site) = ctx.saved_tensors, ctx.call
        with local_torch():
            # A rank without a gradient adds zeros: the other ranks wait for its sums.
            dy = spread_zero(x.shape, x.dtype, x.device) if grads[0] is None else grads[0]
            if torch.is_grad_enabled():
                dx, (of_bias, of_weight) = _gradients(dy, x, weight, eps, layouts, tag, site)
            else:
                statistics, weight = Statistics(*saved), _in(weight, saved[0].dtype)
                sums, of_bias, of_weight = gradient_sums(dy, x, statistics, weight)
                dx = None
                if ctx.needs_input_grad[0]:
                    totals = box_gradient(sums, layouts.grad_terms, layouts.grad_sums, tag, site)
                    dx = input_gradient(dy, x, statistics, weight, eps, totals, layouts.shares)
            of_weight, of_bias = (
                None if dtype is None else found.to(dtype)
                for dtype, found in zip(ctx.dtypes, (of_weight, of_bias), strict=True)
            )
        return dx, of_weight, of_bias, None, None, None, None, None, None, None


def _in(weight: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if weight is None else weight.to(dtype)


_apply = applying(_BatchNorm)


def _gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float, layouts: _Layouts, tag: int, site: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the shard, bias and weight, as functions that can be differentiated again."""
    dims, ndim, dtype = layouts.dims, x.dim(), x.dtype
    x, dy = x.to(layouts.dtype), dy.to(layouts.dtype)

    def mean_of(t: torch.Tensor) -> torch.Tensor:
        total = box_gradient(t.sum(dims), layouts.channel_terms, layouts.channel, tag, site)
        return per_channel(total / layouts.shares.total, ndim)

    off = x - mean_of(x)
    invstd = torch.rsqrt(mean_of(off.square()) + eps)
    normal = off * invstd
    sums = torch.stack([dy.sum(dims), (dy * normal).sum(dims)])
    totals = box_gradient(sums, layouts.grad_terms, layouts.grad_sums, tag, site) / layouts.shares.total
    off = dy - per_channel(totals[0], ndim) - normal * per_channel(totals[1], ndim)
    scale = invstd if weight is None else invstd * per_channel(weight, ndim)
    return (off * scale).to(dtype), sums


def global_input(input: Any, *others: Any) -> GlobalTensor:
    """A plain input beside a global tensor, as a global one: a rule would move copies of the running statistics."""
    if type(input) is GlobalTensor:
        return input
    spec = next(other._spec for other in others if type(other) is GlobalTensor)
    return from_local(input, spec.world, spec.layout)


def move_running(running: Any, batch: Any, momentum: float) -> None:
    """Move a running statistic, one number per channel, towards the batch's."""
    if running is None:
        return
    with torch.no_grad():
        if batch.dtype != running.dtype:
            batch = batch.to(running.dtype)
        if type(running) is GlobalTensor:
            batch = box_implicitly(batch, sum_terms(running)._spec.layout, "batch_norm")
        running.lerp_(batch, momentum)


def _of_the_whole_batch(torchs_own: Any) -> Any:
    @functools.wraps(torchs_own)
    def forward(self: Any, input: Any) -> Any:
        return (nn.BatchNorm1d.forward if isinstance(input, GlobalTensor) else torchs_own)(self, input)

    return forward


patch(
    "torch.nn.SyncBatchNorm.forward",
    "it sums over processes what has the statistics of the whole batch already, and refuses CPUs",
    _of_the_whole_batch,
)
