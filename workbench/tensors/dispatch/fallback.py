"""Functions without a rule for their operands' layouts: gather, run, results broadcast. Always right, never silent."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from workbench.core.boxing import plan_boxing
from workbench.core.layout import Layout
from workbench.errors import LayoutError
from workbench.tensors import default_generator
from workbench.tensors.boxing.box import box, box_implicitly
from workbench.tensors.dispatch.aliasing import remember_copies, remember_placeholder_base
from workbench.tensors.dispatch.checks import OF_OBSERVERS
from workbench.tensors.dispatch.placeholder_calls import (
    outputs_info,
    recipe_of,
    wrapped_placeholders,
    write_placeholder,
)
from workbench.tensors.dispatch.planning import Plan, itemsize_of, operands_of
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.tensors.dispatch.registry import RULES
from workbench.tensors.global_tensor import GlobalTensor, local_torch, spec_of, wrap
from workbench.tensors.world import World
from workbench.transport.user_code import user_stacklevel
from workbench.units import format_bytes


class FallbackWarning(UserWarning):
    """A function without a rule for these layouts had to gather its operands."""


_warned: set[str] = set()


def run_fallback(plan: Plan, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Box all operands to broadcast, run ``func`` on every rank, and wrap the results as broadcast. A function in place
    writes its result back in the layout of its target.
    """
    _warn_of_gather(plan, operands_of(args, kwargs))
    return _in_place(plan, func, args, kwargs) if plan.name.in_place else _run_whole(plan, func, args, kwargs)


