"""What all kernels share: whether Triton can run, and in which dtypes terms add up."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; its interpreter runs without a GPU."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether ``TRITON_INTERPRET=1`` asks for Triton's interpreter, which works on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def can_launch(tensor: torch.Tensor) -> bool:
    """Whether a Triton kernel can work on ``tensor``: it lies on a GPU, or kernels are interpreted."""
    return has_triton() and (tensor.is_cuda or is_interpreted())


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which terms of ``dtype`` are summed: 32 bits at least for floats, 64 for integers."""
    if dtype.is_complex or dtype == torch.float64:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def identity(dtype: torch.dtype, reduction: str) -> float:
    """What changes nothing under the reduction."""
    if reduction in ("none", "sum"):
        return 0
    if dtype == torch.bool:
        return reduction == "min"
    if dtype.is_floating_point:
        return -torch.inf if reduction == "max" else torch.inf
    bounds = torch.iinfo(dtype)
    return bounds.min if reduction == "max" else bounds.max


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)
