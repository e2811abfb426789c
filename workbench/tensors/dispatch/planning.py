"""Makes the plan for a function and one combination of specs: the cheapest of the rule's signatures; and the keys under
which plans are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Number
from types import EllipsisType, FunctionType, NoneType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.rules import Equation, Operand, Signature, choose, signatures
from workbench.core.sbp import NdSbp, Partial, Split, partial_sum
from workbench.tensors.dispatch.aliasing import PERHAPS_ALIASING, copying_as_on_one_device, may_alias
from workbench.tensors.dispatch.arguments import Order
from workbench.tensors.dispatch.placeholder_calls import NeedsDataError, autocast_state, infer_outputs
from workbench.tensors.dispatch.registry import INDICES, RULES, Call, Name, Resolution, fold_name
from workbench.tensors.dispatch.strides import has_thin_shards, is_thinner, keeping_order
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, spec_of
from workbench.tensors.world import World

_KEEPING = """
clone detach alias detach_copy contiguous positive view reshape flatten unflatten ravel squeeze unsqueeze permute
transpose t get:T get:mT movedim to float double half bfloat16 long int short
"""
_KEEPS_ELEMENTS = frozenset(_KEEPING.split())
"""Functions whose result has the elements of their operand as they are: each term of a maximum stays one."""


@dataclass(slots=True)
class Plan:
    """What to do for one function and one combination of specs.

    Attributes:
        out: the result's spec where one tensor comes back and no operand has to be boxed; else None.
        targets: layout that each operand must have, in operand order.
        positions: indices of the operands among the positional arguments, where all are direct arguments; else None.
        outputs: specs of the results; None for a fallback, whose results are broadcast in the shape they come in.
        local: the function to run on the shards.
        name: folded name, for messages.
        num_tags: how many exchanges ``local`` makes; ranks outside the placement count them.
        inputs_match: whether all operands lie in ``targets`` already.
        may_alias: whether the function may give a view on one device.
        copies_view: whether it may, but had to copy here.
        depends_on_data: whether the shapes of the results depend on values.
        order: how keywords of the call move before ``local`` has them; None where they stay.
        infos: shapes, dtypes and links of the results, by the operands' dtypes and requires_grad, by modes and the
            default dtype.
        is_kept: whether later calls may use the plan.
        is_elementwise: whether a result lies in memory as the operand does.
        views: what torch has said of views and strides on one device.
    """

    out: Spec | None
    targets: list[Layout]
    positions: tuple[int, ...] | None
    outputs: list[Spec] | None
    local: Callable[..., Any]
    name: Name
    world: World
    num_tags: int = 0
    may_alias: bool = False
    copies_view: bool = False
    inputs_match: bool = False
    depends_on_data: bool = False
    is_kept: bool = True
    is_elementwise: bool = False
    order: Order | None = None
    infos: dict[Any, Any] = field(default_factory=dict)
    views: dict[Any, Any] = field(default_factory=dict)

    def infos_of(self, func: Callable[..., Any], args: Any, kwargs: Any, operands: Sequence[GlobalTensor]) -> Any:
        """What ``infer_outputs`` gives for a call by this plan, with gradients."""
        with local_torch():
            flags = [(operand.dtype, operand.requires_grad) for operand in operands]
        key = (*flags, torch.is_grad_enabled(), torch.get_default_dtype(), autocast_state())
        if key not in self.infos:
            self.infos[key] = infer_outputs(func, args, kwargs, with_grad=True)
        return self.infos[key]


def operands_of(args: Any, kwargs: Any) -> list[GlobalTensor]:
    """The global tensors among the arguments, in order."""
    return [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, GlobalTensor)]


def data_of(func: Any, args: Any, operands: list[GlobalTensor]) -> list[GlobalTensor]:
    """The operands that say where a call runs: all but numbers, indices and masks, and what every rank holds whole.
    The first of these if there are no others.
    """
    positions = INDICES.get(func, INDICES.get(fold_name(func).folded, ()))
    indices = {id(operand) for at in positions for operand in operands_of(args[at : at + 1], {})}
    data = [each for each in operands if each._spec.shape and id(each) not in indices] or operands[:1]
    return [each for each in data if not each._spec.is_whole_everywhere] or data


def make_plan(func: Any, args: Any, kwargs: Any, inferred: Any = None) -> Plan:
    """The plan for a call whose tensors are all global and on one placement; a fallback where no rule applies.

    ``inferred``: what ``infer_outputs`` gives for this call, where the caller knows it already.
    """
    name = fold_name(func)
    if kwargs.get("inplace"):
        name = Name(name.folded, in_place=True)
    operands = operands_of(args, kwargs)
    world, placement = operands[0]._spec.world, operands[0]._spec.layout.placement
    call = Call(name.folded, func, args, kwargs, operands)
    returns_tensor = False
    resolution = None
    if name.folded in RULES and kwargs.get("out") is None:
        known = inferred or _inferred_or_none(func, args, kwargs)
        if known is not None:
            infos, structure, leaves = known
            if structure.is_leaf() and leaves[0] is NotImplemented:
                raise TypeError(f"{name.folded}: unsupported operands")  # torch's operators make NotImplemented of it
            call.outputs, returns_tensor = [info[:2] for info in infos], structure.is_leaf()
            resolution = RULES[name.folded](call)
    if resolution is not None:
        plan = _plan_by_rule(call, name, resolution, placement, world, returns_tensor)
        if plan is not None:
            return plan
    targets = [operand._spec.layout.broadcast() for operand in operands]
    copies_view = not name.in_place and may_alias(name.folded, args)
    return Plan(None, targets, None, None, func, name, world, 0, copies_view, copies_view)


def _inferred_or_none(func: Any, args: Any, kwargs: Any) -> Any:
    """Infos of the results from shapes alone; None where they depend on data, which no rule can plan for."""
    try:
        key = (func, _metadata(args), _metadata(kwargs), torch.get_default_dtype(), autocast_state())
    except TypeError:
        key = None
    if key in _inferred:
        return _inferred[key]
    try:
        found = infer_outputs(func, args, kwargs)
    except NeedsDataError:
        return None
    if key is not None and (not isinstance(func, FunctionType) or func.__module__.startswith("torch.")):
        if len(_inferred) >= _MAX_INFERRED:
            _inferred.clear()
        _inferred[key] = found
    return found


_inferred: dict[Any, Any] = {}
"""What torch's functions return for shapes and dtypes, which every layout and every world may ask again."""
_MAX_INFERRED = 50_000
_OWN_KEYS = frozenset({int, str, NoneType, EllipsisType,
                       torch.dtype, torch.device, torch.memory_format, torch.layout})  # fmt: skip
