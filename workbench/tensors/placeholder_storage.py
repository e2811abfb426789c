"""Storage of placeholders: any shape and dtype over one zero."""

from __future__ import annotations

from functools import lru_cache

import torch

from workbench.core.layout import Shape
from workbench.tensors.hidden_from_modes import hidden_from_modes

_data = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_num_modes = torch._C._len_torch_dispatch_stack


def new_placeholder(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor over memory that all placeholders of its kind share: nothing reads or writes it.

    Placeholders are made at every call of a function on another stage's tensors. Another tensor over known memory takes
    a sixth of the time of a new one.
    """
    if _num_modes() or torch.is_inference_mode_enabled():  # modes must see a creation function
        return spread_zero(shape, dtype, device)
    return _data(_zero(tuple(shape), dtype, device))  # not detach(), which would share the count of writes


def spread_zero(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new zero in any shape: a term of a sum, or a parameter that has no values yet."""
    # An expanded tensor is a view, and views refuse the in-place functions that placeholders repeat.
    with hidden_from_modes():  # a mode that keeps the zero would see later writes to it
        return torch.zeros((), dtype=dtype, device=device).as_strided_(shape, (0,) * len(shape))


@lru_cache(maxsize=4096)
def _zero(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return spread_zero(shape, dtype, device)
