"""Grouped matrix products: the layers of a mixture of experts."""

from __future__ import annotations

from typing import Any

import torch

from workbench.tensors.dispatch.dispatcher import call_by_plan
from workbench.tensors.dispatch.placeholder_calls import has_data
from workbench.tensors.dispatch.registry import Call, LocalFunction, Resolution, composite, rule
from workbench.tensors.global_tensor import GlobalTensor, Spec


@composite("_grouped_mm", "grouped_mm")
def grouped_mm(input: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Rows sorted by expert, times one matrix per expert. Other forms have no rule."""
    if offs is None or bias is not None or out_dtype is not None:
        return NotImplemented
    if (input.dim(), mat2.dim()) != (2, 3) or not isinstance(mat2, GlobalTensor):
        return NotImplemented
    return call_by_plan(product_by_expert, (input, mat2, offs))


def product_by_expert(rows: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, first: int = 0) -> torch.Tensor:
    """``torch._grouped_mm`` for any sizes: its kernel needs strides of 16 bytes, which slices do not have.

    Args:
        rows: (rows, inputs), sorted by expert.
        weights: (experts here, inputs, outputs).
        offsets: for each of all experts, the row after its last one.
        first: number of the first expert here. Rows of other experts give zeros.
    """
    if not has_data(rows):  # metadata has no offsets to read
        return rows[:, :1] * weights[0, :1]
    ends = [0, *offsets.tolist()]
    result = rows.new_zeros(len(rows), weights.shape[-1])
    with torch.autocast(rows.device.type, enabled=False):  # torch's kernel does not cast
        if not len(weights):  # a rank without experts takes part in backward, too
            result[:0] = rows[:0] @ weights.sum(0)
        for expert, matrix in enumerate(weights, start=first):
            start, stop = ends[expert : expert + 2]
            result[start:stop] = rows[start:stop] @ matrix
    return result


@rule("product_by_expert")
def _product_by_expert(call: Call) -> Resolution:
    """Features and experts may be split. Rows stay whole, because the rows of an expert may be anywhere."""
    return Resolution("Tk, ekn, Z -> Tn", _from_first)


def _from_first(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> LocalFunction:
    weight = inputs[1]
    if not any(letters) or weight.is_placeholder:
        return lambda rows, weights, offsets: torch._grouped_mm(rows, weights, offs=offsets)
    first, _ = weight.layout.region(weight.shape, weight.world.rank)[0]
    return lambda rows, weights, offsets: product_by_expert(rows, weights, offsets, first)
