"""``torch._foreach_*``, tensor by tensor: torch's optimizers, averages and clipping call these on lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workbench.tensors.dispatch.registry import handler
from workbench.tensors.global_tensor import GlobalTensor


def _power_sum(tensor: torch.Tensor, order: float = 2) -> torch.Tensor:
    return tensor.abs().pow(order).sum()


def _bound(bounds: Callable[..., Any], clamp: Callable[..., Any]) -> Callable[..., Any]:
    """``maximum`` and ``minimum``; their lists may hold numbers too."""
    return lambda tensor, other: (bounds if isinstance(other, torch.Tensor) else clamp)(tensor, other)


_UNLIKE: dict[str, Callable[..., Any]] = {
    "norm": torch.linalg.vector_norm,
    "powsum": _power_sum,
    "copy": lambda target, value, non_blocking=False: value,
    "zero": torch.zeros_like,
    "maximum": _bound(torch.maximum, torch.clamp_min),
    "minimum": _bound(torch.minimum, torch.clamp_max),
}
"""What has another name for one tensor."""


def foreach(func: Any, args: Any, kwargs: Any) -> Any:
    """The function on each tensor of the first list. Other lists have one entry per tensor; scalars serve all."""
    name = func.__name__.removeprefix("_foreach_").removesuffix("_")
    lists = list(args)
    if "self" in kwargs:
        lists, kwargs = [kwargs["self"], *lists], {key: value for key, value in kwargs.items() if key != "self"}
    count = next(len(arg) for arg in lists if isinstance(arg, (list, tuple)))
    results = []
    for number in range(count):
        rest = [_of_one(arg, number, count) for arg in lists]
        named = {key: _of_one(value, number, count) for key, value in kwargs.items()}
        if name in ("addcdiv", "addcmul") and len(rest) == 4:
            named["value"] = rest.pop()
        results.append(_in_place(name, rest, named) if func.__name__.endswith("_") else _one(name)(*rest, **named))
    return None if func.__name__.endswith("_") else tuple(results)


def _one(name: str) -> Callable[..., Any]:
    return _UNLIKE.get(name) or getattr(torch, name)


def _of_one(arg: Any, number: int, count: int) -> Any:
    if isinstance(arg, (list, tuple)):
        return arg[number]
    if isinstance(arg, torch.Tensor) and arg.dim() == 1 and len(arg) == count:
        return arg[number]
    return arg


def _in_place(name: str, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    target = args[0]
    method = getattr(torch.Tensor, f"{name}_", None)
    # A function that is not linear needs complete sums. Its result is written back as terms.
    is_linear = name in ("mul", "div", "neg") and not any(isinstance(arg, torch.Tensor) for arg in args[1:])
    has_terms = isinstance(target, GlobalTensor) and target._spec.layout.has_partial
    if method is None or (has_terms and not is_linear):
        return target.copy_(_one(name)(*args, **kwargs))
    return method(*args, **kwargs)


handler(*[name for name in dir(torch) if name.startswith("_foreach_")])(foreach)
