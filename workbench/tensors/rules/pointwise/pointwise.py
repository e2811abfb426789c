"""Functions that work element by element, with broadcasting, and their ``_foreach_`` forms over lists."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from typing import Any

import torch

from workbench.tensors.dispatch.dispatcher import beside
from workbench.tensors.dispatch.registry import (
    Call,
    Resolution,
    composite,
    elementwise_except,
    equations,
    handler,
    normalize_dims,
    rule,
    term,
)
from workbench.tensors.global_tensor import GlobalTensor, Spec

_UNARY = """
relu relu6 gelu silu mish tanh sigmoid logsigmoid log_sigmoid softplus elu selu celu leaky_relu rrelu_with_noise
hardtanh hardswish hardsigmoid softsign tanhshrink softshrink hardshrink threshold exp exp2 expm1 log log2 log10
log1p sqrt rsqrt square reciprocal abs sign sgn sin cos tan asin acos atan sinh cosh asinh acosh atanh erf erfc
erfinv lgamma digamma i0 sinc floor ceil round trunc frac isnan isinf isfinite isposinf isneginf signbit logical_not
bitwise_not nan_to_num deg2rad rad2deg angle conj_physical logit type isreal frexp polygamma mvlgamma i0e
i1 i1e ndtr ndtri log_ndtr entr
erfcx airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0
modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0
"""
_NARY = """
pow float_power rpow rdiv rtruediv atan2 hypot fmod remainder floor_divide rfloordiv rmod maximum minimum fmax fmin
copysign nextafter eq ne lt le gt ge isclose logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
bitwise_left_shift bitwise_right_shift where fill clamp clamp_min clamp_max addcmul addcdiv
masked_fill xlogy xlog1py logaddexp logaddexp2 heaviside gcd lcm ldexp zeta igamma igammac complex polar
chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h
hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t
shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
"""
_CASTS = "to float double half bfloat16 long int short char byte bool cdouble cfloat chalf"
_LINEAR = """
clone detach contiguous neg positive alias detach_copy real imag get:real get:imag conj resolve_conj resolve_neg
"""

equations(_UNARY, "... -> ...")
equations(_NARY, "..., ..., ..., ... -> ...")
equations(_LINEAR, "+... -> ...")


@rule("view_as_real")
def _view_as_real(call: Call) -> Resolution:
    """torch has no backward of an empty tensor for a gradient that is expanded; that of ``narrow`` copies it."""

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> Any:
        return (lambda x: torch.view_as_real(x).narrow(-1, 0, 2)) if 0 in inputs[0].local_shape else None

    return Resolution("+... -> ...X", localize)


def _is_finite_number(value: Any, nonzero: bool = False) -> bool:
    is_number = isinstance(value, (int, float, complex))
    return is_number and cmath.isfinite(value) and not (nonzero and value == 0)


@rule("add", "sub", "rsub")
def _add(call: Call) -> Resolution:
    """Partial sums add term by term. Adding a number completes the sum first, because each term would add it."""
    if len(call.operands) == 2 and _is_finite_number(call.kwargs.get("alpha", 1)):
        return Resolution("+..., +... -> ...")
    return Resolution("..., ... -> ...")


@rule("lerp")
def _lerp(call: Call) -> Resolution:
    """A weighted mean of two tensors: linear in both if the weight is a number."""
    if len(call.operands) == 2 and _is_finite_number(call.arg(2, "weight")):
        return Resolution("+..., +... -> ...")
    return Resolution("..., ..., ... -> ...")


@rule("copy")
def _copy(call: Call) -> Resolution:
    """Terms take terms, if no dtype rounds them."""
    is_same = len({operand.dtype for operand in call.operands}) == 1
    return Resolution("+..., +... -> ..." if is_same else "..., ... -> ...")


@rule("mul")
def _mul(call: Call) -> Resolution:
    """A partial sum survives scaling by a finite number only: infinity times a term of zero is nan."""
    factors = [arg for arg in call.args if not isinstance(arg, torch.Tensor)]
    if len(call.operands) == 1 and all(map(_is_finite_number, factors)):
        return Resolution("+... -> ...")
    return Resolution("..., ... -> ...")


@rule("div")
def _div(call: Call) -> Resolution:
    divisor = call.arg(1, "other")
    exact = call.arg(2, "rounding_mode") is None
    if len(call.operands) == 1 and exact and _is_finite_number(divisor, nonzero=True):
        return Resolution("+... -> ...")
    return Resolution("..., ... -> ...")


@rule(*_CASTS.split())
def _cast(call: Call) -> Resolution:
    """Terms of a sum stay terms where they have dtype and device already, and the result may be the tensor itself."""
    own = call.operands[0]
    named = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, torch.device)]
    stays = all(each.type == own.device.type and each.index in (None, own.device.index) for each in named)
    return Resolution("+... -> ..." if stays and own.dtype == call.outputs[0][1] else "... -> ...")


@composite("to")
def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """``x.to(other)`` and ``x.type_as(other)`` use the other tensor's dtype, not its layout or values.

    A device's name or number becomes a device: shapes are inferred on metadata, which moves to no device by name. Where
    nothing changes, the result is the tensor itself, and terms of a sum stay terms. A device without a number is that
    of the shards.
    """
    other: Any = args[0] if args else kwargs.get("other")
    if isinstance(other, torch.Tensor):
        return tensor.to(other.dtype)
    if any(type(value) in (str, int) for value in (*args, *kwargs.values())):
        return tensor.to(*map(_as_device, args), **{name: _as_device(value) for name, value in kwargs.items()})
    stays = (tensor.dtype, tensor.device, torch.device(tensor.device.type), None, False, torch.preserve_format)
    wanted = (*args, *(value for name, value in kwargs.items() if name != "non_blocking"))
    return tensor if all(value in stays for value in wanted) else NotImplemented


def _as_device(value: Any) -> Any:
    return torch.device(value) if type(value) in (str, int) else value


@composite("to_dense")
def to_dense(tensor: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """A global tensor is dense: it is itself."""
    return tensor if dtype is None else tensor.to(dtype)


@composite("cpu")
def cpu(tensor: Any, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    """Every rank moves its own shard."""
    return tensor.to(torch.device("cpu"), memory_format=memory_format)


@composite("cuda")
def cuda(tensor: Any, device: Any = None, non_blocking: bool = False, **options: Any) -> Any:
    """Every rank moves its own shard, to its current GPU or the named one."""
    return tensor.to(torch.device("cuda" if device is None else device), non_blocking=non_blocking, **options)


@rule("zero")
def _zero(call: Call) -> Resolution:
    """Zero is zero in every layout."""
    return Resolution(f"+{'abcdefghijklmnop'[: len(call.shapes[0])]} -> {'abcdefghijklmnop'[: len(call.shapes[0])]}")


@rule("glu")
def _glu(call: Call) -> Resolution:
    """One half of ``dim`` gates the other half."""
    ndim = len(call.shapes[0])
    return Resolution(elementwise_except(ndim, normalize_dims(call.arg(1, "dim", -1), ndim)))


@rule("prelu")
def _prelu(call: Call) -> Resolution:
    """One slope for all, or one for each channel (dim 1)."""
    shape, slopes = call.shapes
    if math.prod(slopes) == 1 or len(shape) < 2:
        return Resolution(f"..., {term(len(slopes), range(8))} -> ...")
    return Resolution("ab..., b -> ab...")


def _norm(tensor: torch.Tensor, ord: float = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor, ord, dtype=dtype)


def _power_sum(tensor: torch.Tensor, ord: float = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    return tensor.abs().pow(ord).sum(dtype=dtype)


def _bound(bounds: Callable[..., Any], clamp: Callable[..., Any]) -> Callable[..., Any]:
    """``maximum`` and ``minimum``; their lists may hold numbers too."""
    return lambda tensor, other: (bounds if isinstance(other, torch.Tensor) else clamp)(tensor, other)


_UNLIKE: dict[str, Callable[..., Any]] = {
    "norm": _norm,
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
        args, kwargs = beside(target, (args, kwargs), f"{name} in place")
        return target.copy_(_one(name)(*args, **kwargs))
    return method(*args, **kwargs)


handler(*[name for name in dir(torch) if name.startswith("_foreach_")])(foreach)
