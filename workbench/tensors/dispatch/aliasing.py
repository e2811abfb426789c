"""Views that are copies: what a view of a tensor gives where its rows had to move between ranks.

On one device a view shares its base's storage, so writing to one changes the other. A view that had to be boxed owns
its storage. It becomes a ``BoxedView``, which remembers its base: an in-place operation on it writes back to the base,
and a use of it after the base was written fetches its values again. Some functions give a view or a copy, as strides
have it (``reshape``, ``flatten``, ``contiguous``): torch decides, on metadata with the strides of one device. Ranks
outside the placement have no strides: when a boxed result or its base is written, the placement's first rank sends them
its answer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import broadcast
from workbench.tensors.boxing.box import box
from workbench.tensors.conversion import from_local
from workbench.tensors.dispatch.arguments import with_numbers
from workbench.tensors.dispatch.placeholder_calls import write_placeholder
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.tensors.dispatch.registry import COMPOSITES, fold_name
from workbench.tensors.dispatch.strides import on_one_device, share_storage
from workbench.tensors.global_tensor import GlobalTensor, local_torch, wrap
from workbench.tensors.late_imports import later
from workbench.tensors.tensor_state import (
    memory_owner,
    memory_owner_without_history,
    register_view,
    share_memory,
    version_of,
)

_ALIASING = """
view view_as unflatten squeeze unsqueeze permute transpose t get:T get:mT get:H get:mH movedim adjoint expand expand_as
broadcast_to narrow select getitem chunk split tensor_split split_with_sizes unsafe_chunk unsafe_split hsplit vsplit
dsplit unbind diagonal unfold real imag get:real get:imag view_as_real view_as_complex as_strided alias detach
"""
ALIASING = frozenset(_ALIASING.split())
"""Functions whose result shares its operand's storage on one device."""
_PERHAPS = """
reshape reshape_as flatten ravel contiguous to float double half bfloat16 long int short char byte bool cdouble cfloat
chalf positive conj resolve_conj resolve_neg
"""
PERHAPS_ALIASING = frozenset(_PERHAPS.split())
"""Functions whose result may: it depends on strides and dtype."""
_OF_VIEWS = frozenset(
    ["meshgrid", "broadcast_tensors", "atleast_1d", "atleast_2d", "atleast_3d", "linalg_diagonal", "cartesian_prod",
     "sum_to_size"]
)  # fmt: skip
"""Composites whose results are views that they make of their operands."""
_BASIC = (int, slice, type(None), type(Ellipsis))


def is_basic(item: Any) -> bool:
    """Whether an item of an index is a number, a slice, None or ``...``; True and False are masks."""
    return isinstance(item, _BASIC) and not isinstance(item, bool)


def may_alias(name: str, args: Any) -> bool:
    """Whether one device may give a view. A lookup by index tensors, lists or masks is a copy."""
    if name == "getitem":
        return all(map(is_basic, args[1] if isinstance(args[1], tuple) else args[1:2]))
    if name == "einsum":
        return _only_moves_dims(*args)
    return name in ALIASING or name in PERHAPS_ALIASING


def _only_moves_dims(equation: Any, *operands: Any) -> bool:
    """Whether an einsum has one operand and no sum: it gives a view of diagonals, in another order of dims."""
    if not isinstance(equation, str) or "," in equation:
        return False
    left, arrow, right = equation.replace(" ", "").partition("->")
    kept = right if arrow else [letter for letter in left if letter == "." or left.count(letter) == 1]
    return set(left) == set(kept)


@dataclass(slots=True)
class Origin:
    """Where a boxed view comes from; shared by the views of one storage.

    Attributes:
        base: the tensor that was viewed.
        version: the base's version when its values were last the same.
        layout: the layout that the base was boxed to.
        place: which part of the base it is, where its rows were moved; else None.
        is_view: whether one device gives a view, by what this rank knows.
        is_agreed: whether all ranks know the same.
    """

    base: GlobalTensor
    version: int
    layout: Layout
    place: Any = None
    is_view: bool = True
    is_agreed: bool = True

    def write(self, values: GlobalTensor) -> None:
        """Put the boxed values into the base."""
        if self.place is None:
            self.base.copy_(values)
        else:
            self.base[self.place] = values

    def fetch(self) -> GlobalTensor:
        """The boxed values, from the base anew."""
        return box(self.base, self.layout) if self.place is None else self.base[self.place]


