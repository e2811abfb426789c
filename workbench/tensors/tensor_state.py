"""What a global tensor has beside its shard: its spec, what it keeps of its gradient, every other attribute, and where
it is a placeholder, a storage of any shape and dtype over one zero.

An attribute has the value of the class until somebody sets it, so that a new tensor costs nothing for those that it
does not use. No other module adds one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from workbench.core.layout import Layout, Shape
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.specs import Spec
from workbench.tensors.writes import Writes, kept_writes, writes_to
from workbench.tensors.writes import keep_writes as keep_writes

if TYPE_CHECKING:

    class Annotated(torch.Tensor):
        """The base of ``GlobalTensor`` where types are checked."""

        def __matmul__(self, other: Any) -> Self: ...
        def __rmatmul__(self, other: Any) -> Self: ...
        def __add__(self, other: Any) -> Self: ...
        def __radd__(self, other: Any) -> Self: ...
        def __sub__(self, other: Any) -> Self: ...
        def __rsub__(self, other: Any) -> Self: ...
        def __mul__(self, other: Any) -> Self: ...
        def __rmul__(self, other: Any) -> Self: ...
        def __truediv__(self, other: Any) -> Self: ...
        def __pow__(self, other: Any) -> Self: ...
        def __neg__(self) -> Self: ...
        def __getitem__(self, index: Any) -> Self: ...
        def sum(self, *args: Any, **kwargs: Any) -> Self: ...
        def mean(self, *args: Any, **kwargs: Any) -> Self: ...
        def detach(self) -> Self: ...

else:
    Annotated = torch.Tensor


class GradientState:
    """The gradient of one tensor, as far as autograd does not hold it itself.

    Attributes:
        placeholder: on a placeholder, False while the owner has no gradient, then True; the placeholder of the
            gradient, once somebody has read it.
        reusable: the placeholder of the last step's gradient, whose memory the next one takes.
        shard: under ZeRO 2 and 3, this rank's shard of the summed gradient, which takes the place of ``.grad``.
        shard_spec: on a placeholder whose owner keeps shards: the spec of the tensor, and the spec of its shards.
        sum: the sum of the terms of ``.grad`` over ranks, with what it holds for (see ``training.gradients``).
    """

    placeholder: Any = False
    reusable: Any = None
    shard: Any = None
    shard_spec: tuple[Any, Any] | None = None
    sum: Any = None


class _NoGradientState(GradientState):
    """The state of all tensors that have none of their own; nothing can be written to it."""

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"{name}: this state belongs to all tensors. Take gradient_state(tensor).")


NO_GRADIENT_STATE = _NoGradientState()


def gradient_state(tensor: Any) -> GradientState:
    """The tensor's own state, made by the first call."""
    state: GradientState = tensor._gradient
    if state is NO_GRADIENT_STATE:
        state = tensor._gradient = GradientState()
    return state


def forget_sum(tensor: Any) -> None:
    """Drop the sum that was made of a tensor's gradient: a step has used it, or the gradient has changed."""
    if tensor._gradient is not NO_GRADIENT_STATE:
        tensor._gradient.sum = None


