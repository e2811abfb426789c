"""Gradients of leaves: those that a step finds, and those that it leaves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch
from workbench.tensors.leaf_gradients import keep_grad_shard


class LeafCollector(TorchDispatchMode):
    """Collects the leaves of autograd that a run works on."""

    lets_read = True
    """Values may be looked at meanwhile (see ``dispatch.local_call.can_read``)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with local_torch():
            for value in tree_leaves((args, kwargs)):
                is_leaf = isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
                if is_leaf and not hasattr(value, "fake_mode"):  # torch makes fake ones to find shapes under autocast
                    self.found[id(value)] = value
            return func(*args, **(kwargs or {}))


def held_grad(leaf: torch.Tensor) -> torch.Tensor | None:
    """The local gradient of a leaf: autograd's, or the shard that ZeRO keeps in its place. Under ``local_torch``."""
    grad = leaf.grad
    return leaf._gradient.shard if grad is None and isinstance(leaf, GlobalTensor) else grad


def has_grad(leaf: torch.Tensor) -> bool:
    """Whether a leaf has a gradient: a placeholder, whether its owner has one. All ranks say the same. Under
    ``local_torch``.
    """
    if isinstance(leaf, GlobalTensor) and leaf._spec.is_placeholder:
        return leaf._gradient.placeholder is not False
    return held_grad(leaf) is not None


def gradient_kinds(leaves: Iterable[torch.Tensor]) -> tuple[tuple[bool, bool], ...]:
    """Of each leaf, whether it takes a gradient, and whether it has one: no module may have it, so that guards see a
    change.
    """
    with local_torch():
        return tuple([(leaf.requires_grad, has_grad(leaf)) for leaf in leaves])


def shard_spec(leaf: torch.Tensor) -> Spec | None:
    """The spec of the shard that is the gradient of a leaf; None where the gradient is autograd's."""
    shard = leaf._gradient.shard if isinstance(leaf, GlobalTensor) else None
    return None if shard is None else shard._spec


def hold_grad(leaf: Any, grad: torch.Tensor, spec: Spec | None) -> None:
    """Give a leaf its gradient; with a spec, as the shard that ZeRO keeps. Under ``local_torch``."""
    if spec is None:
        leaf.grad = grad
    else:
        keep_grad_shard(leaf, grad, spec)
