"""Ways around ``__torch_function__``: functions of torch that would read this rank's shard without asking.

A closed list, found by calling everything with a global scalar (``tests/tensors/test_torch_function_bypasses.py`` looks
again for the installed torch): functions that make tensors from scalars, and those that take a count, are wrapped and
take the logical value; custom autograd functions are dispatched (``dispatch.custom_function``); function transforms
raise. What is left are other numbers of functions of plain tensors only (``torch.add(plain, plain, alpha=scalar)``):
C++ reads those without a trace, so write ``alpha=scalar.item()``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import handle_torch_function
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

from workbench.errors import LayoutError
from workbench.tensors.dispatch.checks import refuse_exchange
from workbench.tensors.dispatch.custom_function import apply_custom, bound_arguments
from workbench.tensors.dispatch.function_trials import apply_plain
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.patch_table import patch
from workbench.tensors.torch_patches.whole_values import whole_values

_torch_function_enabled = torch._C._is_torch_function_enabled

MAKERS = ("arange", "eye", "full", "randint", "randperm", "range", "scalar_tensor")
"""Functions of ``torch`` that read a global scalar among their arguments on their own."""
LIKE_MAKERS = ("full_like",)
METHODS = ("new_full", "new_tensor")
"""Functions of ``torch`` and methods of plain tensors that do so behind their first argument."""
COUNTING = ("bincount", "kthvalue", "roll", "select", "topk", "tril", "triu")
"""Functions and methods that read a count behind their first argument, which programs often compute."""
UNASKED = ("scatter", "reduce_scatter", "all_to_all", "all_to_all_single")
"""Functions of ``torch.distributed`` that ask no operands, or not those in lists."""
PICKLING = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list")
"""Those that pickle: the others would get this rank's shard, and refuse to load it."""
CONVERSIONS = ("tensor", "as_tensor", "asarray")
"""Functions of ``torch`` that take a tensor as data."""
_TRANSFORMS = {
    "torch._functorch.eager_transforms._wrap_for_grad": "torch.func.grad, vjp, jacrev or hessian",
    "torch._functorch.vmap._add_batch_dim": "torch.vmap",
    "torch.autograd.forward_ad.make_dual": "forward-mode differentiation (torch.func.jvp, make_dual)",
}
_TAKE_GLOBAL_TENSORS = ("workbench.", "torch.utils.checkpoint")
"""Modules whose custom functions take global tensors as they come. torch 2.11 saves the arguments of a checkpoint with
one that computes nothing.
"""


def _guarding(torchs_own: Callable[..., Any], _: Any) -> Any:
    """``Function.apply``, then ``torchs_own``; one of global tensors is dispatched like functions of torch."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._are_functorch_transforms_active() and cls.__module__.startswith("workbench."):
            raise LayoutError(
                "a global tensor is boxed, gathered or made inside a function transform (torch.vmap, torch.func.grad "
                f"or jacrev), by {cls.__module__}.{cls.__qualname__}. Transforms drop layouts: use loss.backward() or "
                "torch.autograd.grad, or apply the transform to shards inside wb.local_map."
            )
        if _torch_function_enabled():
            for arg in (*args, *kwargs.values()) if kwargs else args:
                if isinstance(arg, GlobalTensor) or (type(arg) in (list, tuple) and any(map(_is_global, arg))):
                    if cls.__module__.startswith(_TAKE_GLOBAL_TENSORS):
                        break
                    if cls.__module__.startswith("torch.distributed."):
                        call = f"{cls.__module__}.{cls.__qualname__}.apply"
                        refuse_exchange(call, cls.forward, (None, *args), kwargs)
                    return apply_custom(cls, bound_arguments(cls, args, kwargs) if kwargs else args)
        return torchs_own(cls, *args, **kwargs)

    return classmethod(apply)


def _apply_below(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """The step in which ``Function.apply`` ends before torch 2.14."""
    return super(_SingleLevelFunction, cls).apply(*args, **kwargs)


def _returning_whole(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of users' functions of plain tensors; of a global gradient that it returns, the whole value."""

    @functools.wraps(torchs_own)
    def apply(self: Any, *args: Any) -> Any:
        result = torchs_own(self, *args)
        for leaf in result if type(result) is tuple else (result,):
            if isinstance(leaf, GlobalTensor) and not self._forward_cls.__module__.startswith(("workbench.", "torch.")):
                return whole_values(result)
        return result

    return apply


def _is_global(value: Any) -> bool:
    return isinstance(value, GlobalTensor)


