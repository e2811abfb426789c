"""Views that are copies: what a view of a tensor gives where its rows had to move between ranks.

On one device a view shares its base's storage, so writing to one changes the other. A view that had to be boxed owns
its storage. It becomes a ``BoxedView``, which remembers its base: an in-place operation on it writes back to the base,
and a use of it after the base was written fetches its values again. Functions that give a view or a copy, as strides
have it (``reshape``, ``flatten``), cannot know whether the base changes with their result; writing to the result is
fine as long as nobody reads the base again, and an error then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from workbench.core.layout import Layout
from workbench.errors import LayoutError
from workbench.tensors.boxing.box import box
from workbench.tensors.dispatch.placeholder_calls import write_placeholder
from workbench.tensors.dispatch.registry import fold_name
from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.late_imports import later
from workbench.tensors.tensor_state import share_memory, version_of

_ALIASING = """
view view_as unflatten squeeze unsqueeze permute transpose t get:T get:mT get:H get:mH movedim adjoint expand expand_as
broadcast_to narrow select getitem chunk split tensor_split split_with_sizes unsafe_chunk unsafe_split hsplit vsplit
dsplit unbind diagonal unfold real imag get:real get:imag view_as_real view_as_complex as_strided alias detach
"""
ALIASING = frozenset(_ALIASING.split())
"""Functions whose result shares its operand's storage on one device."""
PERHAPS_ALIASING = frozenset(["reshape", "reshape_as", "flatten", "ravel", "contiguous"])
"""Functions whose result may: it depends on strides."""
_MOVING_DIMS = frozenset(
    ["permute", "transpose", "t", "get:T", "get:mT", "get:H", "get:mH", "movedim", "adjoint", "expand"]
)
"""Aliasing functions after which a ``reshape`` copies."""


@dataclass(slots=True)
class Origin:
    """Where a boxed view comes from; shared by the views of one storage.

    Attributes:
        function: name of the view function, for messages.
        base: the tensor that was viewed.
        version: the base's version when its values were last the same.
        layout: the layout that the base was boxed to.
        place: which part of the base it is, where its rows were moved; else None.
    """

    function: str
    base: GlobalTensor
    version: int
    layout: Layout
    place: Any = None

    @property
    def may_be_copied(self) -> bool:
        """Whether one device may have made a copy too."""
        return self.function in PERHAPS_ALIASING

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


