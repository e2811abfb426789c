"""GlobalTensor: a torch.Tensor subclass over this rank's shard that knows the layout and the shape of the whole.

An operation runs the local torch function on the shards, under torch's own autograd, and wraps the result. On a rank
outside its placement a tensor is a *placeholder*: right shape and dtype, no storage, linked into autograd.

Operations go to ``tensors/dispatch``, changes of layout to ``tensors/boxing``. Both import this file, so its methods
find them in ``later``, which loads them at the first use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch

from workbench.core.boxing import BoxingPlan
from workbench.core.boxing_path import BoxingPath, find_boxing_path
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import NdSbp, SbpLike
from workbench.tensors.hidden_from_modes import hidden_from_modes
from workbench.tensors.late_imports import later
from workbench.tensors.specs import Spec as Spec
from workbench.tensors.specs import spec_of as spec_of
from workbench.tensors.tensor_state import (
    NO_GRADIENT_STATE,
    GradientState,
    TensorState,
    forget_memory,
    gradient_state,
    keep_writes,
    memory_of,
    separate_views,
    version_of,
    writes_of,
)
from workbench.tensors.tensor_state import new_placeholder as new_placeholder

if TYPE_CHECKING:
    from workbench.tensors.boxing.handle import Handle

_torch_function_enabled = torch._C._is_torch_function_enabled
_is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
local_torch = torch._C.DisableTorchFunctionSubclass
"""Context in which global tensors are plain local tensors to torch."""


def is_below_autograd() -> bool:
    """Whether this is a dispatch mode that is shown an operator: there, a global tensor is its shard."""
    return _is_excluded(_AUTOGRAD) and not torch.is_inference_mode_enabled()  # which excludes autograd everywhere


class GlobalTensor(TensorState):
    """One logical tensor over the ranks of a placement. The object on each rank holds that rank's shard.

    Creators such as ``wb.randn(..., placement=, sbp=)``, ``wb.to_global`` and ``wb.parallelize`` make it. torch's
    functions work on it and give the numbers of one device. Where layouts do not fit, an operation boxes its operands.

    >>> x = wb.randn(4, 5, placement=wb.placement(ranks=[0, 1]), sbp=wb.sbp.split(0))
    >>> x.shape, x.to_local().shape
    (torch.Size([4, 5]), torch.Size([2, 5]))
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return later.dispatch(func, args, kwargs)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The logical shape. Inside torch's own Python functions that run on shards, and in dispatch modes, the shard's
        shape.
        """
        if _torch_function_enabled() and not is_below_autograd():
            return torch.Size(self._spec.shape)
        with local_torch():
            return _local_shape(self)

    @property
    def placement(self) -> Placement:
        """The ranks that hold the tensor."""
        return self._spec.layout.placement

    @property
    def sbp(self) -> NdSbp:
        """One entry per axis of the placement."""
        return self._spec.layout.sbp

    @property
    def layout_on_ranks(self) -> Layout:
        """Placement and sbp together. (``Tensor.layout`` is torch's word for strided or sparse.)"""
        return self._spec.layout

    @property
    def is_placeholder(self) -> bool:
        """Whether this rank holds no part of the tensor."""
        return self._spec.is_placeholder

    @property
    def _gradient_spec(self) -> Spec:
        """What the gradient is where it is held: terms of a sum, or under ZeRO its shards."""
        scattered = self._gradient.shard_spec
        return scattered[1] if scattered is not None and scattered[0] is self._spec else self._spec.dual

    def _placeholder_of_gradient(self, spec: Spec) -> GlobalTensor:
        """A new tensor, as the owner has a new one; it takes the memory of the last step's, which is faster."""
        state = self._gradient
        if state.reusable is None or state.reusable._spec is not spec or state.reusable.dtype != self.dtype:
            state.reusable = wrap(new_placeholder(spec.shape, self.dtype, spec.world.device), spec)
        made = wrap(_data_slot.__get__(state.reusable), spec)  # not detach(), which would share the count of writes
        made._is_grad = True
        return made

    def _set_where_held(self, state: GradientState, value: Any) -> bool:
        """Set a gradient whose place is not ``.grad``: a shard, or the placeholder of one. False for any other."""
        shard, state.shard, state.sum = state.shard, None, None
        if not isinstance(value, GlobalTensor):
            return False
        if shard is not None and value._spec is shard._spec:
            state.shard = value
            with local_torch():
                grad_slot.__set__(self, None)
            return True
        if state.placeholder is not False and value._spec is self._gradient_spec:  # the owner keeps a shard
            state.placeholder = value
            return True
        return False

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient: a global tensor in the dual layout. The gradient of a B tensor is P, one term on each rank."""
        if not _torch_function_enabled():
            return grad_slot.__get__(self)
        with local_torch():
            grad = grad_slot.__get__(self)
            if grad is None:
                state = self._gradient
                if state.placeholder is False:
                    return state.shard
                if state.placeholder is True:
                    state.placeholder = self._placeholder_of_gradient(self._gradient_spec)
                return state.placeholder
            if not isinstance(grad, GlobalTensor):
                wrap(grad, self._spec.dual)._is_grad = True
                grad._owner = weakref.ref(self)
            return grad

    @grad.setter
    def grad(self, value: Any) -> None:
        state = self._gradient
        has_state = state is not NO_GRADIENT_STATE
        if isinstance(value, GlobalTensor):
            value._is_grad = True
        if has_state and self._set_where_held(state, value):
            return
        if value is None or not _torch_function_enabled():
            if has_state:
                state.placeholder = False
            with local_torch():
                grad_slot.__set__(self, value)
            return
        expected = self._spec.layout.dual()
        if tuple(value.shape) != tuple(self._spec.shape):
            raise RuntimeError(
                f"attempting to assign a gradient of size {list(value.shape)} to a tensor of size "
                f"{list(self._spec.shape)}. Both are logical sizes and must be the same."
            )
        if not isinstance(value, GlobalTensor):
            value = later.from_local(value, self._spec.world, self._spec.layout)
        if value._spec.layout != expected:
            value = later.box(value, expected)
        if self._spec.is_placeholder:
            gradient_state(self).placeholder = value
        elif has_state:
            state.placeholder = False
        with local_torch():
            if not self._spec.is_placeholder or value.requires_grad:
                grad_slot.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        """The same values and layout without history; autograd does not record writes to it."""
        if not _torch_function_enabled():
            return _data_slot.__get__(self)
        with local_torch(), hidden_from_modes(ours=True):  # a recording would take the counter for the values
            writes = writes_of(self)
            alias = wrap(writes.counted(_data_slot.__get__(self)), self._spec)
            keep_writes(alias, writes)
        alias._memory, alias._is_grad = memory_of(self), self._is_grad
        if type(self) is not GlobalTensor:
            later.share_data(alias, self)
        return alias

    @data.setter
    def data(self, value: Any) -> None:
        """Take the values of another tensor: of a global one with its layout, of a plain (whole) one in this layout.

        A parameter keeps its layout: it is the strategy's, and optimizers and the sums of gradients go by it.
        """
        if not _torch_function_enabled():
            _data_slot.__set__(self, value)
            self._writes = None
            return
        with torch.no_grad():
            is_global = isinstance(value, GlobalTensor)
            if not is_global:
                value = later.from_local(value, self._spec.world, self._spec.layout)
            if self._is_grad or not is_global or (self._is_param and value.shape == self.shape):
                value = later.box(value, self._spec.layout.normalized(value._spec.shape))
        with local_torch(), hidden_from_modes():
            before, writes = version_of(self), writes_of(value)
            separate_views(self)
        self._take_data(value)
        with local_torch(), hidden_from_modes():
            writes.add(self, above=before)

    def _take_data(self, value: GlobalTensor) -> None:
        """Take the memory and the layout of another tensor, and keep the gradient."""
        with torch.no_grad():
            grad = self.grad if value._spec is not self._spec else None
            if grad is not None:
                self.grad = None
            shard = self._gradient.shard
            with local_torch():
                local = plain(value)
                if self.is_leaf and self.shape != local.shape:
                    # A living graph keeps the old shape, also of one that is frozen now. Data of another dtype makes
                    # torch forget it.
                    other = torch.float32 if self.dtype == torch.float64 else torch.float64
                    _data_slot.__set__(self, torch.empty(0, dtype=other, device=local.device))
                _data_slot.__set__(self, local)
            forget_memory(self)
            self._spec, self._memory = value._spec, memory_of(value)
            if shard is not None:
                self._gradient.shard = shard
            if grad is not None and grad.shape == self.shape:
                self.grad = grad.to(value.dtype)

    def to_global(self, placement: Placement | None = None, sbp: SbpLike | None = None) -> GlobalTensor:
        """The same logical tensor in another layout: a boxing. All ranks of the world call it.

        In the layout that it already has, the result is the tensor itself. In any other layout the result has its own
        memory.

        Args:
            placement: the ranks that hold the result; default: those of the tensor.
            sbp: one entry per axis of the placement; default: those of the tensor.

        Raises:
            SbpError: wrong number of entries, or a split dim out of range.
            PlacementError: a rank that the world does not have.

        ``x.to_global(sbp=wb.sbp.broadcast)`` of a split ``x`` is an all-gather.
        """
        targets = self._spec.targets
        try:
            target = targets.get((placement, sbp))
        except TypeError:  # a list of entries cannot be looked up
            target = None
        if target is None:
            target = spec_of(self._spec.world, self._layout_of(placement, sbp), self._spec.shape)
            if isinstance(sbp, Hashable):
                targets[placement, sbp] = target
        if target is self._spec:
            return self
        boxed: GlobalTensor = later.box_to(self, target)
        return boxed

    def to_global_async(self, placement: Placement | None = None, sbp: SbpLike | None = None) -> Handle[GlobalTensor]:
        """``to_global`` that sends now and receives in the handle's ``wait()``. All ranks of the world call both.

        It sends the present values, so the tensor may be written before the wait. The result has a gradient like that
        of any boxing. In the layout that the tensor already has, nothing is sent: the result is the tensor itself and
        shows later writes.

        ``handle = x.to_global_async(sbp="B"); y = f(z); x = handle.wait()`` computes ``y`` while the exchange is in
        progress.
        """
        handle: Handle[GlobalTensor] = later.to_global_async(self, placement, sbp)
        return handle

    def boxing_plan(self, placement: Placement | None = None, sbp: SbpLike | None = None) -> BoxingPlan | BoxingPath:
        """The plan of ``to_global`` with the same arguments. It can be printed, and moves nothing.

        >>> p = wb.placement(ranks=[0, 1])
        >>> wb.ones(4, 4, placement=p, sbp="S(0)").boxing_plan(sbp="B").bytes_sent
        {0: 32, 1: 32}
        """
        with local_torch():
            itemsize = self.element_size()
        spec = self._spec
        return find_boxing_path(
            spec.layout, self._layout_of(placement, sbp), spec.shape, itemsize, spec.world.transport.cost
        )

    def to_local(self, *, grad_sbp: SbpLike | None = None) -> torch.Tensor:
        """This rank's shard as a plain tensor that shares its storage; empty on ranks outside the placement.

        A loss that is computed from it counts once per rank for splits and partial sums. For copies (B) on n ranks,
        each rank's loss counts 1/n: the same plain loss on all ranks gives the gradient of one device.

        Args:
            grad_sbp: the layout of the gradient of the result, one entry per axis. Default: B where the tensor is B.
                Give P where each rank computes its own loss from a B tensor.

        Raises:
            SbpError: a gradient of this tensor cannot have the layout ``grad_sbp``.
        """
        local: torch.Tensor = later.to_local(self, grad_sbp)
        local_type = self._spec.world.context.local_type
        return local if local_type is torch.Tensor else local.as_subclass(local_type)

    def full_tensor(self) -> torch.Tensor:
        """The logical tensor as a plain tensor, on every rank of the world. All ranks call it, also those outside the
        placement.

        The result keeps its history. A loss that all ranks compute from it counts once.

        Raises:
            StrategyError: inside a scheduled step whose stages cannot wait for the value.
            ExplicitBoxingError: under ``wb.debug.explicit_boxing()``, if a rank holds no part of the tensor.

        >>> last = wb.placement(ranks=[0])
        >>> wb.ones(2, 3, placement=last, sbp="B").full_tensor().sum()
        tensor(6.)
        """
        later.check_reading(self, "full_tensor")
        value: torch.Tensor = later.to_local(later.on_all_ranks(self))
        return value

    def _layout_of(self, placement: Placement | None, sbp: SbpLike | None) -> Layout:
        """The layout that the arguments of ``to_global`` ask for."""
        current = self._spec.layout
        layout = Layout.of(current.placement if placement is None else placement, current.sbp if sbp is None else sbp)
        layout.placement.check_world(self._spec.world.world_size)
        return layout.normalized(self._spec.shape)

    def __copy__(self) -> GlobalTensor:
        return later.copying.shallow_copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalTensor:
        return later.copying.deep_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return later.copying.reduce(self, protocol)

    def __create_write_items__(self, name: str, same: Any = None) -> Any:
        return later.checkpoint_chunks.write_items(self, name)

    def __create_chunk_list__(self) -> Any:
        return later.checkpoint_chunks.chunk_list(self)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return plain(self)  # torch writes from it and reads into it

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text: str = later.describe(self)
        return text

    def __str__(self) -> str:
        text: str = later.format_values(self)
        return text


_local_shape: Callable[[torch.Tensor], torch.Size] = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_data_slot: Any = torch.Tensor.data
grad_slot: Any = torch.Tensor.grad
"""torch's own ``.grad``: what autograd has accumulated on this rank, without a layout."""


def wrap(local: torch.Tensor, spec: Spec) -> GlobalTensor:
    """Turn the plain tensor ``local``, which nobody else holds, into a global tensor.

    Assigning the class costs a third of ``as_subclass``, which would add an alias node to the graph per operation.
    """
    local.__class__ = GlobalTensor
    local._spec = spec  # type: ignore[attr-defined]
    return local  # type: ignore[return-value]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard as a plain tensor that shares storage and has no history."""
    if type(tensor) is torch.Tensor:
        return tensor.detach()
    with local_torch():
        return tensor.detach()