"""Kinds of values that stand in a key as they are."""
_PLAIN_VALUES = _OWN_KEYS | {bool, float, complex}


def check_as_torch(func: Any, *args: Any, **kwargs: Any) -> None:
    """Raise torch's own error for a call that torch refuses by shapes and dtypes, and that a composite would take."""
    _inferred_or_none(func, args, kwargs)


def as_autocast_gives(x: Any, func: Any, *args: Any) -> Any:
    """``x``, an operand of 16 bits, in the dtype in which autocast computes the call ``func(*args)``.

    CPUs and GPUs compute other functions in 32 bits, so torch says it: the result has that dtype. ``x`` of another
    dtype stays unchanged, and so does any without autocast.
    """
    if not torch._C._is_any_autocast_enabled() or x.dtype not in (torch.bfloat16, torch.float16):
        return x
    known = _inferred_or_none(func, args, {})
    dtype = x.dtype if known is None else known[0][0][1]
    return x.to(dtype) if dtype.is_floating_point else x


def _metadata(value: Any) -> Any:
    """All of an argument that shapes and dtypes of results depend on; a TypeError where that is not known."""
    kind = type(value)
    if kind is GlobalTensor:
        spec = value._spec
        return GlobalTensor, spec.shape, dtype_of(value), spec.world.device.type
    if isinstance(value, (tuple, list)):
        return kind, *map(_metadata, value)
    if kind is dict:
        return kind, *((name, _metadata(item)) for name, item in value.items())
    if kind is slice:
        return slice, _metadata(value.start), _metadata(value.stop), _metadata(value.step)
    if kind in _PLAIN_VALUES:
        return kind, value
    raise TypeError(kind)


