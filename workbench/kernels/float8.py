"""Linear layers whose three products have operands of 8 bits, with one dynamic scale for each tensor.

    q(x) = clamp(s x) in 8 bits     s = largest / max(|x|)     e4m3 for inputs and weights, e5m2 for gradients
    a b  = q(a) q(b) / (s_a s_b)    summed in 32 bits

These are the scales and dtypes of torchao's recipe ``tensorwise``. GPUs multiply 8 bits (``torch._scaled_mm``). A CPU
multiplies what the 8 bits stand for in 32 bits, which gives the bits of its own ``torch._scaled_mm``. (Micikevicius et
al., FP8 Formats for Deep Learning, 2022.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CAPABILITY = (8, 9)
"""The compute capability from which on GPUs multiply 8 bits."""
_MULTIPLE = 16
"""Their products have sizes that are multiples of this: others are padded with zeros."""
_SMALLEST = 1e-12
"""A tensor of zeros is scaled as if its largest element were this."""
Whole = Callable[[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]], tuple[torch.Tensor, torch.Tensor, int]]
"""Takes the gradient of a shard, and ``largest``; returns the gradient as no term of a sum, the largest absolute value
of the logical gradient, and on how many ranks the same gradient is."""


def lacks_float8(device: torch.device) -> str:
    """Why a device cannot multiply 8 bits, nor does it emulate them: empty for CPUs, and for GPUs that can.

    >>> lacks_float8(torch.device("cpu"))
    ''
    """
    if device.type in ("cpu", "meta"):
        return ""
    needed = (
        "fp8 needs NVIDIA GPUs of compute capability 8.9 or more (Ada, Hopper, Blackwell), or CPUs, which emulate it"
    )
    if device.type != "cuda" or torch.version.hip:
        return f"device {device}: {needed}"
    found = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return "" if found >= CAPABILITY else f"{device} is an {name} of compute capability {found[0]}.{found[1]}: {needed}"


def product_for(device: torch.device) -> Callable[..., torch.Tensor]:
    """The product of a device: ``scaled_product`` on GPUs, else ``emulated_product``."""
    return scaled_product if device.type == "cuda" else emulated_product


def emulated_product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(m, k) times (k, n), both of 8 bits, summed in 32 bits and rounded to ``dtype``."""
    # torch's own product lays both factors out row by row, on which the order of its sums depends
    rows, columns = (x.contiguous().float().mul_(s.reciprocal()) for x, s in ((a, a_scale), (b, b_scale)))
    return (rows @ columns).to(dtype)


def scaled_product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The same by ``torch._scaled_mm``, which takes ``a`` row by row and ``b`` column by column."""
    m, n = a.shape[0], b.shape[1]
    if not a.numel() or not b.numel():
        return a.new_zeros((m, n), dtype=dtype)
    # The kernel has no form for two factors in e5m2, which no product of a linear layer has
    found = torch._scaled_mm(
        _padded(a), _padded(b.t()).t(), a_scale.reciprocal(), b_scale.reciprocal(), out_dtype=dtype
    )
    return found[:m, :n]


def _padded(matrix: torch.Tensor) -> torch.Tensor:
    """A contiguous matrix with sizes that are multiples of 16."""
    missing = [-size % _MULTIPLE for size in matrix.shape]
    if not any(missing):
        return matrix.contiguous()
    return F.pad(matrix.view(torch.uint8), (0, missing[1], 0, missing[0])).view(matrix.dtype).contiguous()


def largest(x: torch.Tensor) -> torch.Tensor:
    """The largest absolute value, in 32 bits; zero of an empty shard.

    >>> largest(torch.tensor([1.0, -3.0])).item()
    3.0
    """
    return x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)


def scale_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale that brings ``amax`` to the largest number of ``dtype``.

    >>> scale_of(torch.tensor(7.0), E4M3).item()
    64.0
    """
    return (torch.finfo(dtype).max / amax.double().clamp(min=_SMALLEST)).float()


def quantize(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` times ``scale`` in 8 bits.

    >>> quantize(torch.tensor([1.0, 1.05]), torch.tensor(1.0), E4M3).float()
    tensor([1., 1.])
    """
    most = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-most, most).to(dtype)


def float8_linear(
    x: torch.Tensor, weight: torch.Tensor, amaxes: torch.Tensor, whole: Whole | None = None
) -> torch.Tensor:
    """(..., k) times (n, k), without a bias: (..., n) in the dtype of ``x``.

    Args:
        amaxes: the largest absolute values of ``x`` and of ``weight``, of whole tensors if these are shards.
        whole: for shards, what makes a logical gradient of this rank's.
    """
    made: torch.Tensor = _Linear.apply(x, weight, amaxes, whole)
    return made


class _Linear(torch.autograd.Function):
    """The input is kept in 8 bits. The weight is rounded again in backward: it is there anyway.

    A backward in two parts sets ``part`` of a call to "input" and then to "weight", and runs it for each.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, amaxes: torch.Tensor, whole: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        scales = scale_of(amaxes, E4M3)
        rows = quantize(x.reshape(-1, x.shape[-1]), scales[0], E4M3)
        ctx.save_for_backward(rows, weight, scales)
        ctx.whole, ctx.shape, ctx.dtype, ctx.part = whole, x.shape, x.dtype, ""
        with _no_autocast(x):
            product = product_for(x.device)(rows, scales[0], quantize(weight, scales[1], E4M3).t(), scales[1], x.dtype)
        return product.reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weight, scales = ctx.saved_tensors  # a checkpoint may run forward again for these
        with torch._C.DisableTorchFunctionSubclass():  # shards may be of a subclass
            return _gradients(ctx, grads[0], rows, weight, scales)


def _gradients(
    ctx: Any, grad: torch.Tensor | None, rows: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    part = ctx.part
    rounded, scale, copies = ctx.__dict__.pop("gradient", None) or _rounded_gradient(ctx, grad, rows, weight)
    if part == "input":
        ctx.gradient = rounded, scale, copies
    of_x = of_weight = None
    multiply = product_for(rounded.device)
    with _no_autocast(rounded):
        if ctx.needs_input_grad[0] and part != "weight":
            columns = quantize(weight, scales[1], E4M3)
            of_x = multiply(rounded, scale, columns, scales[1], ctx.dtype).reshape(ctx.shape)
        if ctx.needs_input_grad[1] and part != "input":
            of_weight = multiply(rounded.t(), scale, rows, scales[0], weight.dtype)
    if copies > 1:
        of_x, of_weight = (each if each is None else each / copies for each in (of_x, of_weight))
    return of_x, of_weight, None, None


def _rounded_gradient(
    ctx: Any, grad: torch.Tensor | None, rows: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The gradient of the result in 8 bits, its scale, and on how many ranks it is."""
    if grad is None:  # other ranks wait for this one
        grad = rows.new_zeros((*ctx.shape[:-1], weight.shape[0]), dtype=ctx.dtype)
    if ctx.whole is None:
        amax, copies = largest(grad), 1
    else:
        grad, amax, copies = ctx.whole(grad, largest)
    scale = scale_of(amax, E5M2)
    return quantize(grad.reshape(-1, weight.shape[0]), scale, E5M2), scale, copies


def _no_autocast(x: torch.Tensor) -> Any:
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)
