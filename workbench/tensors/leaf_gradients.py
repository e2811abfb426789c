"""The gradients of leaves, as backward, optimizers and schedules read and set them on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workbench.tensors.global_tensor import GlobalTensor, grad_slot, local_torch, wrap
from workbench.tensors.specs import Spec
from workbench.tensors.tensor_state import forget_sum, gradient_state

read_grad: Callable[[torch.Tensor], torch.Tensor | None] = grad_slot.__get__
"""What autograd has accumulated on this rank, without a layout."""


def owner_of_grad(grad: GlobalTensor) -> GlobalTensor | None:
    """The tensor whose ``.grad`` this is, in the layout in which autograd left it; None for any other tensor."""
    found = None if grad._owner is None else grad._owner()
    with local_torch():
        return found if found is not None and grad_slot.__get__(found) is grad else None


def set_reduced_grad(leaf: GlobalTensor, grad: torch.Tensor | None) -> None:
    """Give a leaf a gradient that is summed already: it has the leaf's own layout, not the dual one."""
    wrapped = None if grad is None else wrap(grad, leaf._spec)
    if leaf._spec.is_placeholder:
        gradient_state(leaf).placeholder, wrapped = False if wrapped is None else wrapped, None
    with local_torch():
        grad_slot.__set__(leaf, wrapped)


def accumulate_grad(leaf: GlobalTensor, grad: torch.Tensor) -> None:
    """Let ``grad`` be what autograd has accumulated on this rank; a shard of what it had accumulated before stays."""
    forget_sum(leaf)
    with local_torch():
        grad_slot.__set__(leaf, grad)


def keep_grad_shard(leaf: GlobalTensor, shard: torch.Tensor, spec: Spec) -> None:
    """Let a summed gradient, in a layout of its own, be the gradient of ``leaf``; autograd's term is given back."""
    if not isinstance(shard, GlobalTensor):
        shard = wrap(shard, spec)
        shard._is_grad = True
    with local_torch():
        grad_slot.__set__(leaf, None)
    state = gradient_state(leaf)
    state.sum, state.shard = None, shard


def mark_placeholder_leaves(node: Any) -> None:
    """Leaves before ``node`` whose owner accumulates a gradient now: ``leaf.grad is None`` must agree with it."""
    for before, _ in node.next_functions:
        leaf = getattr(before, "variable", None)
        if isinstance(leaf, GlobalTensor) and leaf._gradient.placeholder is False and leaf._spec.is_placeholder:  # noqa: SIM102
            if will_accumulate(before):
                mark_placeholder(leaf)


def mark_placeholder(leaf: GlobalTensor) -> None:
    """The owner of a placeholder has a gradient now; so it has after a replay of the step that is being recorded."""
    gradient_state(leaf).placeholder = True
    recorder = leaf._spec.world.context.recorder
    if recorder is not None:
        recorder.placeholders.append(leaf)


def has_hooks(leaf: torch.Tensor) -> bool:
    """Whether a leaf has hooks on its gradient."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def will_accumulate(node: Any) -> bool:
    """Whether the backward that runs adds to the gradient of the leaf of this node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad returns this gradient and does not write .grad
        return False
