"""Losses. A mean divides by the logical count, so uneven shards give one device's number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workbench.runtime.entry import enter_as_broadcast
from workbench.runtime.ops.dispatch import call_by_plan
from workbench.runtime.ops.local import scale_terms
from workbench.runtime.ops.registry import Call, Resolution, composite, rule
from workbench.runtime.tensor import GlobalTensor

_ELEMENTWISE = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "soft_margin_loss", "poisson_nll_loss", "gaussian_nll_loss", "hinge_embedding_loss",
    "margin_ranking_loss",
)  # fmt: skip


@rule(
    "cross_entropy",
    "nll_loss",
    parameters="input target weight size_average ignore_index reduce reduction label_smoothing",
)
def _cross_entropy(call: Call) -> Resolution | None:
    """``none`` keeps the batch, ``sum`` over a split batch is a partial sum; the classes stay whole."""
    scores, target = call.shapes[0], call.shapes[1]
    by_probability = len(scores) == len(target)
    weights = ", C" * (len(call.operands) - 2)
    text = (
        f"C, {'C' if by_probability else ''}" if len(scores) == 1 else f"nC..., {'nC...' if by_probability else 'n...'}"
    )
    reduction = call.arg(6, "reduction", "mean")
    if reduction == "mean":  # only reached where every operand is whole
        text = text.replace("n", "N").replace("...", "XYZ"[: len(scores) - 2])
    return Resolution(f"{text}{weights} -> {'' if reduction != 'none' or len(scores) == 1 else 'n...'}")


def _mean_over_targets(function: Callable[..., Any]) -> Callable[..., Any]:
    """The mean over the targets that count: a sum of terms over their logical number, which a B target
    gives for free.
    """

    def loss(input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
             reduce: Any = None, reduction: str = "mean", *rest: Any, **options: Any) -> Any:  # fmt: skip
        by_index = isinstance(target, torch.Tensor) and not target.is_floating_point()
        splits = isinstance(input, GlobalTensor) and not input._spec.layout.is_broadcast
        plain_mean = reduction == "mean" and weight is None and size_average is None and reduce is None
        if not (by_index and splits and plain_mean):
            return NotImplemented
        counted = (target != ignore_index).sum()
        arguments = (input, _as_global(target, input), None, None, ignore_index, None, "sum", *rest)
        total = call_by_plan(function, arguments, options)
        if type(counted) is torch.Tensor and counted.device.type == "cpu":
            return total / int(counted) if counted else total * float("nan")  # a number, and dividing by it is linear
        return scale_terms(total, _as_global(counted.to(input.dtype), input))

    return loss


def _as_global(tensor: torch.Tensor, like: GlobalTensor) -> GlobalTensor:
    return (
        tensor if isinstance(tensor, GlobalTensor) else enter_as_broadcast(tensor, like._spec.world, like._spec.layout)
    )


composite("cross_entropy")(_mean_over_targets(torch.nn.functional.cross_entropy))
composite("nll_loss")(_mean_over_targets(torch.nn.functional.nll_loss))


@rule(*_ELEMENTWISE)
def _elementwise_loss(call: Call) -> Resolution | None:
    reduction = call.kwargs.get("reduction", "mean")
    return Resolution("..., ..., ..., ... -> ...") if reduction == "none" else None


def _register(name: str) -> None:
    function = getattr(torch.nn.functional, name)

    def loss(*args: Any, **kwargs: Any) -> Any:
        reduction = kwargs.get("reduction", "mean")
        if (
            reduction not in ("mean", "sum")
            or kwargs.get("size_average") is not None
            or kwargs.get("reduce") is not None
        ):
            return NotImplemented
        each = function(*args, **{**kwargs, "reduction": "none"})
        return each.mean() if reduction == "mean" else each.sum()

    composite(name)(loss)


for _name in _ELEMENTWISE:
    if _name != "kl_div":
        _register(_name)
