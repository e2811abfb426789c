"""Every attribute that a global tensor has beside its shard, with its meaning. No other module adds one.

An attribute has the value of the class until somebody sets it, so that a new tensor costs nothing for those that it
does not use.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from workbench.core.layout import Layout
from workbench.tensors.annotations import Annotated
from workbench.tensors.gradient_state import NO_GRADIENT_STATE, GradientState, forget_sum
from workbench.tensors.spec import Spec


class TensorState(Annotated):
    """The base of ``GlobalTensor`` that declares its attributes. Copies of a tensor take none of them along unasked."""

    _spec: Spec
    """Layout, logical shape and world."""
    _is_param: bool = False
    """Whether it is an ``nn.Parameter``: operations follow its layout."""

    _gradient: GradientState = NO_GRADIENT_STATE
    """What it keeps of its gradient beside ``.grad``."""
    _is_grad: bool = False
    """Whether it is the ``.grad`` of a tensor, which has its dual layout whatever it is set to."""
    _owner: weakref.ref[Any] | None = None
    """Of a gradient: the tensor that it is the gradient of."""
    _reducer: Any = None
    """Of a parameter: the ``GradientReducer`` that sums its gradient over ranks."""

    _has_data_alias: bool = False
    """Whether somebody has taken its ``.data``, or it is that: writes to one of the two do not count for the other."""
    _boxings: dict[tuple[Layout, Any], Any] | None = None
    """Results of implicit boxings, by target layout and by the state of the tensor that they are valid for."""

    _optimizer_shard: Any = None
    """Of a parameter under ZeRO: the ``Shard`` that this rank's optimizer changes."""
    _optimizer_part: tuple[torch.Tensor, int, Spec] | None = None
    """Of a parameter: the plain tensor that its optimizer changes, made for this address and spec."""
    _keeps_state_on_host: bool = False
    """Of a parameter under ``offload=optimizer``: its optimizer's state lies in host memory between steps."""

    _origin: Any = None
    """Of a ``BoxedView``: the ``Origin`` that it was boxed from."""
    _root: Any = None
    """Of a ``BoxedView``: the boxed tensor whose storage it shares; None where it has its own."""
    _view_call: Any = None
    """Of a ``BoxedView``: the ``ViewCall`` that made it, which tells the strides that it has on one device."""
    _ambiguity: str = ""
    """Of an ``AmbiguousTensor``: what was written in place."""

    _history_base: Any = None
    """Of a placeholder: the tensor that it is a view of; what is written to the view is in the base's history."""
    _memory_owner: TensorState | None = None
    """Of a placeholder: the tensor whose memory it shares on the ranks of the placement, which counts the writes."""

    _has_moved_dims: bool = False
    """Of a placeholder: whether it is a view with dims in another order, of which a ``reshape`` is a copy."""


DECLARED = frozenset(TensorState.__annotations__)


def version_of(tensor: TensorState) -> int:
    """The number of writes to the memory of a tensor: torch's ``_version``, also where there is no memory.

    The caller has switched off ``__torch_function__``.
    """
    owner = tensor._memory_owner
    return tensor._version if owner is None else owner._version


def count_write(tensor: TensorState) -> None:
    """Count a write to a placeholder, for all tensors that share its memory elsewhere."""
    torch.autograd.graph.increment_version(tensor)
    if tensor._memory_owner is not None:
        torch.autograd.graph.increment_version(tensor._memory_owner)


def share_memory(made: TensorState, tensor: TensorState) -> None:
    """Let ``made``, which has the memory of ``tensor``, be a view of the same base."""
    made.__class__ = tensor.__class__
    made._memory_owner, made._origin, made._ambiguity = tensor._memory_owner, tensor._origin, tensor._ambiguity
    made._root = tensor if tensor._origin is not None and tensor._root is None else tensor._root
    made._view_call = tensor._view_call


def forget_sum_of(grad: TensorState) -> None:
    """The sum that was made of a gradient is no longer the one to use."""
    owner = None if grad._owner is None else grad._owner()
    if owner is not None:
        forget_sum(owner)


def forget_derived(tensor: TensorState) -> None:
    """Drop what was made from a tensor's values: boxings, the optimizer's part, sums of the gradient."""
    tensor._boxings = tensor._optimizer_part = None
    if tensor._gradient is not NO_GRADIENT_STATE:
        tensor._gradient.shard = tensor._gradient.sum = None


def forget_memory(tensor: TensorState) -> None:
    """``forget_derived`` for a tensor that has other memory now: it is no view of another tensor any more."""
    forget_derived(tensor)
    if tensor._origin is not None or tensor._ambiguity:
        tensor.__class__ = type(tensor).__mro__[1]  # GlobalTensor, in place of BoxedView or AmbiguousTensor
    tensor._origin = tensor._root = tensor._view_call = tensor._history_base = tensor._memory_owner = None
