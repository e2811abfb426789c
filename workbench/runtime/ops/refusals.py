"""What the runtime refuses, and in which words: function, argument, both layouts, the rule, the fix."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch.utils._pytree import tree_leaves

from workbench.core.placement import Placement
from workbench.errors import LayoutError
from workbench.runtime.caller import name_in_user_code
from workbench.runtime.explicit import Need, check_explicit
from workbench.runtime.ops.ghost import infer_outputs
from workbench.runtime.ops.planning import Plan, bind
from workbench.runtime.ops.registry import PARAMETERS, fold_name, handler
from workbench.runtime.tensor import GlobalTensor


def argument_text(func: Callable[..., Any], args: Any, kwargs: Any, tensor: Any) -> str:
    """``"argument 2 (weight)"`` for the argument that is ``tensor`` or holds it; counted from one."""
    names = _parameter_names(func)
    for position, value in enumerate(args):
        if any(leaf is tensor for leaf in tree_leaves(value)):
            return f"argument {position + 1}" + (f" ({names[position]})" if position < len(names) else "")
    for name, value in kwargs.items():
        if any(leaf is tensor for leaf in tree_leaves(value)):
            return f"argument {name!r}"
    return "an operand"


def _parameter_names(func: Callable[..., Any]) -> tuple[str, ...]:
    known = PARAMETERS.get(fold_name(func).folded)
    if known:
        return known
    try:
        return tuple(inspect.signature(func).parameters)
    except (TypeError, ValueError):  # a builtin says nothing of its parameters
        return ()


def plain_operand_text(func: Callable[..., Any], args: Any, kwargs: Any, tensor: Any) -> str:
    """``"add: argument 2 (other)"``."""
    return f"{fold_name(func).folded}: {argument_text(func, args, kwargs, tensor)}"


def check_new_plan(plan: Plan, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Refuse what no layout could make right; and tell who wants to know that a plan was made."""
    if plan.world.on_plan is not None:
        plan.world.on_plan(func, args, kwargs)
    if plan.name.in_place and isinstance(args[0], GlobalTensor):
        shape = plan.outputs[0].shape if plan.outputs else _shape_of_result(func, args, kwargs)
        if shape != args[0]._spec.shape:
            refuse_new_shape(func, args[0], shape)


def _shape_of_result(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[int, ...]:
    """Shape of what an in-place form returns; of ``x[i] = y``, which returns nothing, the shape of ``x``."""
    infos, _, _ = infer_outputs(func, args, kwargs)
    return infos[0][0] if infos else args[0]._spec.shape


def check_plan(plan: Plan, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Under ``wb.explicit_boxing()``: refuse a plan that communicates, naming all the arguments that would move."""
    ordered_args, ordered_kwargs = bind(plan.name.folded, args, kwargs)
    operands = [leaf for leaf in tree_leaves((ordered_args, ordered_kwargs)) if isinstance(leaf, GlobalTensor)]
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
    there = second._spec.layout.placement
    entries = ", ".join(["B"] * there.num_axes)
    raise LayoutError(
        f"{fold_name(func).folded}: operands lie on different placements, {' and '.join(texts)}. A function runs on "
        f"one placement, so that it is clear who computes and what moves. Write "
        f'{name_in_user_code(first, "x")}.to_global(placement=wb.{there}, sbp="{entries}") first.'
    )


def refuse_new_shape(func: Callable[..., Any], target: GlobalTensor, shape: tuple[int, ...]) -> NoReturn:
    """An in-place form whose result has another shape: the layout of its target would mean something else."""
    name = getattr(func, "__name__", str(func))
    variable = name_in_user_code(target, "x")
    raise LayoutError(
        f"{name}: argument 1 (self) lies as {target._spec.layout} with shape {tuple(target._spec.shape)}, the result "
        f"would have shape {tuple(shape)}. In place a tensor keeps its layout, and a layout goes with a shape. Write "
        f"{variable} = {variable}.{name.rstrip('_')}(...)."
    )


def refuse_out(func: Callable[..., Any], problem: str, fix: str) -> NoReturn:
    """A call with an ``out=`` that cannot take the result."""
    raise LayoutError(f"{fold_name(func).folded}(out=...): {problem} {fix}")


@handler("resize_", "resize_as_", "set_", "as_strided_")
def _refuse_new_storage(func: Any, args: Any, kwargs: Any) -> NoReturn:
    name, target = func.__name__, args[0]
    if not isinstance(target, GlobalTensor):
        raise LayoutError(
            f"{name}: argument 1 (self) is a plain tensor and another argument is a global one, whose shard is not the "
            "whole. Write plain.copy_(x.full_tensor())."
        )
    raise LayoutError(
        f"{name}: argument 1 (self) lies as {target._spec.layout} with shape {tuple(target._spec.shape)}. The function "
        "gives a tensor other storage or strides, and the shards of a global tensor have their own. Make a new tensor: "
        "wb.empty(..., placement=x.placement, sbp=x.sbp)."
    )


def check_gradient_possible(tensor: GlobalTensor, function: str) -> None:
    """Refuse a gradient for terms of a maximum or minimum."""
    layout = tensor._spec.layout
    for entry in layout.sbp:
        if getattr(entry, "reduction", "sum") != "sum":
            raise LayoutError(
                f"{function}: the tensor lies as {layout}, shape {tuple(tensor._spec.shape)}. {entry} is not "
                f"differentiable: only sums are linear in their terms. Box it to B first: "
                f"{name_in_user_code(tensor, 'x')}.to_global(sbp=wb.sbp.broadcast)."
            )


__all__ = [
    "argument_text", "check_gradient_possible", "check_new_plan", "check_plan", "plain_operand_text",
    "refuse_new_shape", "refuse_out", "refuse_two_placements",
]  # fmt: skip