class TensorState(Annotated):
    """The base of ``GlobalTensor`` that declares its attributes. Copies of a tensor take none of them along unasked."""

    _spec: Spec
    """Layout, logical shape and world."""
    _is_param: bool = False
    """Whether it is an ``nn.Parameter``: operations follow its layout."""

    _gradient: GradientState = NO_GRADIENT_STATE
    """What it keeps of its gradient beside ``.grad``."""
    _is_grad: bool = False
    """Whether it is the ``.grad`` of a tensor, which has its dual layout whatever it is set to; or the data of one."""
    _owner: weakref.ref[Any] | None = None
    """Of a gradient: the tensor that it is the gradient of."""
    _reducer: Any = None
    """Of a parameter: the ``GradientReducer`` that sums its gradient over ranks."""
    _number: int = 0
    """Of a parameter: its place in an order that all ranks have; an optimizer may list the same ones in another."""

    _writes: Writes | None = None
    """Of a placeholder whose ``.data`` was read or set: its writes, which others have in storage (``keep_writes``)."""
    _memory: object | None = None
    """Stands for the memory that it was last given by ``.data``, on every rank (see ``memory_of``)."""
    _boxings: dict[tuple[Layout, Any], Any] | None = None
    """Results of implicit boxings, by target layout and by the state of the tensor that they are valid for."""
    _last_use: int = 0
    """Of such a result in a scheduled step: the number of its last use among those of its micro-batch."""

    _optimizer_shard: Any = None
    """Of a parameter under ZeRO: the ``Shard`` that this rank's optimizer changes."""
    _optimizer_part: tuple[torch.Tensor, int, Spec] | None = None
    """Of a parameter: the plain tensor that its optimizer changes, made for this address and spec."""
    _is_read_in_place: bool = False
    """Of a value of ``optimizer.state_dict()``: only the ranks of its placement read it, because others lack it."""
    _keeps_state_on_host: bool = False
    """Of a parameter under ``offload=optimizer``: its optimizer's state lies in host memory between steps."""

    _origin: Any = None
    """Of a ``BoxedView``: the ``Origin`` that it was boxed from."""
    _root: Any = None
    """Of a ``BoxedView``: the boxed tensor whose storage it shares; None where it has its own."""
    _view_call: Any = None
    """Of a ``BoxedView``: the ``ViewCall`` that made it, which tells the strides that it has on one device."""
    _boxed_views: weakref.WeakValueDictionary[int, Any] | None = None
    """The boxed views that were made from it, or share its storage, by their ids."""

    _history_base: Any = None
    """Of a placeholder: the tensor that it is a view of; what is written to one of them is in the other's history."""
    _history_views: weakref.WeakValueDictionary[int, Any] | None = None
    """Of a placeholder: its views, by their ids."""
    _memory_owner: TensorState | None = None
    """Of a placeholder: what counts its writes: the tensor whose memory it shares on the placement, or an alias."""
    _strides: tuple[int, ...] | None = None
    """Of a placeholder: its strides on one device, where they are known not to be those of a contiguous tensor."""


