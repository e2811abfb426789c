"""Runs a torch function that meets global tensors: looks up the plan, makes one if there is none, and executes it.

A plan is found by the function and by the specs and static values of its arguments. The common one is *direct*: every
operand has the right layout, so the local function runs on the shards and its result is wrapped.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Split, broadcast
from workbench.tensors.boxing.box import box_implicitly, cached_boxing_on
from workbench.tensors.conversion import from_local
from workbench.tensors.dispatch.aliasing import remember_copies, remember_placeholder_base
from workbench.tensors.dispatch.arguments import by_name, in_order, move_keywords, order_of, takes_numbers, with_numbers
from workbench.tensors.dispatch.checks import (
    check_plan,
    exchange_name,
    plain_operand_text,
    refuse_exchange,
    refuse_two_placements,
)
from workbench.tensors.dispatch.fallback import FallbackWarning, run_fallback
from workbench.tensors.dispatch.out_argument import call_with_out
from workbench.tensors.dispatch.placeholder_calls import recipe_of, wrapped_placeholders, write_placeholder
from workbench.tensors.dispatch.plain_target import write_to_plain, writes_to_plain
from workbench.tensors.dispatch.planning import PARAMETER, Plan, data_of, dtype_of, key_of, make_plan, operands_of
from workbench.tensors.dispatch.registry import COMPOSITES, EXACT, HANDLERS, RULES, VALUE_INDEPENDENT, fold_name
from workbench.tensors.dispatch.sparse_operands import call_beside_sparse, holds_sparse, is_sparse
from workbench.tensors.dispatch.strides import of_elementwise_placeholder
from workbench.tensors.global_tensor import GlobalTensor, Spec, is_below_autograd, local_torch, wrap
from workbench.tensors.tensor_state import count_in_inference_mode

_functions: dict[Any, Callable[..., Any] | None] = {}


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """The body of ``GlobalTensor.__torch_function__``."""
    if kwargs and kwargs.get("out") is not None:
        args, kwargs = in_order(func, args, kwargs)
        if "out" in kwargs:
            return call_with_out(func, args, kwargs)
    try:
        taken_over = _functions[func]
    except KeyError:
        taken_over = _functions[func] = _find_handler(func)
    if taken_over is not None:
        result = taken_over(func, args, kwargs or {})
        if result is not NotImplemented:
            return result
    return call_by_plan(func, args, kwargs)


def call_by_plan(  # noqa: C901 - the hot path: calls cost more than branches
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Any:
    """Call a torch function by its rule or fallback; for composites that end in the function they are made of."""
    plans = None
    key: list[Any] = [func]
    for arg in args:
        kind = type(arg)
        if kind is GlobalTensor:
            spec = arg._spec
            plans = spec.plans
            key.append(spec)
            if spec.has_partial:
                key.append(dtype_of(arg))
            if arg._is_param:
                key.append(PARAMETER)
        elif kind is int or kind is str:
            key.append(arg)
        elif kind is float:
            key.append(float if func in _value_independent and arg and math.isfinite(arg) else (repr(arg),))
        else:
            key.append(key_of(arg))
            if (kind is list or kind is tuple) and arg and type(arg[0]) is GlobalTensor:
                plans = arg[0]._spec.plans
    if kwargs:
        key.extend([(n, _key_of_float(func, v) if type(v) is float else key_of(v)) for n, v in kwargs.items()])
    if plans is None:
        operands = operands_of(args, kwargs)
        if not operands:  # a global tensor stands among the bounds of a slice, or was a number and has been read
            args, kwargs = with_numbers(func, args, kwargs or {}) or (args, kwargs or {})
            with local_torch():
                return func(*args, **kwargs)
        plans = operands[0]._spec.plans
    try:
        plan = plans.get(tuple(key))
    except TypeError:  # no key without a hash: make a new plan
        plan, key = None, []
    if plan is None:
        order = order_of(func, args, kwargs) if kwargs else None
    else:
        order = plan.order
    if order is not None:
        args, kwargs = move_keywords(order, args, kwargs or {})
    if plan is not None and plan.out is not None:
        with local_torch():
            out = plan.local(*args, **kwargs) if kwargs else plan.local(*args)
        if type(out) is not GlobalTensor:
            out.__class__ = GlobalTensor
            out._spec = plan.out
            return out
        return _wrap_result(out, plan.out)
    if plan is None:
        if writes_to_plain(func, args):
            return write_to_plain(func, args, kwargs or {})
        read = with_numbers(func, args, kwargs or {})
        if read is not None:
            return call_by_plan(func, *read)
        joined = _join_operands(func, args, kwargs or {})
        if joined is not None:
            return call_by_plan(func, *joined)
        if holds_sparse(args, kwargs):
            return call_beside_sparse(func, args, kwargs or {})
        plan = make_plan(func, args, kwargs or {})
        if plan.world.on_plan is not None:
            plan.world.on_plan(func, args, kwargs or {})
        if plan.out is None or plan.local is not func:  # torch's own function takes a call as users write it
            plan.order = order
        if key and plan.is_kept:
            if len(plans) >= _MAX_PLANS:  # a program whose calls are never alike must not fill the memory
                for oldest in list(plans)[: len(plans) // 2]:  # as in ``specs``: ranks do so at different times
                    del plans[oldest]
            plans[tuple(key)] = plan
    return _run(plan, func, args, kwargs or {})


def _key_of_float(func: Any, value: float) -> Any:
    return float if func in _value_independent and value and math.isfinite(value) else (repr(value),)


def _find_handler(func: Any) -> Callable[..., Any] | None:
    handler = _handler_by_name(func) or (HANDLERS["::"] if "::" in fold_name(func).folded else None)
    if handler is not None and takes_numbers(func):
        handler = partial(_call_with_numbers, handler)
    if fold_name(func).in_place:
        handler = partial(_count_and_call, handler)
    if not isinstance(func, torch._ops.OpOverload):
        return handler

    def call_operator(_: Any, args: Any, kwargs: Any) -> Any:
        """Dispatch modes hand on what autograd runs, which goes by no layout."""
        if is_below_autograd():
            with local_torch():
                return func(*args, **kwargs)
        return NotImplemented if handler is None else handler(func, args, kwargs)

    return call_operator


def _count_and_call(handler: Any, func: Any, args: Any, kwargs: Any) -> Any:
    if torch.is_inference_mode_enabled() and isinstance(target := (*args, *kwargs.values())[0], GlobalTensor):
        with local_torch():
            count_in_inference_mode(target)
    return NotImplemented if handler is None else handler(func, args, kwargs)


def _call_with_numbers(handler: Any, func: Any, args: Any, kwargs: Any) -> Any:
    if not _holds_no_tensor(map(type, args[1:])) or not _holds_no_tensor(map(type, kwargs.values())):
        read = with_numbers(func, args, kwargs)
        if read is not None:
            return func(*read[0], **read[1])
    return handler(func, args, kwargs)


_holds_no_tensor = {int, float, bool, str, types.NoneType, torch.dtype}.issuperset
"""Whether arguments of these types need no look; most calls have no others."""


def _handler_by_name(func: Any) -> Callable[..., Any] | None:
    exchange = exchange_name(func)
    if exchange is not None:
        return partial(refuse_exchange, exchange)
    name = fold_name(func)
    if name.folded in VALUE_INDEPENDENT:
        _value_independent.add(func)
    operator = getattr(func, "_overloadpacket", func)  # an overload's name, "add_.Tensor", hides that it writes
    if operator in EXACT:
        exact = EXACT[operator]
        return lambda _, args, kwargs: exact(**by_name(exact, args, kwargs))
    if not name.in_place or name.folded not in RULES:
        if name.folded in HANDLERS:
            handler = HANDLERS[name.folded]
            return lambda _, args, kwargs: handler(
                operator, *(in_order(func, args, kwargs) if kwargs else (args, kwargs))
            )
        if name.folded in COMPOSITES and not name.in_place:
            written = COMPOSITES[name.folded]

            def call_composite(_: Any, args: Any, kwargs: Any) -> Any:
                if kwargs:
                    args, kwargs = in_order(func, args, kwargs)
                result = written(*args, **kwargs)
                return call_by_plan(func, args, kwargs) if result is NotImplemented else result

            return call_composite
    if name.folded not in RULES:
        body = decompose(func)
        if body is not None:
            return lambda _, args, kwargs: body(*args, **kwargs)
    return None


def forget_function(name: str, plans: dict[Any, Any]) -> None:
    """Drop the handlers and plans of this folded name, because its rule has changed."""
    for func in [func for func in _functions if fold_name(func).folded == name]:
        _functions.pop(func, None)
        _value_independent.discard(func)
    for key in [key for key, plan in plans.items() if isinstance(plan, Plan) and plan.name.folded == name]:
        plans.pop(key, None)


def decompose(func: Any) -> Callable[..., Any] | None:
    """The body of a Python function of torch, so that the functions inside meet global tensors one by one."""
    if not isinstance(func, types.FunctionType) or not func.__module__.startswith("torch"):
        return None
    blind = {name: lambda *_: False for name in func.__globals__ if name.startswith("has_torch_function")}
    if not blind:
        return None
    body = types.FunctionType(
        func.__code__, {**func.__globals__, **blind}, func.__name__, func.__defaults__, func.__closure__
    )
    body.__kwdefaults__ = func.__kwdefaults__
    return body


_value_independent: set[Any] = set()
"""Functions whose rule depends on a float only by whether it is zero or infinite: one plan serves all others."""
_MAX_PLANS = 50_000


def _join_operands(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments with all tensors global and on one placement; None where they are already.

    Plain tensors count as broadcast on the placement of the global ones; sparse ones stay plain. The target of a write
    stays where it is, and the other operands go there. The same ranks in another order or grid (shards under ZeRO
    differ in both) take that of the first operand. Operands on stages of a parallelized module go to the latest of
    these. Elsewhere single numbers, such as the parts of a loss or norms, go where the other operands
    are, and so do indices and masks. What every rank holds whole is taken there. Two placements of other tensors are an
    error.
    """
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not is_sparse(leaf)]
    known = [tensor for tensor in tensors if isinstance(tensor, GlobalTensor)]
    placements = {tensor._spec.layout.placement for tensor in known}
    if len(known) == len(tensors) and len(placements) == 1:
        return None
    world = known[0]._spec.world
    placement, why = known[0]._spec.layout.placement, "an operation between stages"
    name = fold_name(func)
    if name.in_place and isinstance(leaves[0], GlobalTensor):
        placement, why = leaves[0]._spec.layout.placement, f"{name.folded} in place"
    elif not all(placement.has_ranks_of(other) for other in placements):
        if (stage := world.context.latest_stage(placements)) is not None:
            placement = stage
        else:
            data = data_of(func, args, known)
            placement, why = data[0]._spec.layout.placement, "an operation with numbers or indices on other ranks"
            if not all(placement.has_ranks_of(tensor._spec.layout.placement) for tensor in data):
                refuse_two_placements(func, args, kwargs, data)
    layout = Layout(placement, (broadcast,) * placement.num_axes)
    joined = [
        leaf
        if not isinstance(leaf, torch.Tensor) or is_sparse(leaf)
        else _to_placement(leaf, placement, why)
        if isinstance(leaf, GlobalTensor)
        else from_local(leaf, world, layout, partial(plain_operand_text, func, args, kwargs, leaf))
        for leaf in leaves
    ]
    return tree_unflatten(joined, structure)