def _dispatching(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    """The call of functions of ``torch.jit.script`` and ``torch.jit.trace``."""

    @functools.wraps(torchs_own)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = tuple(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GlobalTensor))
        if known and _torch_function_enabled():
            return handle_torch_function(self, known, *args, **kwargs)
        return torchs_own(self, *args, **kwargs)

    return call


def _reading_whole(function: Callable[..., Any], first: int = 0) -> Callable[..., Any]:
    """``function``, with the logical values of global scalars among its arguments from number ``first`` on."""

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        for arg in (*args[first:], *kwargs.values()) if kwargs else args[first:]:
            if isinstance(arg, GlobalTensor):
                args = (*args[:first], *map(_value_of_scalar, args[first:]))
                kwargs = {key: value if key == "input" else _value_of_scalar(value) for key, value in kwargs.items()}
                break
        return function(*args, **kwargs)

    return made


def _value_of_scalar(leaf: Any) -> Any:
    return (
        leaf.item() if isinstance(leaf, GlobalTensor) and not leaf._spec.shape and _torch_function_enabled() else leaf
    )


def _converting(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.tensor`` and its like: a global tensor stays one."""

    named = "obj" if function.__name__ == "asarray" else "data"

    @functools.wraps(function)
    def made(*args: Any, **kwargs: Any) -> Any:
        data = args[0] if args else kwargs.get(named)
        if isinstance(data, GlobalTensor) and _torch_function_enabled():
            return _convert(function.__name__, data, *args[1:], **{k: v for k, v in kwargs.items() if k != named})
        return function(*args, **kwargs)

    return made


def _convert(
    name: str, data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, copy: Any = None, **_: Any
) -> Any:
    copies = name == "tensor" or copy
    result = data.detach().clone() if copies else data
    if dtype is not None or device is not None:
        result = result.to(device=device or data.device, dtype=dtype or data.dtype)
    return result.requires_grad_() if requires_grad else result


def _refusing(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        for arg in args:
            if isinstance(arg, GlobalTensor):
                refuse_transform(what, arg)
        return function(*args, **kwargs)

    return guarded


def _exchanging(function: Callable[..., Any], pickles: bool = False) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, GlobalTensor) and not (pickles and leaf._spec.is_whole_everywhere):
                refuse_exchange(f"torch.distributed.{function.__name__}", function, args, kwargs, leaf)
        if torch._C._is_torch_function_mode_enabled():
            return handle_torch_function(function, (), *args, **kwargs)
        return function(*args, **kwargs)

    return guarded


def refuse_transform(what: str, tensor: GlobalTensor) -> None:
    """Raise: function transforms drop the layout of what they wrap."""
    raise LayoutError(
        f"{what}: an argument is a global tensor of shape {tuple(tensor._spec.shape)}, {tensor._spec.layout}. Function "
        "transforms wrap the shard and drop its layout. Use loss.backward() or torch.autograd.grad (with "
        "create_graph=True for higher orders), or apply the transform to shards inside wb.local_map."
    )


_READS = "it reads a global scalar among its arguments without asking: this rank's shard of it"
# The first ``with torch.device(...)`` collects torch's creation functions: collect them before the patches.
_device_constructors()
for place, own in (("Function", apply_plain), ("_SingleLevelFunction", _apply_below)):
    patch(
        f"torch.autograd.function.{place}.apply",
        "a custom function would see this rank's shard as if it were the whole",
        functools.partial(_guarding, own),
    )
patch(
    "torch.autograd.function.BackwardCFunction.apply",
    "the gradient of a plain tensor would be this rank's shard of what a custom function's backward returns",
    _returning_whole,
)
patch(
    "torch.jit.ScriptFunction.__call__",
    "a scripted or traced function asks no operands: it would see this rank's shard",
    _dispatching,
)
for name in MAKERS:
    patch(f"torch.{name}", _READS, _reading_whole)
for owner, names in (("torch", (*LIKE_MAKERS, *COUNTING)), ("torch.Tensor", (*METHODS, *COUNTING))):
    for name in names:
        patch(f"{owner}.{name}", _READS, functools.partial(_reading_whole, first=1))
for name in UNASKED:
    patch(f"torch.distributed.{name}", "it would exchange the shards of ranks", _exchanging)
for name in PICKLING:
    patch(f"torch.distributed.{name}", "it would pickle the shard alone", functools.partial(_exchanging, pickles=True))
for name in CONVERSIONS:
    patch(f"torch.{name}", "a global tensor would become a plain copy of this rank's shard", _converting)
for place, what in _TRANSFORMS.items():
    importlib.import_module(place.rpartition(".")[0])
    patch(place, f"{what} would wrap the shard and drop its layout", functools.partial(_refusing, what=what))
