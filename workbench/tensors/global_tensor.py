"""GlobalTensor: a torch.Tensor subclass over this rank's shard that knows the layout and the shape of the whole.

An operation runs the local torch function on the shards, under torch's own autograd, and labels the result. On a rank
outside its placement a tensor is a *placeholder*: right shape and dtype, no storage, linked into autograd.

This file holds the data and its labels. The functions are in ``tensors/dispatch`` and install themselves in
``dispatch``; ``tensors/methods.py`` adds what needs boxing (``to_global``, ``full_tensor`` and so on).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from workbench.core.boxing import plan_boxing
from workbench.core.layout import Layout, Shape
from workbench.core.placement import Placement
from workbench.core.sbp import NdSbp
from workbench.tensors.annotations import Annotated
from workbench.tensors.placeholder_storage import new_placeholder as new_placeholder
from workbench.tensors.world import World

_torch_function_enabled = torch._C._is_torch_function_enabled
_is_excluded: Callable[[Any], bool] = torch._C._dispatch_tls_is_dispatch_key_excluded
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
local_torch = torch._C.DisableTorchFunctionSubclass
"""Context in which global tensors are plain local tensors to torch."""


class Spec:
    """Layout and logical shape of a tensor in one world. Interned: equal specs are the same object.

    Attributes:
        is_placeholder: whether this rank is outside the placement.
        local_shape: shape of this rank's shard; the logical shape for a placeholder.
        plans: the world's cache of what to do for a function and its arguments' specs.
        exchanges: by target and dtype, how this rank boxes (see ``exchange``).
        targets: by the arguments of ``to_global``, the spec they ask for.
    """

    __slots__ = (
        "_dual",
        "_term_ranks",
        "exchanges",
        "is_placeholder",
        "layout",
        "local_shape",
        "plans",
        "shape",
        "targets",
        "world",
    )

    def __init__(self, world: World, layout: Layout, shape: Shape) -> None:
        self.world, self.layout, self.shape, self.plans = world, layout, shape, world.plans
        self.exchanges: dict[Any, Any] = {}
        self.targets: dict[Any, Spec] = {}
        self._dual: Spec | None = None
        self._term_ranks: tuple[int, ...] | None = None
        self.is_placeholder = world.rank not in layout.placement
        self.local_shape = shape if self.is_placeholder else layout.local_shape(shape, world.rank)

    @property
    def dual(self) -> Spec:
        """The spec of this tensor's gradient."""
        if self._dual is None:
            self._dual = spec_of(self.world, self.layout.dual(), self.shape)
        return self._dual

    @property
    def term_ranks(self) -> tuple[int, ...]:
        """The ranks that hold terms of the same part of this tensor's gradient as this rank does, itself among them."""
        if self._term_ranks is None:
            groups = plan_boxing(self.layout.dual(), self.layout, self.shape, itemsize=1).groups
            self._term_ranks = next((group for group in groups if self.world.rank in group), (self.world.rank,))
        return self._term_ranks

    def __repr__(self) -> str:
        return f"Spec({self.layout}, {tuple(self.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Spec:
        return self


def spec_of(world: World, layout: Layout, shape: Shape) -> Spec:
    """The one ``Spec`` of a layout (split dims counted from the front) and a logical shape."""
    key = (layout, shape)
    spec = world.specs.get(key)
    if spec is None:
        layout.placement.check_world(world.world_size)
        spec = world.specs[key] = Spec(world, layout.normalized(shape), tuple(shape))
    return spec


def is_below_autograd() -> bool:
    """Whether this is a dispatch mode that is shown an operator: there, a global tensor is its shard."""
    return _is_excluded(_AUTOGRAD)


