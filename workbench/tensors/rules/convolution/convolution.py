"""Convolutions, transposed convolutions, and their patches. Space stays whole, because a kernel slides over it."""

from __future__ import annotations

import torch

from workbench.core.rules import Signature
from workbench.core.sbp import Split, broadcast, partial_sum
from workbench.tensors.dispatch.registry import Call, LocalFunction, Resolution, equations, rule
from workbench.tensors.global_tensor import Spec
from workbench.tensors.rules.convolution.grouped import GROUPS_AT, grouped
from workbench.tensors.rules.reduction.empty_shards import zeros, zeros_and_bias
from workbench.tensors.rules.views.view import windows

_SPATIAL = "XYZ"
_KERNEL = "KLM"


@rule("conv1d", "conv2d", "conv3d")
def _convolution(call: Call) -> Resolution:
    return _over_space(call, is_transposed=False)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(call: Call) -> Resolution:
    return _over_space(call, is_transposed=True)


equations("conv_tbc", "Xnc, Kco, +o -> Xno")


def _over_space(call: Call, is_transposed: bool) -> Resolution:
    """Batch, output channels and input channels may be split (the result is a sum over input channels)."""
    num_spatial = len(call.shapes[1]) - 2
    space, kernel = _SPATIAL[:num_spatial], _KERNEL[:num_spatial]
    batch = "n" if len(call.shapes[0]) == num_spatial + 2 else ""
    if call.arg(GROUPS_AT, "groups", 1) != 1:
        weight = "CD" if is_transposed else "OD"
        text = f"{batch}C{space}, {weight}{kernel}, O -> {batch}O{space}"
        return grouped(call, text, len(batch), is_transposed)
    weight = "co" if is_transposed else "oc"
    return Resolution(f"{batch}c{space}, {weight}{kernel}, +o -> {batch}o{space}", _localize)


def _localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction | None:
    """A rank without a channel returns zeros and the bias."""
    if any(0 in spec.local_shape for spec in inputs):
        return zeros_and_bias(call, outputs, bias_at=2, num_after=len(call.shapes[1]) - 2)
    return None


@rule("unfold", "im2col")
def _patches(call: Call) -> Resolution:
    """Image to columns. Batch may be split, and channels if their slices are slices of the columns. Linear."""
    if call.func is torch.Tensor.unfold:
        return windows(call)
    return _by_channel(call, call.shapes[0], call.outputs[0][0], channel_at=(-3, -2))


@rule("fold", "col2im")
def _folded(call: Call) -> Resolution:
    """Columns to image."""
    return _by_channel(call, call.shapes[0], call.outputs[0][0], channel_at=(-2, -3))


def _by_channel(
    call: Call, source: tuple[int, ...], target: tuple[int, ...], channel_at: tuple[int, int]
) -> Resolution:
    before, after = len(source) + channel_at[0], len(target) + channel_at[1]
    found = [Signature((partial_sum,), (partial_sum,)), Signature((broadcast,), (broadcast,))]
    placement = call.operands[0]._spec.layout.placement
    sizes = (source[before], target[after])
    if all(size % placement.num_ranks == 0 for size in sizes):
        found.insert(0, Signature((Split(before),), (Split(after),), "c"))
    if before == 1:
        found.insert(0, Signature((Split(0),), (Split(0),), "n"))
    return Resolution(found, lambda call, inputs, outputs, letters: _empty(call, inputs, outputs))


def _empty(call: Call, inputs: list[Spec], outputs: list[Spec]) -> LocalFunction | None:
    return zeros(call, outputs) if any(0 in spec.local_shape for spec in inputs) else None
