"""``out=`` forms: the function runs as it would without, then its result is boxed into ``out``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from workbench.tensors.boxing.box import box
from workbench.tensors.conversion import from_local
from workbench.tensors.dispatch.checks import refuse_out
from workbench.tensors.dispatch.placeholder_calls import write_placeholder
from workbench.tensors.dispatch.registry import FILLERS
from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.tensor_state import count_in_inference_mode


def call_with_out(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``func(*args, out=...)`` for a tensor or a tuple of them. As in torch it returns ``out``, in a tuple with the
    names of the results.

    Raises:
        LayoutError: an ``out`` that is plain beside global operands, or has another shape than the result, or a
            dtype that the result cannot be cast to.
        RuntimeError: an operand requires a gradient, as in torch.
    """
    func = getattr(func, "_overloadpacket", func)  # the overload "add.out" has no call without out
    rest = {name: value for name, value in kwargs.items() if name != "out"}
    out = kwargs["out"]
    targets = list(out) if isinstance(out, (tuple, list)) else [out]
    _check_before(func, targets, tree_leaves((args, rest)))
    has_operands = any(isinstance(argument, torch.Tensor) for argument in args)
    fill = None if has_operands else FILLERS.get(func.__name__)
    result = func(*args, **rest) if fill is None else fill(args, rest, targets[0])
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    if len(results) != len(targets):
        refuse_out(
            func,
            f"out has {len(targets)} tensors, but there are {len(results)} results.",
            "Give a tuple with one tensor per result.",
        )
    for target, value in zip(targets, results, strict=True):
        _check_fits(func, target, value)
    for target, value in zip(targets, results, strict=True):
        _write(target, value)
    return type(result)(targets) if isinstance(result, tuple) else out  # the tuple may have names: (values, indices)


def _check_before(func: Callable[..., Any], targets: list[Any], leaves: list[Any]) -> None:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    for target in targets:
        if not isinstance(target, GlobalTensor):
            layouts = ", ".join(str(leaf._spec.layout) for leaf in tensors if isinstance(leaf, GlobalTensor))
            refuse_out(
                func,
                f"out is a plain {type(target).__name__}, but the operands lie as {layouts}. The result is global, and "
                "a plain tensor would get this rank's shard of it.",
                "Give out=wb.empty(..., placement=..., sbp=...), or call .full_tensor() on the result.",
            )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, *targets)):
        raise RuntimeError(
            f"{func.__name__}(): functions with out=... arguments don't support automatic differentiation, but one of "
            "the arguments requires grad. Leave out= away, or call it under torch.no_grad()."
        )


def _check_fits(func: Callable[..., Any], target: GlobalTensor, value: Any) -> None:
    if tuple(value.shape) != tuple(target._spec.shape):
        refuse_out(
            func,
            f"out lies as {target._spec.layout} with shape {tuple(target._spec.shape)}, but the result has shape "
            f"{tuple(value.shape)}. Shards are not resized: the layout goes with the shape.",
            f"Give an out of shape {tuple(value.shape)}.",
        )
    if not torch.can_cast(value.dtype, target.dtype):
        refuse_out(
            func,
            f"out is {target.dtype}, but the result is {value.dtype}, which torch does not cast to it.",
            f"Give an out of dtype {value.dtype}.",
        )


def _write(target: GlobalTensor, value: Any) -> None:
    spec = target._spec
    if not isinstance(value, GlobalTensor):
        value = from_local(value, spec.world, spec.layout)
    boxed = box(value, spec.layout, "out=")
    with local_torch():
        count_in_inference_mode(target)
    if spec.is_placeholder:
        write_placeholder(target, [target])
        return
    with local_torch():
        target.copy_(boxed)
