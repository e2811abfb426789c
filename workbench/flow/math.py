"""``flow.math``: elementwise functions and reductions under the names of the older documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from workbench.flow.jobs.context import in_scope

_POINTWISE: dict[str, Callable[..., Any]] = {
    "abs": torch.abs, "add": torch.add, "ceil": torch.ceil, "cos": torch.cos, "divide": torch.div, "equal": torch.eq,
    "erf": torch.erf, "exp": torch.exp, "floor": torch.floor, "gelu": torch.nn.functional.gelu, "greater": torch.gt,
    "less": torch.lt, "log": torch.log, "maximum": torch.maximum, "minimum": torch.minimum, "multiply": torch.mul,
    "negative": torch.neg, "pow": torch.pow, "reciprocal": torch.reciprocal, "relu": torch.relu, "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid, "sign": torch.sign, "sin": torch.sin, "softplus": torch.nn.functional.softplus,
    "sqrt": torch.sqrt, "square": torch.square, "subtract": torch.sub, "tanh": torch.tanh,
}  # fmt: skip
"""Name in programs -> torch's function."""

Axis = int | Sequence[int] | None


def _dims(x: Any, axis: Axis) -> tuple[int, ...]:
    return tuple(range(x.dim())) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)


@in_scope
def reduce_mean(input_tensor: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Mean along dims, by default all of them."""
    return torch.mean(input_tensor, _dims(input_tensor, axis), keepdims)


@in_scope
def reduce_sum(input_tensor: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Sum along dims, by default all of them."""
    return torch.sum(input_tensor, _dims(input_tensor, axis), keepdims)


@in_scope
def reduce_max(input_tensor: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """Largest element along dims, by default all of them."""
    return torch.amax(input_tensor, _dims(input_tensor, axis), keepdims)


@in_scope
def argmax(input: Any, axis: int = -1) -> Any:
    """Position of the largest element along ``axis``."""
    return torch.argmax(input, axis)


def __getattr__(name: str) -> Any:
    if name not in _POINTWISE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = _POINTWISE[name]
    value: Any = in_scope(function)
    value.__module__, value.__name__, value.__qualname__ = __name__, name, name  # by which it is pickled
    value.__doc__ = f"``torch.{function.__name__}``."
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_POINTWISE})