class GlobalTensor(Annotated):
    """One logical tensor over the ranks of a placement; this object holds the shard of the rank it lives on.

    Made by ``wb.randn(..., placement=, sbp=)`` and its like, by ``wb.to_global``, or by ``wb.parallelize``. Everything
    torch does with a tensor works on it and gives the numbers of one device; where layouts do not fit, the operation
    boxes its operands.

    >>> x = wb.randn(4, 5, placement=wb.placement("cpu", ranks=[0, 1]), sbp=wb.sbp.split(0))
    >>> x.shape, x.to_local().shape
    (torch.Size([4, 5]), torch.Size([2, 5]))
    """

    _spec: Spec
    _is_param = False
    _placeholder_grad: Any = False
    """On a placeholder: whether its owner has a gradient; the placeholder of it, once somebody has asked."""
    _is_grad = False
    """Whether this is the ``.grad`` of a tensor, which has its dual layout whatever it is set to."""
    _has_data_alias = False
    """Whether somebody has taken its ``.data``, or it is that: nothing tells one of the two of writes to the other."""
    dispatch: Callable[[Any, tuple[Any, ...], dict[str, Any] | None], Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.dispatch(func, args, kwargs)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The logical shape. Inside torch's own Python functions, run on shards, the shard's; so in dispatch modes."""
        if _torch_function_enabled() and not _is_excluded(_AUTOGRAD):
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
        """Placement and sbp together (``Tensor.layout`` is torch's strided / sparse)."""
        return self._spec.layout

    @property
    def is_placeholder(self) -> bool:
        """Whether this rank holds nothing of the tensor."""
        return self._spec.is_placeholder

    @property
    def _spec_of_placeholder_grad(self) -> Spec:
        """What the gradient is where it is held: terms of a sum, or under ZeRO its shards."""
        scattered = self.__dict__.get("_grad_spec")  # of the tensor as it was, and of its gradient's shards
        return scattered[1] if scattered is not None and scattered[0] is self._spec else self._spec.dual

    def _placeholder_of_gradient(self, spec: Spec) -> GlobalTensor:
        """A tensor of its own, as its owner has a new one; what is under it is the last step's, which takes less."""
        known: GlobalTensor | None = self.__dict__.get("_placeholder_grad_before")
        if known is None or known._spec is not spec or known.dtype != self.dtype:
            known = self.__dict__["_placeholder_grad_before"] = placeholder_like(self, spec)
        made = wrap(_data_slot.__get__(known), spec)  # not detach(), which would share the count of writes
        made._is_grad = True
        return made

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient: a global tensor whose layout is the dual of this one's (B has P: one term on each rank)."""
        if not _torch_function_enabled():
            return _grad_slot.__get__(self)
        with local_torch():
            grad = _grad_slot.__get__(self)
            if grad is None:
                if self._placeholder_grad is False:
                    return self.__dict__.get("_grad_shard")
                if self._placeholder_grad is True:
                    self._placeholder_grad = self._placeholder_of_gradient(self._spec_of_placeholder_grad)
                return self._placeholder_grad
            if not isinstance(grad, GlobalTensor):
                wrap(grad, self._spec.dual)._is_grad = True
                grad._owner = weakref.ref(self)
            return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        shard: GlobalTensor | None = self.__dict__.pop("_grad_shard", None)
        self.__dict__.pop("_sum", None)
        if isinstance(value, GlobalTensor):
            value._is_grad = True
            if shard is not None and value._spec is shard._spec:
                keep_grad_shard(self, value, shard._spec)
                return
            if (
                self._placeholder_grad is not False and value._spec is self._spec_of_placeholder_grad
            ):  # its owner keeps a shard
                self._placeholder_grad = value
                return
        if value is None or not _torch_function_enabled():
            self._placeholder_grad = False
            with local_torch():
                _grad_slot.__set__(self, value)
            return
        expected = self._spec.layout.dual()
        if tuple(value.shape) != tuple(self._spec.shape):
            raise RuntimeError(
                f"attempting to assign a gradient of size {list(value.shape)} to a tensor of size "
                f"{list(self._spec.shape)}. Both are logical sizes and must be the same."
            )
        if not isinstance(value, GlobalTensor):
            value = GlobalTensor.enter(value, self._spec.world, self._spec.layout)
        if value._spec.layout != expected:
            value = GlobalTensor.box(value, expected)
        self._placeholder_grad = value if self._spec.is_placeholder else False
        with local_torch():
            if not self._spec.is_placeholder or value.requires_grad:
                _grad_slot.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> torch.Tensor:
        """The same values and layout without history; writes to it are not recorded."""
        if self._is_grad:
            forget_sum_of(self)  # no version tells of writes through it
        with local_torch():
            found = _data_slot.__get__(self)
        if not _torch_function_enabled():
            return found
        twin = wrap(found, self._spec)
        self._has_data_alias = twin._has_data_alias = True
        return twin

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take the values of another tensor: of a global one with its layout, of a plain (whole) one in this layout."""
        if not _torch_function_enabled():
            _data_slot.__set__(self, value)
            return
        with torch.no_grad():
            keeps_layout = self._is_grad or not isinstance(value, GlobalTensor)
            if not isinstance(value, GlobalTensor):
                value = GlobalTensor.enter(value, self._spec.world, self._spec.layout)
            if keeps_layout:
                value = GlobalTensor.box(value, self._spec.layout.normalized(value._spec.shape))
            grad = self.grad if value._spec is not self._spec else None
            if grad is not None:
                self.grad = None
            shard = self.__dict__.get("_grad_shard")
            with local_torch():
                local = plain(value)
                if self.requires_grad and self.is_leaf and self.shape != local.shape:
                    # A graph that somebody still holds keeps the old shape alive; another type ends that.
                    other = torch.float32 if self.dtype == torch.float64 else torch.float64
                    _data_slot.__set__(self, torch.empty(0, dtype=other, device=local.device))
                _data_slot.__set__(self, local)
            forget_derived(self)
            self._spec = value._spec
            if shard is not None:
                self.__dict__["_grad_shard"] = shard
            if grad is not None and grad.shape == self.shape:
                self.grad = grad.to(value.dtype)

    box: Callable[[GlobalTensor, Layout], GlobalTensor]
    enter: Callable[[torch.Tensor, World, Layout], GlobalTensor]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return describe(self)

    def __str__(self) -> str:
        return GlobalTensor.show(self)

    show: Callable[[GlobalTensor], str]


_local_shape: Callable[[torch.Tensor], torch.Size] = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_grad_slot: Any = torch.Tensor.grad
_data_slot: Any = torch.Tensor.data
read_grad: Callable[[torch.Tensor], torch.Tensor | None] = _grad_slot.__get__
"""What autograd has accumulated on this rank, without a layout."""


def owner_of_grad(grad: GlobalTensor) -> GlobalTensor | None:
    """The tensor whose ``.grad`` this is, in the layout in which autograd left it; None for any other tensor."""
    owner = grad.__dict__.get("_owner")
    found = None if owner is None else owner()
    with local_torch():
        return found if found is not None and _grad_slot.__get__(found) is grad else None


def forget_sum_of(grad: GlobalTensor) -> None:
    """The sum that was made of a gradient is no longer the one to use."""
    owner = grad.__dict__.get("_owner")
    if owner is not None and owner() is not None:
        owner().__dict__.pop("_sum", None)


def set_reduced_grad(leaf: GlobalTensor, grad: torch.Tensor | None) -> None:
    """Give a leaf a gradient that is summed already: it has the leaf's own layout, not the dual one."""
    labelled = None if grad is None else wrap(grad, leaf._spec)
    leaf._placeholder_grad = labelled if labelled is not None and leaf._spec.is_placeholder else False
    with local_torch():
        _grad_slot.__set__(leaf, None if leaf._spec.is_placeholder else labelled)


def accumulate_grad(leaf: GlobalTensor, grad: torch.Tensor) -> None:
    """Let ``grad`` be what autograd has accumulated on this rank; a shard of what it had accumulated before stays."""
    leaf.__dict__.pop("_sum", None)
    with local_torch():
        _grad_slot.__set__(leaf, grad)


def keep_grad_shard(leaf: GlobalTensor, shard: torch.Tensor, spec: Spec) -> None:
    """Let a summed gradient, in a layout of its own, be the gradient of ``leaf``; autograd's term is given back."""
    if not isinstance(shard, GlobalTensor):
        shard = wrap(shard, spec)
        shard._is_grad = True
    with local_torch():
        _grad_slot.__set__(leaf, None)
    leaf.__dict__.pop("_sum", None)
    leaf.__dict__["_grad_shard"] = shard


def forget_derived(tensor: GlobalTensor) -> None:
    """Drop what a tensor remembers of its values: boxed forms, the optimizer's local alias."""
    for name in DERIVED:
        tensor.__dict__.pop(name, None)


DERIVED = ("_alias_of", "_boxing_cache", "_grad_shard", "_local_alias", "_origin", "_root", "_sum", "_tied_source")
"""Attributes of a tensor that are made from its values; no copy takes them along."""


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


def placeholder_like(tensor: torch.Tensor, spec: Spec) -> GlobalTensor:
    """A placeholder with the dtype of ``tensor``."""
    return wrap(new_placeholder(spec.shape, tensor.dtype, spec.world.device), spec)


def mark_placeholder_leaves(node: Any) -> None:
    """Leaves before ``node`` whose owner accumulates a gradient now: ``leaf.grad is None`` must agree with it."""
    for before, _ in node.next_functions:
        leaf = getattr(before, "variable", None)
        if isinstance(leaf, GlobalTensor) and leaf._placeholder_grad is False and leaf._spec.is_placeholder:  # noqa: SIM102
            if will_accumulate(before):
                mark_placeholder(leaf)


def mark_placeholder(leaf: GlobalTensor) -> None:
    """The owner of a placeholder has a gradient now; so it has after a replay of the step that is being recorded."""
    leaf._placeholder_grad = True
    recorder = leaf._spec.world.recorder
    if recorder is not None:
        recorder.placeholders.append(leaf)


def will_accumulate(node: Any) -> bool:
    """Whether the backward that runs adds to the gradient of the leaf of this node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad takes this leaf's gradient and leaves its .grad alone
        return False


def describe(tensor: GlobalTensor) -> str:
    """Shape, dtype and layout; never communicates."""
    spec = tensor._spec
    with local_torch():
        dtype, grad = str(tensor.dtype).removeprefix("torch."), tensor.requires_grad
    where = "; not on this rank" if spec.is_placeholder else ""
    needs = ", requires_grad=True" if grad else ""
    name = "Parameter of GlobalTensor" if tensor._is_param else "GlobalTensor"
    return f"{name}({tuple(spec.shape)}, {dtype}, {spec.layout}{needs}{where})"