DECLARED = frozenset(TensorState.__annotations__)


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes to the memory of a tensor: torch's ``_version``, for global tensors also where there is no
    memory, with writes through ``.data``, and for tensors of inference mode. 0 for plain tensors of that mode.

    The caller has switched off ``__torch_function__``.
    """
    if not isinstance(tensor, TensorState):
        return writes_to(tensor)
    owner = memory_owner(tensor)
    writes = kept_writes(owner)
    return writes_to(owner) if writes is None else writes_to(owner) + writes.total()


def writes_of(tensor: TensorState) -> Writes:
    """What counts the writes to the memory of a tensor through ``.data``, made by the first call.

    The caller has switched off ``__torch_function__``.
    """
    owner = memory_owner(tensor)
    found = kept_writes(owner)
    if found is None:
        found = Writes()
        found.add(owner)
    return found


def count_in_inference_mode(target: TensorState) -> None:
    """Count a write in place; torch counts it unless the tensor is one of inference mode.

    The caller has switched off ``__torch_function__``.
    """
    if target.is_inference():
        writes_of(target).add_one()


def memory_of(tensor: TensorState) -> object:
    """What stands for the memory of a tensor, made by the first call. Setting ``.data`` changes it on all ranks alike,
    also where a shard is empty or there is none; setting ``.data`` of earlier brings it back.
    """
    if tensor._memory is None:
        tensor._memory = object()
    return tensor._memory


def count_write(tensor: TensorState) -> None:
    """Count a write to a placeholder, for all tensors that share its memory elsewhere."""
    owner = memory_owner(tensor)
    before = writes_to(owner)
    torch.autograd.graph.increment_version(tensor)
    if writes_to(owner) == before:  # else they share their count
        torch.autograd.graph.increment_version(owner)


def memory_owner(tensor: TensorState) -> TensorState:
    """The tensor that counts the writes to the memory of ``tensor``."""
    while tensor._memory_owner is not None:
        tensor = tensor._memory_owner
    return tensor


def memory_owner_without_history(tensor: TensorState) -> TensorState:
    """The same, for an alias of a placeholder outside of its history: it may outlive the graph, and must not keep it.

    The caller has switched off ``__torch_function__``.
    """
    owner = memory_owner(tensor)
    if owner.is_leaf:
        return owner
    counter = owner.detach()  # which shares the count of writes
    counter.__class__ = owner.__class__  # a placeholder, to all that look at it
    counter._spec, counter._writes = owner._spec, owner._writes
    owner._memory_owner = counter
    return counter


def share_memory(made: TensorState, tensor: TensorState) -> None:
    """Let ``made``, which has the memory of ``tensor``, be a view of the same base."""
    made.__class__ = tensor.__class__
    made._origin, made._strides = tensor._origin, tensor._strides
    if tensor._spec.is_placeholder:
        made._memory_owner = memory_owner_without_history(tensor)
    made._root = tensor if tensor._origin is not None and tensor._root is None else tensor._root
    made._view_call = tensor._view_call
    if made._origin is not None:
        register_view(made)


def register_view(view: Any) -> None:
    """Let the tensors that a boxed view goes by know it (see ``separate_views``)."""
    call = view._view_call
    for tensor in (view._origin.base, view._root, *call.args, *call.kwargs.values()):
        if isinstance(tensor, TensorState):
            if tensor._boxed_views is None:
                tensor._boxed_views = weakref.WeakValueDictionary()
            tensor._boxed_views[id(view)] = view


def separate_views(tensor: TensorState) -> None:
    """Before ``tensor`` gets other memory, or another shape: its boxed views go by an alias of what it was, as on one
    device, where a view keeps its memory and its shape.

    The caller has switched off ``__torch_function__``.
    """
    views = [] if tensor._boxed_views is None else list(tensor._boxed_views.values())
    if not views:
        return
    with hidden_from_modes():
        former: Any = tensor.as_subclass(torch.Tensor)
    former.__class__ = tensor.__class__
    former._spec, former._strides = tensor._spec, tensor._strides
    former._origin, former._root, former._view_call = tensor._origin, tensor._root, tensor._view_call
    if tensor._spec.is_placeholder:
        former._writes, former._memory_owner = writes_of(tensor), tensor._memory_owner
        former._history_base = tensor if tensor._history_base is None else tensor._history_base
    for view in (view for view in views if view._origin is not None):  # None: it is a view no more
        if view._origin.base is tensor:
            view._origin.base = former
        if view._root is tensor:
            view._root = former
        view._view_call = view._view_call.with_tensor(tensor, former)
        register_view(view)


def forget_derived(tensor: TensorState) -> None:
    """Drop what was made from a tensor's values: boxings, the optimizer's part, sums of the gradient."""
    tensor._boxings = tensor._optimizer_part = None
    if tensor._gradient is not NO_GRADIENT_STATE:
        tensor._gradient.shard = tensor._gradient.sum = None


def forget_memory(tensor: TensorState) -> None:
    """``forget_derived`` for a tensor that has other memory now: it is no view of another tensor any more."""
    forget_derived(tensor)
    if tensor._origin is not None:
        tensor.__class__ = type(tensor).__mro__[1]  # GlobalTensor, in place of BoxedView
    tensor._origin = tensor._root = tensor._view_call = tensor._history_base = tensor._memory_owner = None
    tensor._writes = tensor._strides = None


_data = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_num_modes = torch._C._len_torch_dispatch_stack


def new_placeholder(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor over memory that all placeholders of its kind share: nothing reads or writes it.

    Placeholders are made at every call of a function on another stage's tensors. Another tensor over known memory takes
    a sixth of the time of a new one.
    """
    if _num_modes() or torch.is_inference_mode_enabled():  # modes must see a creation function
        return spread_zero(shape, dtype, device)
    return _data(_zero(tuple(shape), dtype, device))  # not detach(), which would share the count of writes


def applying(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without torch's look at each argument, which only function transforms need."""
    in_c: Any = super(torch.autograd.Function, function)
    applied = in_c.apply

    def apply(*args: Any) -> Any:
        return (function.apply if torch._C._are_functorch_transforms_active() else applied)(*args)

    return apply


def spread_zero(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new zero in any shape: a term of a sum, or a parameter that has no values yet."""
    # An expanded tensor is a view, and views refuse the in-place functions that placeholders repeat.
    with hidden_from_modes():  # a mode that keeps the zero would see later writes to it
        return torch.zeros((), dtype=dtype, device=device).as_strided_(shape, (0,) * len(shape))


@lru_cache(maxsize=4096)
def _zero(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return spread_zero(shape, dtype, device)