def _run_whole(plan: Plan, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``func`` on whole operands. A function in place writes to its first operand, which is broadcast already."""
    leaves, structure = tree_flatten((args, kwargs), is_leaf=_is_size)
    operands = [leaf for leaf in leaves if isinstance(leaf, GlobalTensor)]
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, GlobalTensor):
            leaves[position] = box_implicitly(leaf, leaf._spec.layout.broadcast(), plan.name.folded)
    whole = [leaf for leaf in leaves if isinstance(leaf, GlobalTensor)]
    given = (func, args, kwargs)
    args, kwargs = tree_unflatten(leaves, structure)
    layout = whole[0]._spec.layout
    infos = None
    if plan.name.in_place and whole[0]._spec.is_placeholder:
        return write_placeholder(whole[0], whole, func, args, kwargs)
    if layout.placement.num_ranks < plan.world.world_size and not plan.name.in_place:
        # Ranks outside need the shapes of the results.
        infos = _infos_for_placeholders(plan, func, args, kwargs, whole)
    versions = _versions(whole) if isinstance(func, torch.jit.ScriptFunction) else []  # no schema says what it writes
    if whole[0]._spec.is_placeholder:
        result = _placeholders(infos, plan, func, args, kwargs, whole)
        if plan.may_alias:
            remember_placeholder_base(plan.name.folded, plan.views, given, operands[0], whole[0], result)
    else:
        with local_torch():
            result = func(*args, **kwargs)
        _refuse_sparse(result, plan.name.folded)
        _refuse_resized(whole, plan.name.folded)
        result = _wrap_broadcast(result, plan.world, layout, operands, whole, plan.copies_view)
    for operand, copy, version in zip(operands, whole, versions, strict=False):
        _write_back(operand, copy, version, plan.name.folded)
    if plan.copies_view and whole[0] is not operands[0]:
        return remember_copies(plan.local, plan.name.folded, plan.views, given, operands[0], whole[0], result)
    return result


def _versions(tensors: Sequence[GlobalTensor]) -> list[int]:
    with local_torch():
        return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def _write_back(operand: GlobalTensor, copy: GlobalTensor, version: int, function: str) -> None:
    """What was written into a gathered copy since ``version``, which is -1 where torch counts none, goes into the
    operand. All ranks call it.
    """
    if operand is copy:
        return
    is_written = version < 0 or _versions([copy]) != [version]
    if is_written and torch.is_grad_enabled() and copy.requires_grad:
        raise LayoutError(
            f"{function}: it writes into an operand of shape {tuple(operand._spec.shape)}, {operand._spec.layout}, "
            "which is gathered for it, so the gradient of what it wrote would be lost. Box it first: "
            'x.to_global(sbp="B").'
        )
    with torch.no_grad():
        result = box(copy, operand._spec.layout, function)
    if is_written and not operand._spec.is_placeholder:
        with torch.no_grad(), local_torch():
            _without_repeats(operand, operand).copy_(_without_repeats(result, operand))


def _refuse_sparse(result: Any, function: str) -> None:
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise LayoutError(
                f"{function}: the result of shape {tuple(leaf.shape)} is sparse; global tensors are strided. Make it "
                "of plain values, x.full_tensor().to_sparse(): it stays plain, and products with global ones take it."
            )


def _refuse_resized(whole: Sequence[GlobalTensor], function: str) -> None:
    """A function may give its operands other shapes, as torch's fused fake quantization does its scales."""
    with local_torch():
        found = next(((t._spec, tuple(t.shape)) for t in whole if tuple(t.shape) != t._spec.shape), None)
    if found is not None:
        raise LayoutError(
            f"{function}: it has given an operand that lies as {found[0].layout} the shape {found[1]} in place of "
            f"{found[0].shape}. A layout goes with a shape, and other ranks hear of none. {OF_OBSERVERS}"
        )


def _is_size(node: Any) -> bool:
    """Whether this is a ``torch.Size``, of which torch's trees make a plain tuple."""
    return type(node) is torch.Size


def _infos_for_placeholders(
    plan: Plan, func: Callable[..., Any], args: Any, kwargs: Any, whole: Sequence[GlobalTensor]
) -> Any:
    """Infos of the results, equal on every rank of the world: from shapes, or from values where they depend on data.

    Owners and placeholders decide alike, because the values are a boxing to all ranks.
    """
    if not plan.depends_on_data:
        try:
            return plan.infos_of(func, args, kwargs, whole)
        except Exception:  # noqa: BLE001 - shapes that depend on data raise many errors; a real one comes again below
            plan.depends_on_data = True
    values: dict[int, torch.Tensor] = {}

    def value_of(leaf: Any) -> Any:
        if not isinstance(leaf, GlobalTensor):
            return leaf
        if id(leaf) not in values:
            with local_torch():
                flag = leaf.requires_grad
            values[id(leaf)] = value_on_all_ranks(leaf).clone().requires_grad_(flag)
        return values[id(leaf)]

    value_args, value_kwargs = tree_map(value_of, (args, kwargs))
    draws_nothing = plan.world.device.type == "meta"  # a dry run, maybe beside a program that draws
    with nullcontext() if draws_nothing else default_generator.restored():
        result = getattr(func, "try_out", func)(*value_args, **value_kwargs)
    return outputs_info(result, [values[id(leaf)] for leaf in whole])


def _placeholders(infos: Any, plan: Plan, func: Any, args: Any, kwargs: Any, whole: list[GlobalTensor]) -> Any:
    specs = [spec_of(plan.world, whole[0]._spec.layout, shape) for shape, _, _ in infos[0]]
    return wrapped_placeholders(infos, whole, specs, None if plan.depends_on_data else recipe_of(func, args, kwargs))


def _in_place(plan: Plan, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Compute on a whole copy, then write the result back in the layout of the target."""
    if not args:  # torch's initializers pass their tensor by name
        by_name, *others = kwargs
        args, kwargs = (kwargs[by_name],), {name: kwargs[name] for name in others}
    target = args[0]
    spec = target._spec
    whole = box(target, spec.layout.broadcast(), plan.name.folded)
    with local_torch():
        local = _without_repeats(whole, target).clone()
        if local.shape != whole.shape:  # as in the target, elements have one place: torch says what may write them
            local = local.expand(whole.shape)
        copy = wrap(local, whole._spec)
    _run_whole(plan, func, (copy, *args[1:]), kwargs)
    result = box(copy, spec.layout, plan.name.folded)
    if spec.is_placeholder:
        return write_placeholder(target, [target, result], torch.Tensor.copy_, (target, result))
    with local_torch():
        _without_repeats(target, target).copy_(_without_repeats(result, target))
    return target


def _without_repeats(tensor: torch.Tensor, target: GlobalTensor) -> torch.Tensor:
    """One row of each dim along which ``target`` has been expanded on this rank, so that its rows are one."""
    strides = () if target._spec.is_placeholder else target.stride()
    for dim, stride in enumerate(strides):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor


def _warn_of_gather(plan: Plan, operands: list[GlobalTensor]) -> None:
    if plan.name.folded in _warned or plan.world.device.type == "meta":  # a dry run gathers nothing
        return
    if plan.name.in_place and plan.name.folded in RULES and operands[0]._spec.layout.has_partial:
        return  # it takes complete sums by its rule too
    moved = 0
    declared = getattr(plan.local, "how_to_declare", "a rule (wb.register_rule, wb.local_map)")
    for operand in operands:
        target = operand._spec.layout.broadcast()
        moved += plan_boxing(operand._spec.layout, target, operand._spec.shape, itemsize_of(operand)).wire_bytes
    if moved:
        _warned.add(plan.name.folded)
        layouts = ", ".join(str(operand._spec.layout) for operand in operands)
        fix = f"Box the operands to B yourself, or declare {declared}."
        if plan.name.folded in RULES and any(o._is_param and not o._spec.layout.is_broadcast for o in operands):
            fix = 'Its rule takes parameters as they lie: where it needs a whole one, write weight.to_global(sbp="B").'
        warnings.warn(
            f"{plan.name.folded}: no rule for operands with layouts {layouts}, so they were gathered "
            f"({format_bytes(moved)}). "
            f"The result is right{'' if plan.name.in_place else ' but broadcast'}. {fix}",
            FallbackWarning,
            stacklevel=user_stacklevel(),
        )


def _wrap_broadcast(
    result: Any, world: World, layout: Layout, operands: Sequence[Any], whole: Sequence[Any], keeps_views: bool
) -> Any:
    """Wrap results. One that shares storage with a cached boxing becomes a copy, because the cache keeps the boxing."""
    leaves, structure = tree_flatten(result, is_leaf=_is_size)
    with local_torch():
        boxed_storages = {
            boxed.untyped_storage().data_ptr()
            for boxed, operand in zip(whole, operands, strict=True)
            if boxed is not operand and boxed.numel()
        }
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            if not keeps_views and boxed_storages and leaf.untyped_storage().data_ptr() in boxed_storages:
                leaf = leaf.clone()
            else:
                leaf = leaf[...]  # the function may keep what it returns
            leaves[position] = wrap(leaf, spec_of(world, layout, tuple(leaf.shape)))
    return tree_unflatten(leaves, structure)
