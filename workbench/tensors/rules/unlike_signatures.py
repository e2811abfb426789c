"""Functions of ``torch`` and operators of ``torch.ops.aten`` that share their name with one of
``torch.nn.functional`` and take other arguments: ``torch.kl_div(input, target, 1)``,
``torch.ops.aten.mse_loss(input, target, 2)``, ``torch.batch_norm(input, weight, bias, running_mean, ...)``.

Composites are written for the latter, and are found by name. Here calls of the former become calls of the latter.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from workbench.tensors.dispatch.arguments import parameters_of
from workbench.tensors.dispatch.registry import EXACT

_NAMES = """
batch_norm instance_norm binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss ctc_loss
hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
"""
_REDUCTIONS = ("none", "mean", "sum")
"""In the order of torch's numbers for them."""


def _register(name: str) -> None:
    """Arguments have the same names in all of them, but a reduction is a number, and ``torch`` has switches for cuDNN.
    Many losses are in ``torch._C._nn`` in place of ``torch``.
    """
    of_torch, functional = getattr(torch, name, None) or getattr(torch._C._nn, name), getattr(F, name)
    names = [parameter for parameter, _, _ in parameters_of(of_torch)[0]]

    def call(**given: Any) -> Any:
        given.pop("cudnn_enabled", None)
        if isinstance(given.get("reduction"), int):
            given["reduction"] = _REDUCTIONS[given["reduction"]]
        return functional(**given)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
    EXACT[of_torch] = EXACT[getattr(torch.ops.aten, name)] = call


for _name in _NAMES.split():
    _register(_name)