def beside(target: Any, operands: Any, why: str) -> Any:
    """What a write takes, with all global tensors on the placement of its target."""
    if not isinstance(target, GlobalTensor):
        return operands
    placement = target._spec.layout.placement
    return tree_map(
        lambda leaf: _to_placement(leaf, placement, why) if isinstance(leaf, GlobalTensor) else leaf, operands
    )


def _to_placement(tensor: GlobalTensor, placement: Placement, why: str) -> GlobalTensor:
    layout = tensor._spec.layout
    if layout.placement == placement:
        return tensor
    if (there := cached_boxing_on(tensor, placement)) is not None:
        return there  # a layer's input hook has boxed this residual already
    if layout.placement.has_ranks_of(placement):
        is_alike = len(set(layout.sbp)) == 1
        entry = layout.sbp[:1] if is_alike else layout.broadcast().sbp[:1]
        sbp = layout.sbp if layout.placement.shape == placement.shape else entry * placement.num_axes
        return box_implicitly(tensor, Layout(placement, sbp), "an operation on the same ranks in another order")
    splits_batch = Split(0) in layout.sbp or (layout.has_partial and tensor._spec.shape)
    entries = [Split(0) if splits_batch else layout.broadcast().sbp[0]] * placement.num_axes
    target = Layout.of(placement, entries)
    return box_implicitly(tensor, target, why)


