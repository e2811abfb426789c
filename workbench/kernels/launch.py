"""Common parts of all kernels: where Triton runs, how it is launched, and the dtypes of sums.

Kernels run on CUDA tensors wherever Triton is installed. ``WORKBENCH_KERNELS`` overrides this: ``torch`` uses the
references everywhere; ``triton`` uses the kernels on CPU tensors too, in Triton's interpreter, which
``TRITON_INTERPRET=1`` turns on (for tests without a GPU).
"""

from __future__ import annotations

import functools
import importlib.util
import os
import struct
import threading
from typing import Any

import torch

VARIABLE = "WORKBENCH_KERNELS"
CHOICES = ("auto", "triton", "torch")


def _requested_by_environment() -> str:
    requested = os.environ.get(VARIABLE, "auto")
    if requested not in CHOICES:
        raise ValueError(f"{VARIABLE}={requested}: unknown value. Set it to one of {', '.join(CHOICES)}.")
    return requested


_interpreter = threading.RLock()
"""A lock: Triton's interpreter keeps its state in globals, and simulated ranks are threads."""
requested = _requested_by_environment()
"""The setting of this process, one of ``CHOICES``."""
OWN_KERNELS: set[str] = set()
"""Types of other devices for which somebody has registered kernels of the ``workbench::`` operators."""


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; its interpreter runs without a GPU."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether ``TRITON_INTERPRET=1`` requests Triton's interpreter, which runs on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def can_launch(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels run on ``tensor``; otherwise use the references."""
    return runs_on(tensor.device)


def runs_on(device: torch.device) -> bool:
    """Whether Triton kernels run on tensors of a device."""
    if device.type == "cuda":
        return requested != "torch" and has_triton() and not is_interpreted()
    if device.type in OWN_KERNELS:
        return requested != "torch"
    return requested == "triton" and device.type == "cpu" and has_triton() and is_interpreted()


def launch(
    kernel: Any, grid: tuple[int, ...], on: torch.Tensor, *args: Any, num_warps: int = 4, num_stages: int = 3
) -> None:
    """Launch a kernel on the device of ``on``, also if it is not the current one; an empty grid does nothing.

    Products are rounded before they are added, as in the references, so that random numbers have the same bits.

    Args:
        grid: programs along x (up to 2**31 - 1), y and z (up to 65,535 each).
        num_warps: groups of 32 threads that share the work of a program.
        num_stages: passes of a loop whose memory is in flight at the same time.
    """
    if 0 in grid:
        return
    with torch.cuda.device_of(on) if on.is_cuda else _interpreter:
        kernel[grid](*args, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=False)


def float64_bits(number: float) -> int:
    """The 64 bits of a double as an integer: Triton passes float arguments as 32 bits, so kernels get doubles so."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which terms of ``dtype`` are summed: at least 32 bits for floats, 64 for integers."""
    if dtype.is_complex or dtype == torch.float64:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def identity_element(dtype: torch.dtype, reduction: str) -> float:
    """The identity element of a reduction: the number that does not change its result."""
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
