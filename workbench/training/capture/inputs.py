"""The inputs of a captured step: what must be alike for a replay, and how they lie in memory."""

from __future__ import annotations

from typing import Any

import torch

from workbench.errors import CaptureError
from workbench.tensors.global_tensor import GlobalTensor, local_torch, plain, wrap


def kind_of(leaf: Any) -> Any:
    """What an argument must have in common with a recording's: everything but the values of a tensor."""
    if isinstance(leaf, GlobalTensor):
        with local_torch():
            return leaf._spec, leaf.dtype, leaf.requires_grad
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad
    try:
        hash(leaf)
    except TypeError:
        raise CaptureError(
            f"capture: an argument of type {type(leaf).__name__} is neither a tensor nor hashable. A recording is made "
            "for the values of such arguments, so they must be comparable. Hand in tensors, numbers or strings."
        ) from None
    return type(leaf), leaf


def own_input(leaf: Any) -> Any:
    """An input as a tensor of its own, which remembers no boxings of earlier steps, and of which no element occurs
    twice: a recording from an expanded tensor would take one for many.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.requires_grad:
        raise CaptureError(
            f"capture: an input of shape {tuple(leaf.shape)} requires a gradient. Inputs change from call to call, and "
            "the gradient would be left on the one that was recorded. Hand in x.detach(), and return gradients with "
            "torch.autograd.grad."
        )
    local = _without_repeats(plain(leaf))
    return wrap(local, leaf._spec) if isinstance(leaf, GlobalTensor) else local.view_as(local)


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """How this rank's part of a tensor lies in memory."""
    return plain(tensor).stride()


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """This rank's part of an input, with these strides: recorded views depend on them. None takes it as it lies."""
    local = plain(tensor)
    if strides is None or local.stride() == strides:
        return local
    return torch.empty_strided(local.shape, strides, dtype=local.dtype, device=local.device).copy_(local)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    is_expanded = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.contiguous() if is_expanded else tensor
