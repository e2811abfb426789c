"""torch's autocast, for functions that torch does not know."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def cast_for_product(tensors: Iterable[torch.Tensor], device_type: str) -> list[torch.Tensor]:
    """Tensors as autocast gives them to a product of matrices: in its dtype, but for integers and 64 bits.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     [x.dtype for x in cast_for_product([torch.ones(2), torch.ones(2, dtype=torch.float64)], "cpu")]
    [torch.bfloat16, torch.float64]
    """
    if not torch.is_autocast_enabled(device_type):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device_type)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]
