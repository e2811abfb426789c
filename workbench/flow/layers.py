"""Layers of job functions. They make their variables by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from workbench.core.sbp import Sbp
from workbench.flow.initializers import Initializer
from workbench.flow.jobs.context import in_scope, running_job
from workbench.flow.jobs.variables import get_variable
from workbench.flow.nn import functions
from workbench.flow.nn.padding import pair

__all__ = ["conv2d", "dense"]

Activation = Callable[[Any], Any]


def dense(
    inputs: Any,
    units: int,
    activation: Activation | None = None,
    use_bias: bool = True,
    kernel_initializer: Initializer | None = None,
    bias_initializer: Initializer | None = None,
    trainable: bool = True,
    name: str | None = None,
    model_distribute: Sbp | None = None,
) -> Any:
    """``activation(inputs @ weight.T + bias)`` over the last dim of ``inputs``.

    Args:
        units: number of output features.
        name: name of the layer. Its variables are ``name-weight`` (units, in) and ``name-bias`` (units,). The default
            is ``job-Dense_0`` and so on.
        model_distribute: sbp of both variables on the devices of the scope. ``flow.distribute.split(axis=0)`` splits
            the units: every device computes some columns of the result for all rows.

    ``hidden = flow.layers.dense(x, 512, activation=flow.nn.relu, kernel_initializer=flow.truncated_normal(0.1))``
    """
    job = running_job("layers.dense")
    name = name or job.own_name("Dense")
    shape = (units, inputs.shape[-1])
    weight = get_variable(
        f"{name}-weight", shape, inputs.dtype, kernel_initializer, trainable=trainable, distribute=model_distribute
    )
    output = _linear(inputs, weight)
    if use_bias:
        bias = get_variable(
            f"{name}-bias", (units,), inputs.dtype, bias_initializer, trainable=trainable, distribute=model_distribute
        )
        output = _add(output, bias)
    return activation(output) if activation else output


def conv2d(
    inputs: Any,
    filters: int,
    kernel_size: int | Sequence[int] = 1,
    strides: int | Sequence[int] = 1,
    padding: Any = "VALID",
    data_format: str = "NCHW",
    dilation_rate: int | Sequence[int] = 1,
    groups: int = 1,
    activation: Activation | None = None,
    use_bias: bool = True,
    kernel_initializer: Initializer | None = None,
    bias_initializer: Initializer | None = None,
    trainable: bool = True,
    name: str | None = None,
) -> Any:
    """Convolution of images, and a bias for each channel.

    Args:
        filters: number of output channels.
        padding: ``"SAME"``, ``"VALID"``, or (before, after) for each dim.
        name: name of the layer. Its variables are ``name-weight`` (filters, in, height, width) and ``name-bias``
            (filters,).

    ``conv = flow.layers.conv2d(images, 32, 5, padding="SAME", activation=flow.nn.relu)`` keeps height and width.
    """
    job = running_job("layers.conv2d")
    name = name or job.own_name("Conv2d")
    channels = inputs.shape[1 if data_format == "NCHW" else 3]
    shape = (filters, channels // groups, *pair(kernel_size))
    weight = get_variable(f"{name}-weight", shape, inputs.dtype, kernel_initializer, trainable=trainable)
    output = functions.conv2d(inputs, weight, strides, padding, data_format, dilation_rate, groups)
    if use_bias:
        bias = get_variable(f"{name}-bias", (filters,), inputs.dtype, bias_initializer, trainable=trainable)
        output = functions.bias_add(output, bias, data_format)
    return activation(output) if activation else output


_linear, _add = in_scope(torch.nn.functional.linear), in_scope(torch.add)