def _run(plan: Plan, func: Any, args: Any, kwargs: Any) -> Any:
    if not plan.world.context.implicit_boxing_allowed:
        check_plan(plan, func, args, kwargs)
    if plan.outputs is None:
        return run_fallback(plan, func, args, kwargs)
    given = (args, kwargs)
    args, kwargs, operands = _box_operands(plan, args, kwargs)
    if operands[0]._spec.is_placeholder:
        for _ in range(plan.num_tags):
            plan.world.context.next_tag()
        result = _run_on_placeholders(plan, func, args, kwargs, operands)
        if plan.may_alias and not plan.num_tags:
            base = operands_of(*given)[0] if plan.copies_view else operands[0]
            remember_placeholder_base(plan.name.folded, plan.views, (func, *given), base, operands[0], result)
        elif plan.is_elementwise and plan.inputs_match and any(operand._strides for operand in operands):
            result._strides = of_elementwise_placeholder(plan.views, (func, *given), operands)
    else:
        with local_torch():
            result = plan.local(*args, **kwargs)
        if plan.name.in_place:
            return operands[0]
        result = _wrap_all(result, plan.outputs)
    if plan.copies_view:
        base = operands_of(*given)[0]
        return remember_copies(plan.local, plan.name.folded, plan.views, (func, *given), base, operands[0], result)
    return result


