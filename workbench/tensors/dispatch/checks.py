"""Checks of arguments and their errors: function, argument, both layouts, the rule, the fix."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from workbench.core.placement import Placement
from workbench.errors import LayoutError
from workbench.tensors.boxing.explicit import Need, check_explicit
from workbench.tensors.dispatch.arguments import parameters_of
from workbench.tensors.dispatch.planning import Plan
from workbench.tensors.dispatch.registry import fold_name, handler
from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.patch_table import patch
from workbench.tensors.tensor_state import forget_memory, separate_views
from workbench.transport.user_code import name_in_user_code

OF_OBSERVERS = (
    "Observers of torch.ao.quantization get their shapes from a batch: call the plain module once, before "
    "wb.parallelize."
)


def argument_text(func: Callable[..., Any], args: Any, kwargs: Any, tensor: Any) -> str:
    """``"argument 2 (weight)"`` for the argument that is ``tensor`` or holds it; counted from one."""
    overloads = (tuple(name for name, _, _ in overload) for overload in parameters_of(func))
    names = next((names for names in overloads if len(names) >= len(args)), ())
    for position, value in enumerate(args):
        if any(leaf is tensor for leaf in tree_leaves(value)):
            return f"argument {position + 1}" + (f" ({names[position]})" if position < len(names) else "")
    for name, value in kwargs.items():
        if any(leaf is tensor for leaf in tree_leaves(value)):
            return f"argument {name!r}"
    return "an operand"


def plain_operand_text(func: Callable[..., Any], args: Any, kwargs: Any, tensor: Any) -> str:
    """``"add: argument 2 (other)"``."""
    return f"{fold_name(func).folded}: {argument_text(func, args, kwargs, tensor)}"


def check_plan(plan: Plan, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Under ``wb.debug.explicit_boxing()``: refuse a plan that communicates, naming all arguments that would move."""
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GlobalTensor)]
    needs = [
        Need(argument_text(func, args, kwargs, operand), operand, target)
        for operand, target in zip(operands, plan.targets, strict=True)
    ]
    check_explicit(plan.name.folded, needs)


def refuse_two_placements(
    func: Callable[..., Any], args: Any, kwargs: Any, operands: Iterable[GlobalTensor]
) -> NoReturn:
    """Operands that lie on different placements, outside a parallelized module."""
    by_placement: dict[Placement, GlobalTensor] = {}
    for operand in operands:
        by_placement.setdefault(operand._spec.layout.placement, operand)
    first, second = list(by_placement.values())[:2]
    texts = [f"{argument_text(func, args, kwargs, t)} as {t._spec.layout}" for t in (first, second)]
    there, known = second._spec.layout.placement, name_in_user_code(second, "")
    where = f"{known}.placement" if known else f"wb.{there}"
    entries = ", ".join(["B"] * there.num_axes)
    name = name_in_user_code(first, "")
    which = "" if name else f", where x is the tensor of {argument_text(func, args, kwargs, first)}"
    raise LayoutError(
        f"{fold_name(func).folded}: operands lie on different placements, {' and '.join(texts)}. A function runs on "
        f"one placement, so that it is clear who computes and what moves. Write "
        f'{name or "x"}.to_global(placement={where}, sbp="{entries}") first{which}.'
    )


def exchange_name(func: Any) -> str | None:
    """The name of a function of ``torch.distributed`` that exchanges plain tensors; None for other functions."""
    if getattr(func, "__module__", None) == "torch.distributed.distributed_c10d":
        return f"torch.distributed.{func.__name__}"
    name = fold_name(func).folded
    return f"torch.ops.{name.replace('::', '.')}" if name.startswith("_c10d_functional") else None


def refuse_exchange(
    call: str, func: Callable[..., Any], args: Any, kwargs: Any, tensor: GlobalTensor | None = None
) -> NoReturn:
    """An exchange of plain tensors that is given a global one: it would add or join what is one tensor already."""
    if tensor is None:
        tensor = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GlobalTensor))
    x = name_in_user_code(tensor, "x")
    raise LayoutError(
        f"{call}: {argument_text(func, args, kwargs, tensor)} is a global tensor of shape {tuple(tensor._spec.shape)}, "
        f"{tensor._spec.layout}. The call exchanges plain tensors between processes, and a global tensor is one tensor "
        "over its ranks with the value of one device: a loss, a count or a gradient is the whole batch's already. "
        "Leave the call out, and a division by the number of ranks that goes with it. Every rank reads the whole value "
        f"with {x}.full_tensor(), or {x}.item() for one number. To exchange this rank's part yourself, write "
        f"{x}.to_local(), or call it on shards inside wb.local_map."
    )


def refuse_out(func: Callable[..., Any], problem: str, fix: str) -> NoReturn:
    """A call with an ``out=`` that cannot take the result."""
    raise LayoutError(f"{fold_name(func).folded}(out=...): {problem} {fix}")


@handler("resize_", "resize_as_", "as_strided_")
def _refuse_new_storage(func: Any, args: Any, kwargs: Any) -> Any:
    """Raise, unless the shape stays."""
    name, target = func.__name__, args[0]
    sizes = args[1:] if len(args) != 2 or isinstance(args[1], int) else args[1]
    if name == "resize_" and not kwargs and isinstance(target, GlobalTensor) and target._spec.shape == tuple(sizes):
        return target
    if not isinstance(target, GlobalTensor):
        raise LayoutError(
            f"{name}: argument 1 (self) is a plain tensor and another argument is a global one, whose shard is not the "
            "whole. Write plain.copy_(x.full_tensor())."
        )
    raise LayoutError(
        f"{name}: argument 1 (self) lies as {target._spec.layout} with shape {tuple(target._spec.shape)}. The function "
        "gives a tensor other storage or strides, and the shards of a global tensor have their own. Make a new tensor: "
        f"wb.empty(..., placement=x.placement, sbp=x.sbp). {OF_OBSERVERS}"
    )


def _guarding_set(torchs_own: Any) -> Any:
    @functools.wraps(torchs_own)
    def set_(target: Any, *args: Any, **kwargs: Any) -> Any:
        given = [arg for arg in (target, *args, *kwargs.values()) if isinstance(arg, GlobalTensor)]
        if not given or not torch._C._is_torch_function_enabled():
            return torchs_own(target, *args, **kwargs)
        if len(given) != 2:
            _refuse_new_storage(torchs_own, (target,), {})
        if isinstance(target, GlobalTensor):
            with local_torch():
                separate_views(target)
        torchs_own(target, given[1])
        forget_memory(target)
        target._spec = given[1]._spec
        return target

    return set_


patch("torch.Tensor.set_", "it asks no global tensor: the shard would get another storage and shape", _guarding_set)
