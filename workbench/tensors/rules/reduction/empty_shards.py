"""Local functions for empty shards, which torch's own functions refuse."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

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
        links = [operand.flatten()[:0].sum() for operand in operands if operand.requires_grad]
        results = []
        for spec, dtype in zip(outputs, known[key], strict=True):
            result = torch.zeros(spec.local_shape, dtype=dtype, device=operands[0].device)
            results.append(result + torch.stack(links).sum().to(dtype) if links and dtype.is_floating_point else result)
        return results[0] if len(results) == 1 else tuple(results)

    return make


def zeros_and_bias(call: Call, outputs: list[Spec], bias_at: int, num_after: int = 0) -> LocalFunction:
    """Zeros plus the bias. The bias is argument ``bias_at``, and its dim is followed by ``num_after`` more dims."""
    make_zeros = zeros(call, outputs)

    def only_bias(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = make_zeros(*args, **kwargs)
        bias = args[bias_at] if len(args) > bias_at else kwargs.get("bias")
        return result if bias is None else result + bias.view(-1, *[1] * num_after).to(result.dtype)

    return only_bias
