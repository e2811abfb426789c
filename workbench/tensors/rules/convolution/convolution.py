"""Convolutions, transposed convolutions, and their patches. Space stays whole, because a kernel slides over it."""

from __future__ import annotations

from typing import Any

import torch

from workbench.core.layout import balanced_bounds
from workbench.core.rules import Signature, signatures
from workbench.core.sbp import Split, broadcast, partial_sum
from workbench.tensors.dispatch.registry import Call, LocalFunction, Resolution, equations, rule
from workbench.tensors.global_tensor import Spec
from workbench.tensors.rules.reduction.empty_shards import zeros, zeros_and_bias
from workbench.tensors.rules.views.view import windows

_SPATIAL = "XYZ"
_KERNEL = "KLM"
_GROUPS_AT = 6
"""Position of ``groups``, in convolutions and in transposed ones."""


@rule("conv1d", "conv2d", "conv3d")
def _convolution(call: Call) -> Resolution:
    return _over_space(call, weight="oc", grouped_weight="OD")


@rule(
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"
)  # fmt: skip
def _transposed(call: Call) -> Resolution:
    return _over_space(call, weight="co", grouped_weight="CD")


equations("conv_tbc", "Xnc, Kco, +o -> Xno")


def _over_space(call: Call, weight: str, grouped_weight: str) -> Resolution:
    """Batch, output channels and input channels may be split (the result is a sum over input channels); groups as whole
    groups.
    """
    num_spatial = len(call.shapes[1]) - 2
    space, kernel = _SPATIAL[:num_spatial], _KERNEL[:num_spatial]
    batch = "n" if len(call.shapes[0]) == num_spatial + 2 else ""
    if call.arg(_GROUPS_AT, "groups", 1) != 1:
        return _grouped(call, f"{batch}C{space}, {grouped_weight}{kernel}, O -> {batch}O{space}", channel=len(batch))
    return Resolution(f"{batch}c{space}, {weight}{kernel}, +o -> {batch}o{space}", _localize)


def _grouped(call: Call, text: str, channel: int) -> Resolution:
    """A slice of the channels with whole groups is a convolution with fewer groups."""
    found = list(signatures(text, call.shapes, [len(call.outputs[0][0])]))
    if _slices_hold_groups(call, call.shapes[0][channel], call.outputs[0][0][channel]):
        bias = (Split(0),) * (len(call.operands) - 2)
        found.insert(0, Signature((Split(channel), Split(0), *bias), (Split(channel),), "g"))
    return Resolution(found, _localize)


def _slices_hold_groups(call: Call, num_in: int, num_out: int) -> bool:
    groups = call.arg(_GROUPS_AT, "groups", 1)
    placement = call.operands[0]._spec.layout.placement
    if groups % placement.num_ranks == 0 or num_in == num_out == groups:
        return True
    if placement.num_axes > 1:
        return False
    starts = [
        [start / (size // groups) for start, _ in balanced_bounds(size, placement.num_ranks)]
        for size in (num_in, num_out)
    ]
    return starts[0] == starts[1] and all(start.is_integer() for start in starts[0])


def _localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction | None:
    """Convolve with this rank's number of groups; a rank without a channel returns zeros and the bias."""
    function: Any = call.func
    if any(0 in spec.local_shape for spec in inputs):
        return zeros_and_bias(call, outputs, bias_at=2, num_after=len(call.shapes[1]) - 2)
    if "g" not in letters:
        return None
    num_channels = call.shapes[0][-(len(call.shapes[1]) - 1)]
    own = inputs[0].local_shape[-(len(call.shapes[1]) - 1)]
    groups = call.arg(_GROUPS_AT, "groups", 1) * own // num_channels

    def convolve(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) > _GROUPS_AT:
            args = (*args[:_GROUPS_AT], groups, *args[_GROUPS_AT + 1 :])
        else:
            kwargs = {**kwargs, "groups": groups}
        return function(*args, **kwargs)

    return convolve


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
