"""Steps of Adam, and of SGD with momentum, in one pass over memory, where the user leaves the choice to torch.

``foreach=None, fused=None`` lets torch choose. On a CPU it chooses a loop over the parameters with a dozen functions
each (SGD: three), each of which passes over memory once. The fused step passes over memory once in all: 3 times faster
on a GPT of width 256, twice for SGD. It is used for single and double precision only, where the two differ by rounding.
torch's fused step on a CPU reads gradients as if they were contiguous, so it does not get others. On a GPU torch would
choose a dozen launches for all parameters together; the fused step is one or a few.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

_ADAM, _SGD = inspect.unwrap(torch.optim.Adam.step), inspect.unwrap(torch.optim.SGD.step)  # Adam's is AdamW's as well
_PRECISIONS = (torch.float32, torch.float64)


def fuse(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Make groups of plain tensors step in one pass, where the user has not chosen; returns these groups, for
    ``unfuse``.

    >>> optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    >>> groups = fuse(optimizer)
    >>> optimizer.param_groups[0]["fused"], unfuse(groups), optimizer.param_groups[0]["fused"]
    (True, None, None)
    """
    step = inspect.unwrap(type(optimizer).step)
    if step is not _ADAM and step is not _SGD:
        return []
    chosen = [group for group in optimizer.param_groups if _is_open(group) and all(map(_fits, group["params"]))]
    chosen = [group for group in chosen if _steps_are_beside(optimizer, group)]
    if step is _SGD:
        chosen = [group for group in chosen if _has_momentum(group) and _momenta_are_alike(optimizer, group)]
    for group in chosen:
        group["fused"] = True
    return chosen


def unfuse(groups: list[dict[str, Any]]) -> None:
    """Restore the user's open choice."""
    for group in groups:
        group["fused"] = None


def _is_open(group: dict[str, Any]) -> bool:
    """Whether the user has left the choice of a group's step to torch."""
    said = (group.get("fused", False), group.get("foreach", False))
    return said == (None, None) and not group.get("differentiable") and not group.get("capturable")


def _steps_are_beside(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the numbers of steps are on the device, as a fused step requires: another step keeps them on the CPU."""
    known = [(part, optimizer.state.get(part, {}).get("step")) for part in group["params"] if not part.is_cpu]
    return all(step is None or step.device == part.device for part, step in known)


def _has_momentum(group: dict[str, Any]) -> bool:
    """Whether SGD's step has several functions to fuse; the fused step does not take rates that are tensors."""
    numbers = (group["lr"], group["momentum"], group["weight_decay"])
    return bool(group["momentum"]) and all(isinstance(number, (int, float)) for number in numbers)


def _momenta_are_alike(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether all parameters that step have a momentum of their dtype, or none has one, as the fused step requires."""
    stepping = [part for part in group["params"] if part.grad is not None]
    known = [optimizer.state.get(part, {}).get("momentum_buffer") for part in stepping]
    if all(momentum is None for momentum in known):
        return True
    return all(
        momentum is not None and momentum.dtype is part.dtype and momentum.is_contiguous()
        for momentum, part in zip(known, stepping, strict=True)
    )


def _fits(part: torch.Tensor) -> bool:
    """Whether torch's fused step is right for a parameter."""
    if part.is_meta or part.dtype not in _PRECISIONS or not part.is_contiguous():
        return False
    grad = part.grad
    return grad is None or (grad.layout is torch.strided and grad.dtype is part.dtype and grad.is_contiguous())
