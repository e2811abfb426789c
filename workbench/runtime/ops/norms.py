"""Norms: layer, rms, group, instance, batch."""

from __future__ import annotations

from typing import Any

import torch

from workbench.runtime.ops.equation_text import term
from workbench.runtime.ops.local import whole
from workbench.runtime.ops.registry import Call, Resolution, composite, rule
from workbench.runtime.tensor import GlobalTensor


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