def _plan_by_rule(
    call: Call, name: Name, resolution: Resolution, placement: Placement, world: World, returns_tensor: bool
) -> Plan | None:
    candidates, accepts = candidates_of(call, resolution, placement), resolution.accepts
    if name.in_place:
        candidates, accepts = _pinned(candidates, call), partial(_keeps_target, call, accepts)
    infos = [
        Operand(operand._spec.layout, operand._spec.shape, itemsize_of(operand), operand._is_param)
        for operand in call.operands
    ]
    choice = choose(candidates, infos, placement, world.transport.cost, accepts) if candidates else None
    if choice is None:
        return None
    targets = [Layout(placement, sbp) for sbp in choice.inputs]
    inputs = [
        spec_of(world, target, operand._spec.shape) for target, operand in zip(targets, call.operands, strict=True)
    ]
    sbps = choice.outputs if len(choice.outputs) == len(call.outputs) else choice.outputs[:1] * len(call.outputs)
    outputs = [
        spec_of(world, Layout(placement, sbp), shape) for (shape, _), sbp in zip(call.outputs, sbps, strict=True)
    ]
    local = resolution.localize(call, inputs, outputs, choice.letters) if resolution.localize else None
    num_tags = getattr(local, "num_tags", 0)
    stays = num_tags == 0 and inputs[0] is call.operands[0]._spec
    aliases = not name.in_place and may_alias(name.folded, call.args)
    copies_view = aliases and not stays
    by_strides = name.folded in PERHAPS_ALIASING or any(
        isinstance(a, torch.memory_format) for a in call.kwargs.values()
    )
    if stays and by_strides and has_thin_shards(inputs[0]):
        local = copying_as_on_one_device(local or call.func, call)
    is_elementwise = returns_tensor and not (name.in_place or aliases or by_strides) and _is_elementwise(resolution)
    if is_elementwise and is_thinner(outputs[0].local_shape, outputs[0].shape):
        local = keeping_order(local or call.func, outputs[0].local_shape)
    if world.casts is not None:
        local = world.casts(name.folded, local or call.func)
    inputs_match = all(spec is operand._spec for spec, operand in zip(inputs, call.operands, strict=True))
    is_direct = (
        returns_tensor and not copies_view and not name.in_place and not outputs[0].is_placeholder and inputs_match
    )
    positions = tuple(i for i, arg in enumerate(call.args) if isinstance(arg, GlobalTensor))
    stands_bare = len(positions) == len(call.operands)
    return Plan(
        outputs[0] if is_direct else None,
        targets,
        positions if stands_bare else None,
        outputs,
        local or call.func,
        name,
        world,
        num_tags,
        aliases,
        copies_view,
        inputs_match,
        is_kept=not resolution.goes_by_dtype,
        is_elementwise=is_elementwise,
    )


def _is_elementwise(resolution: Resolution) -> bool:
    """Whether its equation has no dims but those of all operands."""
    found = resolution.signatures
    return isinstance(found, str) and set(found.replace("->", ",").replace("+", "").replace(" ", "").split(",")) == {
        "..."
    }


def itemsize_of(tensor: GlobalTensor) -> int:
    """Bytes per element."""
    with local_torch():
        return tensor.element_size()


def candidates_of(call: Call, resolution: Resolution, placement: Placement) -> list[Signature]:
    """The one-axis signatures of a rule that are right for these shapes."""
    found = resolution.signatures
    if isinstance(found, str):
        if len(Equation.parse(found).inputs) < len(call.operands):
            return []  # a call with more tensors than the equation has terms
        found = signatures(found, call.shapes, [len(shape) for shape, _ in call.outputs])
    if call.name in _KEEPS_ELEMENTS:
        found = [*found, *_of_extrema(found, call)]
    return [
        s
        for s in found
        if _keeps_terms(s, call) and (s.letter not in resolution.filled or _fills_every_rank(s, call, placement))
    ]


