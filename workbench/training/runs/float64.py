"""Lets a model run in float64 although its code asks for float32 in some places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_TO = {torch.Tensor.to, torch.Tensor.type}
_FLOAT = torch.Tensor.float


class KeepsFloat64(TorchFunctionMode):
    """A mode in which calls that would round a float64 tensor to float32 keep it in float64.

    Norms and losses of many models compute in float32 on purpose (``x.float()``, ``x.to(torch.float32)``,
    ``softmax(x, dtype=torch.float32)``). That is exact enough for them, but it spoils a comparison in float64.

    >>> with KeepsFloat64():
    ...     torch.ones(2, dtype=torch.float64).float().dtype
    torch.float64
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
            if func is _FLOAT:
                return first
            if kwargs.get("dtype") == torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
            if func in _TO:
                args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return func(*args, **kwargs)
