"""Triton's names for torch's types of elements."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

FLOATS: dict[torch.dtype, Any] = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
TYPES: dict[torch.dtype, Any] = {
    **FLOATS,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
}


def wide_type(dtype: torch.dtype) -> Any:
    """The type in which kernels compute: at least 32 bits.

    >>> str(wide_type(torch.bfloat16))
    'fp32'
    """
    return tl.float64 if dtype == torch.float64 else tl.float32
