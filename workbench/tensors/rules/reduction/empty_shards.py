"""Local functions for empty shards, which torch's own functions refuse."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from workbench.tensors.dispatch.placeholder_calls import autocast_state, infer_dtypes
from workbench.tensors.dispatch.registry import Call, LocalFunction
from workbench.tensors.global_tensor import Spec


def zeros_where_empty(
    call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]
) -> LocalFunction | None:
    """A ``localize`` function: zeros of the result's shape on a rank with an empty operand; elsewhere the function
    itself.

    Convolutions and pools refuse tensors without a channel. A sum over no channel is zero. If the result has no
    channel, there is nothing to compute.
    """
    return zeros(call, outputs) if any(0 in spec.local_shape for spec in inputs) else None


def zeros(call: Call, outputs: list[Spec]) -> LocalFunction:
    """Zeros in the shapes of the results, linked to every operand: all ranks must agree on which tensors have a
    gradient. Their dtypes are those of each call, as one plan serves all dtypes, with and without autocast.
    """
    func, shapes = call.func, call.shapes
    known: dict[Any, list[torch.dtype]] = {}

    def make(*args: Any, **kwargs: Any) -> Any:
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        key = (*(operand.dtype for operand in operands), autocast_state())
        if key not in known:
            known[key] = infer_dtypes(func, args, kwargs, shapes)
        links = [torch.real(operand.flatten()[:0].sum()) for operand in operands if operand.requires_grad]
        results = []
        for spec, dtype in zip(outputs, known[key], strict=True):
            result = torch.zeros(spec.local_shape, dtype=dtype, device=operands[0].device)
            is_linked = links and (dtype.is_floating_point or dtype.is_complex)
            results.append(result + torch.stack(links).sum().to(dtype) if is_linked else result)
        return results[0] if len(results) == 1 else tuple(results)

    return make


def as_if_filled(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction | None:
    """A ``localize`` function for a function of several tensors, whose first gradients depend on the other tensors.

    A rank with an empty operand must have these dependences too, or the second gradients would let the other ranks
    wait. Zeros have none, so the function itself runs, on zeros.
    """
    return filled(call.func, inputs, outputs)


def filled(function: LocalFunction, inputs: list[Spec], outputs: list[Spec]) -> LocalFunction | None:
    """``function`` of operands whose empty dims have a row of zeros; results are cut to the rank's shapes. None if
    no operand is empty.
    """
    if not any(0 in spec.local_shape for spec in inputs):
        return None

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_fill, (args, kwargs))
        remaining = iter(outputs)
        return tree_map(lambda result: _cut(result, next(remaining)), function(*args, **kwargs))

    return run


def _fill(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.numel():
        return value
    return torch.nn.functional.pad(value, [rows for size in reversed(value.shape) for rows in (0, int(size == 0))])


def _cut(result: torch.Tensor, spec: Spec) -> torch.Tensor:
    for dim, size in enumerate(spec.local_shape):
        result = result.narrow(dim, 0, size)
    return result