def _box_operands(plan: Plan, args: Any, kwargs: Any) -> tuple[Any, Any, list[GlobalTensor]]:
    """The arguments with every operand in the layout that the plan wants, and the operands."""
    name = plan.name.folded
    if plan.inputs_match:
        if plan.positions is not None:
            return args, kwargs, [args[position] for position in plan.positions]
        return args, kwargs, operands_of(args, kwargs)
    if plan.positions is not None:
        boxed = list(args)
        for position, target in zip(plan.positions, plan.targets, strict=True):
            boxed[position] = box_implicitly(args[position], target, name)
        return boxed, kwargs, [boxed[position] for position in plan.positions]
    leaves, structure = tree_flatten((args, kwargs))
    targets = iter(plan.targets)
    leaves = [box_implicitly(leaf, next(targets), name) if isinstance(leaf, GlobalTensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(leaves, structure)
    return args, kwargs, [leaf for leaf in leaves if isinstance(leaf, GlobalTensor)]


def _run_on_placeholders(plan: Plan, func: Any, args: Any, kwargs: Any, operands: list[GlobalTensor]) -> Any:
    if plan.name.in_place:
        return write_placeholder(operands[0], operands, func, args, kwargs)
    assert plan.outputs is not None
    infos = plan.infos_of(func, args, kwargs, operands)
    return wrapped_placeholders(infos, operands, plan.outputs, recipe_of(func, args, kwargs))


def _wrap_all(result: Any, specs: list[Spec]) -> Any:
    if isinstance(result, torch.Tensor):
        return _wrap_result(result, specs[0])
    leaves, structure = tree_flatten(result)
    remaining = iter(specs)
    wrapped = [_wrap_result(leaf, next(remaining)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return tree_unflatten(wrapped, structure)


def _wrap_result(result: torch.Tensor, spec: Spec) -> GlobalTensor:
    """Wrap a result. One that is an operand itself (``contiguous()`` of a contiguous tensor) becomes a new object.

    Whether torch returns the operand depends on this rank's strides, and boxings are cached by object: ranks
    that disagree about identity would disagree about communication.
    """
    if type(result) is GlobalTensor:
        with local_torch():
            result = result.view_as(result)
    return wrap(result, spec)


__all__ = ["FallbackWarning", "beside", "call_by_plan", "decompose", "dispatch"]
