"""Adam's step in one pass over memory, where the user leaves its implementation to torch.

``foreach=None, fused=None`` means that torch may choose. On a CPU it chooses a loop over the parameters with a dozen
functions each, every one of which goes through memory once; the fused one goes through it once in all (3 times faster
on a GPT of width 256). Single and double precision only: there the two differ by rounding, in less they do not.
torch's fused step on a CPU reads gradients as if they were contiguous, so others are not given to it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

_ADAM = inspect.unwrap(torch.optim.Adam.step)  # AdamW's as well; SGD's fused step wants all or none to have momentum
_PRECISIONS = (torch.float32, torch.float64)


def fuse(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Let groups of plain tensors step in one pass where nobody has said how; these groups, for ``unfuse``.

    >>> optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    >>> groups = fuse(optimizer)
    >>> optimizer.param_groups[0]["fused"], unfuse(groups), optimizer.param_groups[0]["fused"]
    (True, None, None)
    """
    if inspect.unwrap(type(optimizer).step) is not _ADAM:
        return []
    chosen = [group for group in optimizer.param_groups if _is_open(group) and all(map(_fits, group["params"]))]
    for group in chosen:
        group["fused"] = True
    return chosen


def unfuse(groups: list[dict[str, Any]]) -> None:
    """Leave it open again, as the user has it."""
    for group in groups:
        group["fused"] = None


def _is_open(group: dict[str, Any]) -> bool:
    """Whether nobody has said how a group steps."""
    said = (group.get("fused", False), group.get("foreach", False))
    return said == (None, None) and not group.get("differentiable") and not group.get("capturable")


def _fits(part: torch.Tensor) -> bool:
    """Whether torch's fused step on a CPU is right for a parameter."""
    if not part.is_cpu or part.dtype not in _PRECISIONS or not part.is_contiguous():
        return False
    grad = part.grad
    return grad is None or (grad.layout is torch.strided and grad.dtype is part.dtype and grad.is_contiguous())
