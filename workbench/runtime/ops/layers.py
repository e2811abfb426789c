"""Convolutions, pooling, embedding."""

from __future__ import annotations

from workbench.runtime.ops.registry import Call, Resolution, equations, rule

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
