"""Losses other than cross entropy. A mean divides by the logical count, so uneven shards give the number of one device.

Each loss has a rule for ``reduction="none"``; mean and sum are reductions of its result.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import _reduction
from torch.overrides import handle_torch_function

from workbench.core.sbp import Split, broadcast
from workbench.tensors.conversion import from_local
from workbench.tensors.dispatch.dispatcher import call_by_plan
from workbench.tensors.dispatch.local_call import local_call
from workbench.tensors.dispatch.planning import as_autocast_gives
from workbench.tensors.dispatch.registry import Call, Resolution, composite, rule
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.patch_table import patch
from workbench.tensors.rules.reduction.two_stage import splits

_ELEMENTWISE = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "soft_margin_loss", "poisson_nll_loss", "hinge_embedding_loss", "margin_ranking_loss",
)  # fmt: skip
_BY_ROWS = (
    "cosine_embedding_loss", "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss",
)  # fmt: skip
_REDUCTIONS = ("mean", "sum", "batchmean")


@rule(*_ELEMENTWISE)
def _elementwise(call: Call) -> Resolution | None:
    reduction = call.arg(2, "reduction") if call.name == "huber_loss" else call.kwargs.get("reduction")
    return Resolution("..., ..., ..., ... -> ...") if reduction == "none" else None


@rule("cosine_embedding_loss")
def _cosine_embedding(call: Call) -> Resolution | None:
    if call.kwargs.get("reduction") != "none":
        return None
    single = len(call.shapes[0]) == 1
    return Resolution("D, D, -> " if single and not call.shapes[2] else "nD, nD, n -> n")


@rule("triplet_margin_loss")
def _triplet_margin(call: Call) -> Resolution | None:
    return Resolution("...D, ...D, ...D -> ...") if call.kwargs.get("reduction") == "none" else None


@rule("multi_margin_loss", "multilabel_margin_loss")
def _multi_margin(call: Call) -> Resolution | None:
    """Each row compares all classes with the score of its label, so the classes stay whole."""
    if call.kwargs.get("reduction") != "none":
        return None
    row = "C" if call.shapes[0] else ""
    batch = "n" if len(call.shapes[0]) == 2 else ""
    label = row if call.name == "multilabel_margin_loss" else "1" * (len(call.shapes[1]) - len(batch))
    weights = f", {'W' * len(call.shapes[2])}" if len(call.operands) > 2 else ""
    return Resolution(f"{batch}{row}, {batch}{label}{weights} -> {batch or '1' * len(call.outputs[0][0])}")


def _reduced(each: Any, reduction: str) -> Any:
    if reduction == "mean":
        return each.mean()
    total = each.sum()
    return total / each.shape[0] if reduction == "batchmean" and each.shape else total


def _register(name: str, written: Callable[..., Any] | None = None) -> None:
    """Register the composite of a loss: it resolves legacy arguments and reduces the logical tensor.

    ``written`` computes the loss of each row with global functions where the rule would gather; or returns None.
    """
    function = getattr(F, name)
    names = tuple(inspect.signature(function).parameters)
    num_tensors = names.index("size_average") if "size_average" in names else 2

    def loss(*args: Any, **kwargs: Any) -> Any:
        if len(args) > num_tensors:
            kwargs = {**dict(zip(names[num_tensors:], args[num_tensors:], strict=False)), **kwargs}
            args = args[:num_tensors]
        reduction = kwargs.pop("reduction", "mean")
        size_average, reduce = kwargs.pop("size_average", None), kwargs.pop("reduce", None)
        if size_average is not None or reduce is not None:
            reduction = _reduction.legacy_get_string(size_average, reduce)
        weight = kwargs.get("weight")
        if reduction not in _REDUCTIONS and reduction != "none":
            return NotImplemented
        each = written(*args, **kwargs) if written is not None else None
        if each is None:
            each = call_by_plan(function, args, {**kwargs, "reduction": "none"})
        if reduction == "none":
            return each
        if weight is not None and reduction == "mean" and name in ("mse_loss", "l1_loss"):
            return each.sum() / weight.sum()
        return _reduced(each, reduction)

    composite(name)(loss)


def _cosine_embedding_rows(input1: Any, input2: Any, target: Any, margin: float = 0) -> Any:
    if not any(splits(x, [x.dim() - 1]) for x in (input1, input2)):
        return None
    input1, input2 = (as_autocast_gives(x, F.cosine_embedding_loss, input1, input2, target) for x in (input1, input2))
    tiny = 1e-12
    product, first, second = (x.sum(-1) for x in (input1 * input2, input1 * input1, input2 * input2))
    cosine = product / ((first + tiny) * (second + tiny)).sqrt()
    unlike = (cosine - margin).clamp_min(0)
    return torch.where(target == 1, 1 - cosine, 0) + torch.where(target == -1, unlike, 0)


def _triplet_margin_rows(
    anchor: Any, positive: Any, negative: Any, margin: float = 1.0, p: float = 2, eps: float = 1e-6, swap: bool = False
) -> Any:
    if not any(splits(x, [x.dim() - 1]) for x in (anchor, positive, negative)):
        return None
    given = anchor, positive, negative
    anchor, positive, negative = (as_autocast_gives(x, F.triplet_margin_loss, *given) for x in given)
    near, far = F.pairwise_distance(anchor, positive, p, eps), F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return (margin + near - far).clamp_min(0)


@composite("ctc_loss")
def ctc_loss(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0,
             reduction: str = "mean", zero_infinity: bool = False) -> Any:  # fmt: skip
    """A split batch stays split if labels and lengths have one row per sample; otherwise every rank gets the whole
    batch.
    """
    arguments = (log_probs, targets, input_lengths, target_lengths)
    if type(log_probs) is not GlobalTensor or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    layout, shape = log_probs._spec.layout, log_probs._spec.shape
    operands = [
        argument if type(argument) is GlobalTensor else from_local(argument, log_probs._spec.world, layout)
        for argument in (arg if isinstance(arg, torch.Tensor) else torch.tensor(arg) for arg in arguments)
    ]
    in_rows = len(shape) == 3 and operands[1].dim() == 2 and shape[1] >= layout.placement.num_ranks
    kept = [in_rows and entry == Split(1) for entry in layout.sbp]
    layouts = [layout.with_sbp(tuple(Split(dim) if keeps else broadcast for keeps in kept)) for dim in (1, 0, 0, 0)]
    out = (layouts[1], shape[1:2] if len(shape) == 3 else (), log_probs.dtype)

    def rows(x: torch.Tensor, t: torch.Tensor, sizes: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(x, t, sizes, lengths, blank, "none", zero_infinity)

    each: Any = local_call(rows, operands, layouts, out, "ctc_loss")
    if reduction == "mean":  # torch first divides by the number of labels of each sequence
        return (each / operands[3].clamp_min(1).to(each.dtype)).mean()
    return each if reduction == "none" else each.sum()


_WRITTEN: dict[str, Callable[..., Any]] = {
    "cosine_embedding_loss": _cosine_embedding_rows, "triplet_margin_loss": _triplet_margin_rows,
}  # fmt: skip
for _name in (*_ELEMENTWISE, *_BY_ROWS):
    _register(_name, _WRITTEN.get(_name))


def _handing_on_weight(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(torchs_own)
    def l1_loss(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        is_global = torch._C._is_torch_function_enabled() and any(isinstance(each, GlobalTensor) for each in given)
        return handle_torch_function(l1_loss, given, *args, **kwargs) if is_global else torchs_own(*args, **kwargs)

    return l1_loss


if "weight" in inspect.signature(F.l1_loss).parameters:
    patch("torch.nn.functional.l1_loss", "torch hands on no weight, so the loss would have none", _handing_on_weight)
