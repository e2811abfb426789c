"""Lets two runs differ by the rounding of their dtypes only: GPUs compute as exactly as these say, and a model runs in
float64 although its code asks for float32 in some places.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_MATMUL, _CUDNN = torch.backends.cuda.matmul, cast(Any, torch.backends.cudnn)
_EXACT = (
    (_MATMUL, "fp32_precision", "ieee"),
    (_CUDNN.conv, "fp32_precision", "ieee"),
    (_CUDNN.rnn, "fp32_precision", "ieee"),
    (_MATMUL, "allow_fp16_reduced_precision_reduction", False),
    (_MATMUL, "allow_bf16_reduced_precision_reduction", False),
)


_has_gpu = torch.cuda.is_available
_turn = threading.Lock()
_inside: list[list[Any]] = []
"""The user's settings, once for each thread inside: simulated ranks may be inside together."""


@contextmanager
def exact_sums() -> Iterator[None]:
    """A context without TF32, which keeps 10 bits of the factors in products of float32 and is cuDNN's default, and
    without sums in 16 bits. Afterwards torch has the user's settings. Without a GPU nothing changes.

    >>> with exact_sums():
    ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
    """
    if not _has_gpu():
        yield
        return
    with _turn:
        before = _inside[0] if _inside else [getattr(place, name) for place, name, _ in _EXACT]
        _inside.append(before)
        _set([value for _, _, value in _EXACT])
    try:
        yield
    finally:
        with _turn:
            _inside.pop()
            if not _inside:
                _set(before)


def _set(values: list[Any]) -> None:
    for (place, name, _), value in zip(_EXACT, values, strict=True):
        setattr(place, name, value)


_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
_TO = {torch.Tensor.to, torch.Tensor.type}
_CASTS = {torch.Tensor.float: torch.float64, cast(Any, torch.Tensor).cfloat: torch.complex128}


def wide(value: Any) -> Any:
    """A value with its floating-point tensors in float64, and complex ones in complex128. Other tensors stay.

    >>> wide([torch.ones(2), torch.arange(2)])
    [tensor([1., 1.], dtype=torch.float64), tensor([0, 1])]
    """

    def widened(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_complex():
            return leaf.to(torch.complex128)
        return leaf.double() if leaf.is_floating_point() else leaf

    return tree_map_only(torch.Tensor, widened, value)


def wide_model(model: nn.Module) -> nn.Module:
    """The model, after its parameters and buffers have become what ``wide`` gives."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_complex():  # of which model.double() takes none, and model.to(torch.float64) the real parts
            tensor.data = wide(tensor.data)
    return model.double()


class KeepsFloat64(TorchFunctionMode):
    """A mode in which calls that would round a float64 tensor to float32 keep it in float64. Complex numbers likewise
    keep 128 bits, and those that a call makes have them.

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
        if isinstance(first, torch.Tensor) and first.dtype in _WIDE.values():
            if func in _CASTS:
                return first.to(_CASTS[func])
            if (dtype := kwargs.get("dtype")) in _WIDE:
                kwargs = {**kwargs, "dtype": _WIDE[dtype]}
            if func in _TO:
                args = tuple(_WIDE.get(value, value) if isinstance(value, torch.dtype) else value for value in args)
        elif kwargs.get("dtype") == torch.complex64:  # torch.zeros(..., dtype=torch.cfloat) for a spectrum
            kwargs = {**kwargs, "dtype": torch.complex128}
        return func(*args, **kwargs)
