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
from workbench.tensors.gradient_state import NO_GRADIENT_STATE, GradientState
from workbench.tensors.spec import Spec


class Writes:
    """The number of writes to one memory through all tensors that ``.data`` has made of it: torch counts those of each
    apart. Reads of ``.data`` change no number, since a program may look at it on one rank only.
    """

    __slots__ = ("_counting", "_past")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._counting: dict[Any, torch.Tensor] = {}  # by the id of a tensor, or by the place of data in the memory
        self._past = 0
        self.add(tensor)

    def add(self, tensor: torch.Tensor, above: int = -1) -> None:
        """Count those to a tensor that has this memory now. ``above``: the number for its memory before."""
        known = self._counting.pop(id(tensor), None)  # its own, or that of one that is no more
        self._past += 0 if known is None else _writes_to(known)
        self._counting[id(tensor)] = tensor.detach()
        self._past += max(0, above + 1 - self.total())

    def counted(self, data: torch.Tensor) -> torch.Tensor:
        """``data``, which torch has just made, as a tensor whose writes count."""
        place = data.shape, data.stride(), data.storage_offset()
        return self._counting.setdefault(place, data).detach()

    def total(self) -> int:
        """The number; it never falls."""
        return self._past + sum(map(_writes_to, self._counting.values()))


def _writes_to(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class TensorState(Annotated):
    """The base of ``GlobalTensor`` that declares its attributes. Copies of a tensor take none of them along unasked."""

    _spec: Spec
    """Layout, logical shape and world."""
    _is_param: bool = False
    """Whether it is an ``nn.Parameter``: operations follow its layout."""
    _replaces_param: bool = False
    """Whether an optimizer has it in the place of a parameter: it keeps its layout when its data is set."""

    _gradient: GradientState = NO_GRADIENT_STATE
    """What it keeps of its gradient beside ``.grad``."""
    _is_grad: bool = False
    """Whether it is the ``.grad`` of a tensor, which has its dual layout whatever it is set to; or the data of one."""
    _owner: weakref.ref[Any] | None = None
    """Of a gradient: the tensor that it is the gradient of."""
    _reducer: Any = None
    """Of a parameter: the ``GradientReducer`` that sums its gradient over ranks."""

    _writes: Writes | None = None
    """Of a tensor whose ``.data`` somebody has read or set, and of what came of it: all writes to their memory."""
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


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes to the memory of a tensor: torch's ``_version``, for global tensors also where there is no
    memory, and with writes through ``.data``. 0 for tensors of inference mode, to which torch counts none.

    The caller has switched off ``__torch_function__``.
    """
    if not isinstance(tensor, TensorState):
        return _writes_to(tensor)
    owner = tensor if tensor._memory_owner is None else tensor._memory_owner
    return _writes_to(owner) if owner._writes is None else owner._writes.total()


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
    tensor._writes = None
