"""Fused experts on fake tensors, whose forward may loop over the experts that values name: the same products, as if all
experts were chosen alike often.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from workbench.training.strategies.fused_experts import count_experts


@contextmanager
def even_experts(module: nn.Module) -> Iterator[None]:
    """A context in which fused experts whose forward reads values give a result of the right shape and work."""
    found = [part for part in module.modules() if "forward" not in vars(part) and count_experts(part)]
    for part in found:
        part.forward = partial(_forward, part)
    try:
        yield
    finally:
        for part in found:
            del vars(part)["forward"]


def _forward(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
    try:
        return type(part).forward(part, *args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return _evenly(part, *args, *kwargs.values())


def _evenly(part: nn.Module, tokens: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each matrix of each expert takes its share of the rows; a gated result is cut to what the last matrix takes."""
    matrices = [getattr(part, name) for name, parameter in part.named_parameters(recurse=False) if parameter.ndim == 3]
    experts, num_rows = len(matrices[0]), numbers.numel()
    rows = tokens.flatten(0, -2).repeat_interleave(numbers.shape[-1], 0)
    rows = torch.cat([rows, rows.new_zeros(-num_rows % experts, rows.shape[1])]).view(experts, -1, rows.shape[1])
    for matrix in matrices:
        first, second = matrix.shape[1:]
        taken = rows.shape[-1]
        if matrix is matrices[-1]:  # gives the width of a token
            taken = second if first == tokens.shape[-1] else first
        rows = torch.bmm(rows[..., :taken], matrix if taken == first else matrix.transpose(1, 2))
    results = rows.flatten(0, 1)[:num_rows] * weights.flatten()[:, None]
    return results.view(*numbers.shape, -1).sum(-2)
