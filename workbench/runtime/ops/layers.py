"""Convolutions, pooling, norms, embedding."""

from __future__ import annotations

from typing import Any

import torch

from workbench.core.sbp import Partial, broadcast
from workbench.runtime.boxing import box_implicitly
from workbench.runtime.ops.equation_text import term
from workbench.runtime.ops.registry import Call, Resolution, composite, equations, rule
from workbench.runtime.tensor import GlobalTensor

_SPATIAL = "XYZ"
_KERNEL = "KLM"


@rule("conv1d", "conv2d", "conv3d", parameters="input weight bias stride padding dilation groups")
def _convolution(call: Call) -> Resolution:
    """Batch, output channels and input channels split; with groups, only the batch. Space stays whole."""
    num_spatial = int(call.name[4])
    space, kernel = _SPATIAL[:num_spatial], _KERNEL[:num_spatial]
    batch = "n" if len(call.shapes[0]) == num_spatial + 2 else ""
    if call.arg(6, "groups", 1) != 1:
        return Resolution(f"{batch}C{space}, OD{kernel}, O -> {batch}O{space}")
    return Resolution(f"{batch}c{space}, oc{kernel}, +o -> {batch}o{space}", filled="co")


equations(
    "max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d lp_pool1d max_pool1d_with_indices",
    "...cX -> ...cX, ...cX",
    filled="c",
)
equations(
    "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d lp_pool2d max_pool2d_with_indices",
    "...cXY -> ...cXY, ...cXY",
    filled="c",
)
equations(
    "max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d lp_pool3d max_pool3d_with_indices",
    "...cXYZ -> ...cXYZ, ...cXYZ",
    filled="c",
)


@rule("layer_norm", "rms_norm", parameters="input normalized_shape weight bias eps")
def _layer_norm(call: Call) -> Resolution:
    ndim, num_normalized = len(call.shapes[0]), len(call.args[1])
    whole = range(ndim - num_normalized, ndim)
    rest = term(ndim, whole)
    weight = rest[ndim - num_normalized :]
    return Resolution(f"{rest}{f', {weight}' * (len(call.operands) - 1)} -> {rest}")


@rule("group_norm", "instance_norm", parameters="input num_groups weight bias eps")
def _group_norm(call: Call) -> Resolution | None:
    if call.name == "instance_norm":
        return None
    rest = term(len(call.shapes[0]), whole=range(1, len(call.shapes[0])))
    return Resolution(f"{rest}{', B' * (len(call.operands) - 1)} -> {rest}")


@rule("batch_norm", parameters="input running_mean running_var weight bias training momentum eps")
def _batch_norm_frozen(call: Call) -> Resolution | None:
    """With given statistics every channel is on its own."""
    if call.arg(5, "training", False):
        return None
    return Resolution(f"nc...{', c' * (len(call.operands) - 1)} -> nc...")


@composite("batch_norm")
def batch_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    """Batch norm from the moments of the logical batch, so that data parallelism gives one device's numbers."""
    if not training or not isinstance(input, GlobalTensor):
        return NotImplemented
    dims = [dim for dim in range(input.dim()) if dim != 1]
    count = input.numel() // input.shape[1]
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
    mean = whole(input.mean(dims, keepdim=True))
    centered = input - mean
    variance = whole((centered * centered).mean(dims, keepdim=True))
    if running_mean is not None:
        with torch.no_grad():
            running_mean.mul_(1 - momentum).add_(mean.detach().flatten(), alpha=momentum)
            running_var.mul_(1 - momentum).add_(variance.detach().flatten(), alpha=momentum * count / (count - 1))
    result = centered * torch.rsqrt(variance + eps)
    per_channel = [1, -1, *[1] * (input.dim() - 2)]
    if weight is not None:
        result = result * weight.view(per_channel)
    return result if bias is None else result + bias.view(per_channel)


def whole(tensor: Any) -> GlobalTensor:
    """``tensor`` with its partial sums summed."""

    layout = tensor._spec.layout
    sbp = tuple(broadcast if isinstance(entry, Partial) else entry for entry in layout.sbp)
    return box_implicitly(tensor, layout.with_sbp(sbp), "batch_norm")


@rule("embedding", parameters="input weight padding_idx max_norm norm_type scale_grad_by_freq sparse")
def _embedding(call: Call) -> Resolution | None:
    """Any dim of the indices, or the width of the table. The rows stay whole."""
    tensors = {id(operand): operand for operand in call.operands}
    if call.arg(3, "max_norm") is not None or call.arg(5, "scale_grad_by_freq", False) or len(tensors) != 2:
        return None
    if call.operands[0].dtype.is_floating_point:  # torch.embedding(weight, indices)
        return Resolution("Ve, ... -> ...e")
    return Resolution("..., Ve -> ...e")


@rule("one_hot")
def _one_hot(call: Call) -> Resolution | None:
    return Resolution("... -> ...C") if call.arg(1, "num_classes", -1) > 0 else None
