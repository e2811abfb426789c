"""Initial values of variables, by logical position: the same numbers for every layout and every number of devices.

Names and defaults are those of the older documents; ``truncated_normal(0.1)`` cuts at two standard deviations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench.tensors import random
from workbench.tensors.random import Sampler

_STD_OF_TRUNCATED = 0.87962566103423978
"""Standard deviation of a standard normal number cut at two."""


@dataclass(frozen=True)
class Initializer:
    """A distribution for a variable: shape -> sampler; or a number, which fills the variable."""

    sampler: Callable[[tuple[int, ...]], Sampler] | float


def constant_initializer(value: float = 0.0, dtype: Any = None) -> Initializer:
    """Every element is ``value``; the variable's dtype is its own."""
    return Initializer(float(value))


def zeros_initializer(dtype: Any = None) -> Initializer:
    """Zeros."""
    return constant_initializer(0.0)


def ones_initializer(dtype: Any = None) -> Initializer:
    """Ones."""
    return constant_initializer(1.0)


def random_normal_initializer(
    mean: float = 0.0, stddev: float = 1.0, seed: Any = None, dtype: Any = None
) -> Initializer:
    """Normal numbers."""
    return Initializer(lambda shape: random.normal_sampler(mean, stddev))


def random_uniform_initializer(minval: float = 0.0, maxval: float = 1.0, dtype: Any = None) -> Initializer:
    """Uniform numbers in [minval, maxval)."""
    return Initializer(lambda shape: random.uniform_sampler(minval, maxval))


def truncated_normal_initializer(mean: float = 0.0, stddev: float = 1.0) -> Initializer:
    """Normal numbers within two standard deviations of the mean."""
    return Initializer(lambda shape: random.truncated_normal_sampler(mean, stddev))


def truncated_normal(stddev: float = 1.0) -> Initializer:
    """Normal numbers around zero, within two standard deviations."""
    return truncated_normal_initializer(0.0, stddev)


def variance_scaling_initializer(
    scale: float = 1.0, mode: str = "fan_in", distribution: str = "truncated_normal", data_format: str = "NCHW"
) -> Initializer:
    """Numbers whose variance is ``scale`` over the fan of the variable. Its dim 0 is the outputs of the layer.

    Args:
        mode: ``fan_in``, ``fan_out`` or ``fan_avg``.
        distribution: ``truncated_normal``, ``random_normal`` or ``random_uniform``.
    """
    modes = {"fan_in": (1.0, 0.0), "fan_out": (0.0, 1.0), "fan_avg": (0.5, 0.5)}
    made = {
        "truncated_normal": lambda std: random.truncated_normal_sampler(0.0, std / _STD_OF_TRUNCATED),
        "random_normal": lambda std: random.normal_sampler(0.0, std),
        "random_uniform": lambda std: random.uniform_sampler(-std * math.sqrt(3), std * math.sqrt(3)),
    }
    if mode not in modes or distribution not in made:
        raise ValueError(
            f"variance_scaling_initializer(mode={mode!r}, distribution={distribution!r}): modes are "
            f"{', '.join(modes)}, distributions {', '.join(made)}."
        )

    def sampler(shape: tuple[int, ...]) -> Sampler:
        fan_in, fan_out = _fans(shape, data_format)
        fan = modes[mode][0] * fan_in + modes[mode][1] * fan_out
        return made[distribution](math.sqrt(scale / max(1.0, fan)))

    return Initializer(sampler)


def glorot_uniform_initializer(data_format: str = "NCHW") -> Initializer:
    """Uniform numbers. Their variance is one over the mean of inputs and outputs (Glorot and Bengio 2010)."""
    return variance_scaling_initializer(1.0, "fan_avg", "random_uniform", data_format)


def glorot_normal_initializer(data_format: str = "NCHW") -> Initializer:
    """Normal numbers cut at two standard deviations, with the variance of ``glorot_uniform_initializer``."""
    return variance_scaling_initializer(1.0, "fan_avg", "truncated_normal", data_format)


xavier_uniform_initializer = glorot_uniform_initializer
xavier_normal_initializer = glorot_normal_initializer


def kaiming_initializer(
    shape: Sequence[int] | None = None,
    distribution: str = "random_normal",
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    negative_slope: float = 0.0,
    data_format: str = "NCHW",
) -> Initializer:
    """Numbers with the variance for rectifiers (He et al. 2015). ``shape`` has no effect: the variable's own counts."""
    gain = torch.nn.init.calculate_gain(nonlinearity, negative_slope)  # type: ignore[arg-type]
    return variance_scaling_initializer(gain**2, mode, distribution, data_format)


def _fans(shape: tuple[int, ...], data_format: str) -> tuple[float, float]:
    if len(shape) < 2:
        size = float(shape[0]) if shape else 1.0
        return size, size
    channels_last = data_format == "NHWC"
    window = math.prod(shape[1:-1] if channels_last else shape[2:])
    return float((shape[-1] if channels_last else shape[1]) * window), float(shape[0] * window)