class ViewCall(NamedTuple):
    """The call of a view function, and which of its results a boxed view is."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int

    def with_tensor(self, tensor: GlobalTensor, other: GlobalTensor) -> ViewCall:
        """The call with ``other`` in place of ``tensor``."""
        args = tuple(other if arg is tensor else arg for arg in self.args)
        kwargs = {name: other if arg is tensor else arg for name, arg in self.kwargs.items()}
        return self._replace(args=args, kwargs=kwargs)


class BoxedView(GlobalTensor):
    """A view whose storage is its own, because its values came from other ranks."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        views = [leaf for leaf in leaves if type(leaf) is BoxedView]
        name = fold_name(func)
        if name.folded.startswith("_foreach_") or getattr(func, "__module__", "") == "torch.nn.init":
            return later.dispatch(func, args, kwargs)  # which calls a method of each view that is written
        if name.folded in _OF_VIEWS and (made := COMPOSITES[name.folded](*args, **kwargs)) is not NotImplemented:
            return made
        for view in views:
            _bring_up_to_date(view)
        views = [view for view in views if type(view) is BoxedView]
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, str):  # the equation of an einsum
            first = tree_leaves(args[1:])[0]
        in_place = name.in_place or kwargs.get("inplace")
        written = [leaf for leaf in tree_leaves(first if in_place else kwargs.get("out")) if type(leaf) is BoxedView]
        for view in views:
            view.__class__ = GlobalTensor  # type: ignore[assignment]
        try:
            result = later.dispatch(func, args, kwargs)
        finally:
            for view in views:
                view.__class__ = BoxedView
        for view in written:
            _write_back(view)
        if type(first) is BoxedView and not written:
            if name.folded == "detach":
                _inherit_without_history(result, first, GlobalTensor.detach)
            elif name.folded in PERHAPS_ALIASING:
                args, kwargs = with_numbers(func, args, kwargs) or (args, kwargs)
                return remember_copies(None, name.folded, {}, (func, args, kwargs), first, first, result)
            elif may_alias(name.folded, args):
                _inherit(result, first, (func, args, kwargs))
        return result

    def to_global(self, *args: Any, **kwargs: Any) -> Any:
        """``GlobalTensor.to_global`` of the values that the base has now."""
        _bring_up_to_date(self)
        return GlobalTensor.to_global(self, *args, **kwargs)

    def to_local(self, *, grad_sbp: Any = None) -> Any:
        """``GlobalTensor.to_local`` of the values that the base has now."""
        _bring_up_to_date(self)
        return GlobalTensor.to_local(self, grad_sbp=grad_sbp)

    def full_tensor(self) -> Any:
        """``GlobalTensor.full_tensor`` of the values that the base has now."""
        _bring_up_to_date(self)
        return GlobalTensor.full_tensor(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalTensor:
        _bring_up_to_date(self)
        return GlobalTensor.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _bring_up_to_date(self)
        return GlobalTensor.__reduce_ex__(self, protocol)

    @classmethod
    def _of(cls, tensor: GlobalTensor, origin: Origin, root: GlobalTensor | None, call: ViewCall) -> None:
        tensor.__class__ = cls
        tensor._origin, tensor._root, tensor._view_call = origin, root, call
        register_view(tensor)


def _version(tensor: GlobalTensor) -> int:
    with local_torch():
        return version_of(tensor)


def remember_copies(
    local: Any,
    name: str,
    known: dict[Any, Any],
    call: tuple[Any, Any, Any],
    base: GlobalTensor,
    boxed: GlobalTensor,
    result: Any,
) -> Any:
    """Turn the tensors in ``result``, which the view function ``name`` made of ``base``, into boxed views.

    ``call`` is the function with its arguments. What one device copies becomes a tensor of its own. ``known`` keeps
    what ``on_one_device`` has found.

    ``boxed`` is the base in the layout that the function wanted, and the results are local views of it; unless
    ``local``, which made them, has moved rows: then they own their storage, and ``local.items`` says for each which
    part of the base it is.
    """
    is_view = is_agreed = True
    if name in PERHAPS_ALIASING:
        is_view = all(on_one_device(known, call, base)[0])
        is_agreed = base._spec.layout.placement.num_ranks == base._spec.world.world_size
        if not is_view:
            result = tree_map(partial(_own, boxed, memory_format_of(call[1:])), result)
            if is_agreed:
                return result
    views = [leaf for leaf in tree_leaves(result) if type(leaf) is GlobalTensor]
    items = getattr(local, "items", None)
    for position, view in enumerate(views):
        place = None if items is None else items[position]
        origin = Origin(base, _version(base), boxed._spec.layout, place, is_view, is_agreed)
        BoxedView._of(view, origin, boxed if items is None else None, ViewCall(*call, position))
    return result


def _own(boxed: GlobalTensor, memory_format: torch.memory_format, leaf: Any) -> Any:
    """A result that is a copy on one device, with other memory than the boxed operand, which others may use too."""
    if type(leaf) is not GlobalTensor or leaf._spec.is_placeholder:
        return leaf
    with local_torch():
        return wrap(leaf.clone(memory_format=memory_format), leaf._spec) if share_storage(leaf, boxed) else leaf


def copying_as_on_one_device(function: Callable[..., Any], call: Any) -> Callable[..., Any]:
    """A local function that copies where one device does: a shard with one row of a split dim, or none, may be viewed
    though the whole may not.
    """
    func, memory_format = call.func, memory_format_of((call.args, call.kwargs))
    known: dict[Any, Any] = {}

    def run(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(tensor, *args, **kwargs)
        if not share_storage(result, tensor):
            return result
        is_view = all(on_one_device(known, (func, (tensor, *args), kwargs), tensor)[0])
        return result if is_view else result.clone(memory_format=memory_format)

    return run


def memory_format_of(given: Any) -> torch.memory_format:
    """The memory format among the arguments of a call, for a copy."""
    formats = (leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.memory_format))
    return next(formats, torch.contiguous_format)


def remember_placeholder_base(
    name: str,
    known: dict[Any, Any],
    call: tuple[Any, Any, Any],
    base: GlobalTensor,
    operand: GlobalTensor,
    result: Any,
) -> None:
    """Remember the operand of a placeholder's views: they share no storage, so ``write_placeholder`` updates one
    when the other is written.

    ``known`` keeps what ``on_one_device`` has found; ``operand`` is the base, maybe boxed.
    """
    found = on_one_device(known, call, base)
    views = [leaf for leaf in tree_leaves(result) if isinstance(leaf, GlobalTensor)]
    for leaf, is_view, strides in zip(views, *found, strict=True):
        leaf._strides = strides
        if is_view:
            if name == "detach":
                with local_torch():
                    leaf._memory_owner = memory_owner_without_history(operand)
            else:
                leaf._memory_owner = memory_owner(operand)
                first = leaf._history_base = operand if operand._history_base is None else operand._history_base
                if first._history_views is None:
                    first._history_views = weakref.WeakValueDictionary()
                first._history_views[id(leaf)] = leaf


def _inherit(result: Any, view: GlobalTensor, call: tuple[Any, Any, Any]) -> None:
    """Views of a boxed view share its storage and its origin."""
    root = view if view._root is None else view._root
    for number, leaf in enumerate(tree_leaves(result)):
        if type(leaf) is GlobalTensor:
            BoxedView._of(leaf, view._origin, root, ViewCall(*call, number))


def share_data(made: GlobalTensor, tensor: GlobalTensor) -> None:
    """Let ``made``, the ``.data`` of a boxed view, be one too."""
    if type(tensor) is BoxedView:
        _inherit_without_history(made, tensor, lambda each: each.data)
    else:
        with local_torch():
            share_memory(made, tensor)


def _inherit_without_history(made: GlobalTensor, view: BoxedView, alias: Callable[[Any], Any]) -> None:
    """``made``, the ``alias`` of a boxed view, is a view of the base's alias: writes to it are in no history."""
    origin, root = view._origin, view._root
    base, is_current = alias(origin.base), _version(origin.base) == origin.version
    origin = replace(origin, base=base, version=_version(base) if is_current else -1)
    func, args, kwargs, number = view._view_call
    args, kwargs = tree_map(lambda leaf: alias(leaf) if isinstance(leaf, GlobalTensor) else leaf, (args, kwargs))
    BoxedView._of(made, origin, None if root is None else alias(root), ViewCall(func, args, kwargs, number))


def _is_view(view: BoxedView) -> bool:
    """Whether one device gives a view; if not, ``view`` is a tensor of its own from here on.

    All ranks of the world call it: those without a shard know no strides, so the first rank of the placement decides.
    """
    origin = view._origin
    world, placement = origin.base._spec.world, origin.base._spec.layout.placement
    context = world.context
    if not origin.is_agreed and context.running is None and context.recorder is None and world.device.type != "meta":
        first = Layout(Placement.of(placement.device_type, [placement.grid[0]]), (broadcast,))
        told = from_local(torch.tensor(origin.is_view, device=world.device), world, first)
        origin.is_view, origin.is_agreed = bool(value_on_all_ranks(told)), True
        if not origin.is_view:
            origin.base._boxings = None  # on a rank that supposed a view, the tensor shares their memory
    if not origin.is_view:
        view.__class__ = GlobalTensor  # type: ignore[assignment]
        view._origin = view._root = view._view_call = None
    return origin.is_view


def _bring_up_to_date(view: BoxedView) -> None:
    """Fetch the values again if the base was written since."""
    origin = view._origin
    if type(origin.base) is BoxedView:
        _bring_up_to_date(origin.base)
    if _version(origin.base) == origin.version or not _is_view(view):
        return
    root = view if view._root is None else view._root
    if root is not origin.base:
        fresh = box(origin.fetch(), root._spec.layout)
        if root._spec.is_placeholder:
            write_placeholder(root, [root, fresh])
        else:
            with local_torch():
                root.copy_(fresh)
    origin.version = _version(origin.base)


def _write_back(view: BoxedView) -> None:
    origin = view._origin
    if not _is_view(view):
        return
    root: GlobalTensor = view if view._root is None else view._root
    if root is origin.base:  # which has the written values, unless it is a boxed view itself
        if type(root) is BoxedView:
            _write_back(root)
    else:
        root.__class__, kind = GlobalTensor, root.__class__
        try:
            origin.write(root)
        finally:
            root.__class__ = kind
    origin.version = _version(origin.base)