def _keeps_terms(signature: Signature, call: Call) -> bool:
    """Whether terms of integers, which wrap, and of bools, whose sum is their "or", give terms of the same sum.

    They do in their own dtype, and in integers of no more bits. The dtype of the result must follow from what the key
    has: the terms' dtypes, but not those of operands that would become terms.
    """
    made = [dtype for e, (_, dtype) in zip(signature.outputs, call.outputs, strict=False) if e == partial_sum]
    taken = [o for e, o in zip(signature.inputs, call.operands, strict=True) if e == partial_sum]
    wrapping = {o.dtype for o in taken if o._spec.has_partial and not (o.is_floating_point() or o.is_complex())}
    if not (made and wrapping):
        return True
    has_all_dtypes = all(o._spec.has_partial for o in taken) or fold_name(call.func).in_place
    return has_all_dtypes and all(_wraps_alike(own, dtype) for own in wrapping for dtype in made)


def _wraps_alike(own: torch.dtype, dtype: torch.dtype) -> bool:
    if own == dtype or torch.bool in (own, dtype):
        return own == dtype
    return not (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize <= own.itemsize


def _of_extrema(found: Iterable[Signature], call: Call) -> list[Signature]:
    """What a function takes and gives as terms of a sum, for the maxima and minima among its operands."""
    entries = {entry for operand in call.operands for entry in operand._spec.layout.sbp}
    others = [entry for entry in entries if isinstance(entry, Partial) and entry != partial_sum]
    of_sums = [s for s in found if {*s.inputs, *s.outputs} == {partial_sum}] if others else []
    return [Signature((e,) * len(s.inputs), (e,) * len(s.outputs)) for e in others for s in of_sums]


def _fills_every_rank(signature: Signature, call: Call, placement: Placement) -> bool:
    """Whether every rank has a row of the dim that the signature splits."""
    splits = [(shape, e) for shape, e in zip(call.shapes, signature.inputs, strict=True) if isinstance(e, Split)]
    return all(shape[entry.dim] >= placement.num_ranks for shape, entry in splits)


def _pinned(candidates: list[Signature], call: Call) -> list[Signature]:
    """In place, the result keeps the layout of the tensor that is written; only signatures that agree are legal."""
    return [s for s in candidates if s.inputs[0] == s.outputs[0] and s.inputs[0] in call.operands[0]._spec.layout.sbp]


def _keeps_target(
    call: Call, accepts: Callable[..., bool] | None, inputs: tuple[NdSbp, ...], outputs: tuple[NdSbp, ...]
) -> bool:
    return inputs[0] == call.operands[0]._spec.layout.sbp and (accepts is None or accepts(inputs, outputs))


# ---- keys under which plans and inferred results are kept: all of a call that they depend on, but no values --------

PLAIN = object()
"""In a key, represents a tensor that is not global; no plan has such a key."""
PARAMETER = object()
"""In a key, follows the spec of a parameter, which may not be boxed as others are."""


def dtype_of(tensor: GlobalTensor) -> torch.dtype:
    """Part of the key of a tensor that lies as terms: of bools, a sum is their "or"."""
    with local_torch():
        return tensor.dtype


def key_of(value: Any) -> Any:
    """The part of a key that an argument gives."""
    kind = type(value)
    if kind is GlobalTensor:
        spec = value._spec
        return (spec, value._is_param, dtype_of(value)) if spec.has_partial else (spec, value._is_param)
    if kind in _OWN_KEYS:
        return value
    if kind is bool or kind is float:
        return (repr(value),)  # to a dictionary True, 1 and 1.0 are one key, and nan equals nothing
    if isinstance(value, (list, tuple)):
        return (kind, *map(key_of, value))
    if isinstance(value, slice):
        return ("slice", key_of(value.start), key_of(value.stop), key_of(value.step))
    if isinstance(value, dict):
        return tuple((name, key_of(item)) for name, item in value.items())
    if isinstance(value, torch.Tensor):
        return PLAIN
    return kind, repr(value) if isinstance(value, Number) else value  # np.float64(2.0) and 2 + 0j equal 2, too
