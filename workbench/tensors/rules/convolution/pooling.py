"""Pools and their inverses. Channels are independent, and space stays whole; indices count within a plane."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch.nn.functional as F

from workbench.tensors import random
from workbench.tensors.dispatch.dispatcher import decompose
from workbench.tensors.dispatch.registry import Call, Resolution, composite, handler, rule
from workbench.tensors.rules.random.sampling import sample_of_shape
from workbench.tensors.rules.reduction.empty_shards import zeros_where_empty

_SPATIAL = "XYZ"
_LINEAR = ("avg_pool", "adaptive_avg_pool")
_MAXIMA = ("max_pool", "adaptive_max_pool", "lp_pool", "max_unpool")


def _names(families: tuple[str, ...]) -> list[str]:
    return [f"{name}{n}d{form}" for name in families for n in (1, 2, 3) for form in ("", "_with_indices")]


@rule(*_names(_LINEAR + _MAXIMA))
def _pool(call: Call) -> Resolution:
    num_spatial = int(call.name.removesuffix("_with_indices")[-2])
    plane = f"...{_SPATIAL[:num_spatial]}"
    if call.name.startswith(_LINEAR):
        return Resolution(f"{'+' * call.has_fractions}{plane} -> {plane}", zeros_where_empty)
    if call.name.startswith("max_unpool"):
        return Resolution(f"{plane}, {plane} -> {plane}", zeros_where_empty)
    return Resolution(f"{plane} -> {plane}, {plane}", zeros_where_empty)


@rule("max_pool2d_with_indices_backward")
def _max_pool_backward(call: Call) -> Resolution:
    return Resolution("...XY, ...XY, ...XY -> ...XY", zeros_where_empty)


@rule("fractional_max_pool2d", "fractional_max_pool3d")
def _fractional(call: Call) -> Resolution:
    """``(input, kernel, output size, samples)``; the samples are (batch, channel, number of spatial dims)."""
    num_spatial = int(call.name[-2])
    batch = "n" if len(call.shapes[0]) == num_spatial + 2 else ""
    plane = f"{batch}c{_SPATIAL[:num_spatial]}"
    return Resolution(f"{plane}, {batch or '1'}cS -> {plane}, {plane}", zeros_where_empty)


def _with_indices(num_spatial: int) -> Any:
    torchs_own: Any = decompose(getattr(F, f"fractional_max_pool{num_spatial}d_with_indices"))

    def fractional_max_pool(
        input: Any,
        kernel_size: Any,
        output_size: Any = None,
        output_ratio: Any = None,
        return_indices: bool = False,
        _random_samples: Any = None,
    ) -> Any:
        """The windows lie at random; where, depends on the logical batch and channel only."""
        if _random_samples is None:
            batch = input.shape[0] if input.dim() == num_spatial + 2 else 1
            shape = (batch, input.shape[-num_spatial - 1], num_spatial)
            _random_samples = sample_of_shape(input, shape, random.uniform_sampler(), input.dtype)
        return torchs_own(input, kernel_size, output_size, output_ratio, return_indices, _random_samples)

    return fractional_max_pool


def _without_indices(num_spatial: int) -> Any:
    pool = _with_indices(num_spatial)

    def fractional_max_pool(func: Any, args: Any, kwargs: Any) -> Any:
        is_operator = not isinstance(func, FunctionType)  # which gets the samples
        return NotImplemented if is_operator else pool(*args, **kwargs)[0]

    return fractional_max_pool


for _num_spatial in (2, 3):
    composite(f"fractional_max_pool{_num_spatial}d_with_indices")(_with_indices(_num_spatial))
    handler(f"fractional_max_pool{_num_spatial}d")(_without_indices(_num_spatial))
