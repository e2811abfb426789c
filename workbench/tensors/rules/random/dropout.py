"""Dropout in all its forms, and random slopes. The mask depends on the logical position only."""

from __future__ import annotations

import math
from typing import Any

import torch

from workbench.core.layout import Shape
from workbench.core.sbp import Split, broadcast
from workbench.kernels.launch import runs_on
from workbench.kernels.random_slice import dropout_slice
from workbench.tensors import random
from workbench.tensors.dispatch.local_call import local_call, sum_terms
from workbench.tensors.dispatch.registry import Call, Resolution, handler, rule
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.rules.random.sampling import sample

_ALPHA = 1.7580993408473766
"""The product of SELU's two constants: the limit of its negative side (Klambauer et al., arXiv 1706.02515)."""


def _settings(func: Any, args: Any, kwargs: Any, default: bool) -> tuple[Any, float, bool, bool]:
    """Input, probability, whether to drop at all, and whether to write to the input."""
    options = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    p = options.get("p", 0.5)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    training = options.get("training", options.get("train", default))
    is_training = training is None or bool(training)  # None is what native_dropout takes for True
    return options["input"], p, is_training, bool(options.get("inplace")) or func.__name__.endswith("_")


def _noise_shape(shape: Shape) -> Shape:
    if len(shape) < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    return (*shape[:2], *(1,) * (len(shape) - 2))


def _mask(x: Any, p: float, by_feature: bool) -> Any:
    """True where the input stays, in its layout; dims of size one broadcast."""
    layout, shape = x._spec.layout, x._spec.shape
    if not by_feature:
        return sample(x, layout, shape, random.bernoulli_sampler(1.0 - p), torch.bool)
    entries = tuple(broadcast if isinstance(e, Split) and e.dim > 1 else e for e in layout.sbp)
    return sample(x, layout.with_sbp(entries), _noise_shape(shape), random.bernoulli_sampler(1.0 - p), torch.bool)


def _drop(func: Any, args: Any, kwargs: Any, by_feature: bool, alpha: bool) -> Any:
    of_plain_dropout = not by_feature and not alpha
    given, p, training, in_place = _settings(func, args, kwargs, default=of_plain_dropout)
    if not training or p == 0.0:
        return given
    x = sum_terms(given)
    if of_plain_dropout and runs_on(x._spec.world.device) and x.dtype.is_floating_point:
        result = _drop_by_kernel(x, p)
        return given.copy_(result) if in_place else result
    mask = _mask(x, p, by_feature)
    gain, shift = 0.0 if p == 1.0 else 1.0 / (1.0 - p), 0.0
    if alpha and p < 1.0:
        gain = 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1.0) * (1.0 - p))
        shift = _ALPHA * gain
    layout = x._spec.layout
    out = (layout, x._spec.shape, x.dtype)

    def apply(own: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        kept = own * keep * gain
        return kept + (shift * p - shift * ~keep).to(own.dtype) if shift else kept

    result = local_call(apply, [x, mask], [layout, mask._spec.layout], out, "dropout")
    return given.copy_(result) if in_place else result


def _drop_by_kernel(x: GlobalTensor, p: float) -> GlobalTensor:
    """Apply the mask of ``_mask`` while drawing it, and draw it again in backward: nothing is stored."""
    spec = x._spec
    key = random.draw_key(spec.world, is_used=not spec.is_placeholder)
    place = (
        (0, []) if spec.is_placeholder else random.place_of(spec.shape, spec.layout.region(spec.shape, spec.world.rank))
    )
    return local_call(
        lambda own: dropout_slice(own, key, *place, p),
        [x],
        [spec.layout],
        (spec.layout, spec.shape, x.dtype),
        "dropout",
    )


def _register(name: str, by_feature: bool, alpha: bool) -> None:
    handler(name)(lambda func, args, kwargs: _drop(func, args, kwargs, by_feature, alpha))


_register("dropout", by_feature=False, alpha=False)
_register("feature_dropout", by_feature=True, alpha=False)
_register("alpha_dropout", by_feature=False, alpha=True)
_register("feature_alpha_dropout", by_feature=True, alpha=True)


@handler("native_dropout")
def native_dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """``torch.native_dropout(input, p, train)``: the result and its mask."""
    given, p, training, _ = _settings(func, args, kwargs, default=True)
    x = sum_terms(given)
    mask = _mask(x, p if training else 0.0, by_feature=False)
    gain = 1.0 if not training or p == 0.0 else 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    layout = x._spec.layout
    out = (layout, x._spec.shape, x.dtype)
    return local_call(lambda own, keep: own * keep * gain, [x, mask], [layout, layout], out, "dropout"), mask


@rule("native_dropout_backward")
def _native_dropout_backward(call: Call) -> Resolution:
    return Resolution("..., ... -> ...")


@handler("rrelu")
def rrelu(func: Any, args: Any, kwargs: Any) -> Any:
    """A leaky ReLU; in training its slopes are random."""
    names = ("input", "lower", "upper", "training", "inplace" if func is torch.nn.functional.rrelu else "generator")
    options = dict(zip(names, args, strict=False)) | kwargs
    given, lower, upper = options["input"], options.get("lower", 1 / 8), options.get("upper", 1 / 3)
    in_place = options.get("inplace") or func.__name__ == "rrelu_"
    if options.get("training"):
        x = sum_terms(given)
        layout, shape = x._spec.layout, x._spec.shape
        sampler = random.uniform_sampler(lower, upper)
        slopes = sample(x, layout, shape, sampler, x.dtype, options.get("generator"))
        result: Any = local_call(
            lambda own, slope: torch.where(own <= 0, own * slope, own), [x, slopes], [layout, layout],
            (layout, shape, x.dtype), "rrelu",
        )  # fmt: skip
    else:  # leaky_relu saves its input, and a later copy_ would overwrite it
        return torch.nn.functional.leaky_relu(given, (lower + upper) / 2, inplace=bool(in_place))
    return given.copy_(result) if in_place else result