class BoxedView(GlobalTensor):
    """A view whose storage is its own, because its values came from other ranks."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        if any(type(leaf) is AmbiguousTensor for leaf in leaves):
            return AmbiguousTensor.__torch_function__(func, types, args, kwargs)
        views = [leaf for leaf in leaves if type(leaf) is BoxedView]
        name = fold_name(func)
        if name.folded.startswith("_foreach_") or getattr(func, "__module__", "") == "torch.nn.init":
            return later.dispatch(func, args, kwargs)  # which calls a method of each view that is written
        for view in views:
            _bring_up_to_date(view)
        first = args[0] if args else kwargs.get("input")
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
            elif name.folded in ALIASING:
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


def _version(tensor: GlobalTensor) -> int:
    with local_torch():
        return version_of(tensor)


def remember_copies(
    local: Any, name: str, call: tuple[Any, Any, Any], base: GlobalTensor, boxed: GlobalTensor, result: Any
) -> Any:
    """Turn the tensors in ``result``, which the view function ``name`` made of ``base``, into boxed views.

    ``call`` is the function with its arguments.

    ``boxed`` is the base in the layout that the function wanted, and the results are local views of it; unless
    ``local``, which made them, has moved rows: then they own their storage, and ``local.items`` says for each which
    part of the base it is.
    """
    if torch.is_inference_mode_enabled():
        return result  # inference tensors have no version counters
    views = [leaf for leaf in tree_leaves(result) if isinstance(leaf, GlobalTensor)]
    items = getattr(local, "items", None)
    for position, view in enumerate(views):
        origin = Origin(name, base, _version(base), boxed._spec.layout, None if items is None else items[position])
        BoxedView._of(view, origin, boxed if items is None else None, ViewCall(*call, position))
    return result


def remember_placeholder_base(name: str, base: GlobalTensor, result: Any) -> None:
    """Remember the base of a placeholder's views: they share no storage, so ``write_placeholder`` updates the base.

    The result of a ``reshape`` counts as a view, as it is on the owner, unless the dims were moved before.
    """
    if name not in ALIASING and name not in PERHAPS_ALIASING:
        return
    for leaf in tree_leaves(result):
        if isinstance(leaf, GlobalTensor):
            has_moved_dims = base._has_moved_dims or name in _MOVING_DIMS
            if name in ALIASING and has_moved_dims:
                leaf._has_moved_dims = True
            if not (name in PERHAPS_ALIASING and has_moved_dims):
                leaf._memory_owner = base if base._memory_owner is None else base._memory_owner
            if name != "detach":
                leaf._history_base = base if base._history_base is None else base._history_base


def _inherit(result: Any, view: GlobalTensor, call: tuple[Any, Any, Any]) -> None:
    """Views of a boxed view share its storage and its origin."""
    root = view if view._root is None else view._root
    for number, leaf in enumerate(tree_leaves(result)):
        if type(leaf) is GlobalTensor:
            BoxedView._of(leaf, view._origin, root, ViewCall(*call, number))


def share_data(made: GlobalTensor, tensor: GlobalTensor) -> None:
    """Let ``made``, the ``.data`` of a boxed view or an ambiguous tensor, be one too."""
    if type(tensor) is BoxedView:
        _inherit_without_history(made, tensor, lambda each: each.data)
    else:
        share_memory(made, tensor)


def _inherit_without_history(made: GlobalTensor, view: BoxedView, alias: Callable[[Any], Any]) -> None:
    """``made``, the ``alias`` of a boxed view, is a view of the base's alias: writes to it are in no history."""
    origin, root = view._origin, view._root
    if not origin.may_be_copied:
        base, is_current = alias(origin.base), _version(origin.base) == origin.version
        origin = replace(origin, base=base, version=_version(base) if is_current else -1)
    BoxedView._of(made, origin, None if root is None else alias(root), view._view_call)


class AmbiguousTensor(GlobalTensor):
    """A tensor that one device may have changed, or not: a reshape of it was boxed and then written to."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = fold_name(func).folded
        base = next(leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is AmbiguousTensor)
        if name.startswith(("get:", "set:")) or name in ("size", "dim", "numel", "requires_grad_"):
            return later.dispatch(func, args, kwargs)
        return base.refuse(name)

    def refuse(self, name: str) -> NoReturn:
        """Say what happened and what to write instead."""
        raise LayoutError(
            f"{name} of a tensor {tuple(self._spec.shape)} in {self._spec.layout}: {self._ambiguity} was written "
            "in place. It was boxed, so it is a copy, while on one device it is a view of this tensor if the strides "
            "allow. Write .clone() behind it if a copy is meant, .view(...) if this tensor is to change."
        )

    def to_global(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: see the class."""
        self.refuse("to_global")

    def to_local(self, *, grad_sbp: Any = None) -> Any:
        """Refused: see the class."""
        self.refuse("to_local")

    def full_tensor(self) -> Any:
        """Refused: see the class."""
        self.refuse("full_tensor")


def _mark_ambiguous(view: BoxedView) -> None:
    base = view._origin.base
    base.__class__ = AmbiguousTensor
    base._ambiguity = f"the result of {view._origin.function}(...), {tuple(view._spec.shape)},"


def _bring_up_to_date(view: BoxedView) -> None:
    """Fetch the values again if the base was written since."""
    origin = view._origin
    if type(origin.base) is BoxedView:
        _bring_up_to_date(origin.base)
    if _version(origin.base) == origin.version or type(origin.base) is AmbiguousTensor:
        return
    root = view if view._root is None else view._root
    fresh = box(origin.fetch(), root._spec.layout)
    if root._spec.is_placeholder:
        write_placeholder(root, [root, fresh])
    else:
        with local_torch():
            root.copy_(fresh)
    origin.version = _version(origin.base)


def _write_back(view: BoxedView) -> None:
    origin = view._origin
    if origin.may_be_copied:
        _mark_ambiguous(view)
        return
    root: GlobalTensor = view if view._root is None else view._root
    root.__class__, kind = GlobalTensor, root.__class__
    try:
        origin.write(root)
    finally:
        root.__class__ = kind
    origin.version = _version(origin.base)
