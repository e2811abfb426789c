"""Functions that walk along one dim, or that look values up in others."""

from __future__ import annotations

from typing import Any

from workbench.tensors.ops.equation_text import elementwise_except, normalize_dims, term
from workbench.tensors.ops.registry import Call, Resolution, composite, rule


@rule("trapezoid", "trapz", "cumulative_trapezoid")
def _trapezoid(call: Call) -> Resolution | None:
    """The integral along one dim of ``y``; the places ``x`` are one row for all, or as many as ``y``."""
    ndim = len(call.shapes[0])
    dims = normalize_dims(call.kwargs.get("dim", -1), ndim)
    values = term(ndim, dims)
    places = {1: "X", ndim: values}.get(len(call.shapes[-1]))
    if places is None or (len(call.operands) == 2 and len(call.shapes[1]) == ndim and call.shapes[0] != call.shapes[1]):
        return None
    result = values if call.name == "cumulative_trapezoid" else term(ndim, dropped=dims)
    return Resolution(f"{values}{f', {places}' * (len(call.operands) - 1)} -> {result}")


@rule("renorm")
def _renorm(call: Call) -> Resolution:
    """One norm per slice of ``dim``: the others stay whole."""
    ndim = len(call.shapes[0])
    return Resolution(elementwise_except(ndim, set(range(ndim)) - set(normalize_dims(call.arg(2, "dim"), ndim))))


@rule("bucketize", parameters="input boundaries")
def _bucketize(call: Call) -> Resolution | None:
    return Resolution("..., N -> ...") if len(call.operands) == 2 else None


@rule("searchsorted", parameters="sorted_sequence input")
def _searchsorted(call: Call) -> Resolution | None:
    """One sorted row for all values, or a row for each row of values."""
    if len(call.operands) < 2:
        return None
    has_sorter = len(call.operands) == 3
    if len(call.shapes[0]) == 1:
        return Resolution(f"N, ...{', N' * has_sorter} -> ...")
    rows = term(len(call.shapes[0]) - 1)
    return Resolution(f"{rows}N, {rows}z{f', {rows}N' * has_sorter} -> {rows}z")


@rule("isin", parameters="elements test_elements")
def _isin(call: Call) -> Resolution | None:
    if len(call.operands) != 2:
        return None
    return Resolution(f"..., {term(len(call.shapes[1]), range(8))} -> ...")


@composite("meshgrid")
def meshgrid(*tensors: Any, indexing: str | None = None) -> Any:
    """Rows of coordinates, each laid along its own dim and expanded over those of the others."""
    listed = list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else list(tensors)
    if any(tensor.dim() > 1 for tensor in listed) or indexing not in (None, "ij", "xy"):
        return NotImplemented
    shape = [tensor.numel() for tensor in listed]
    grids = []
    for dim, tensor in enumerate(listed):
        row = tensor.reshape([-1 if other == dim else 1 for other in range(len(shape))])
        grids.append(row.expand(shape))
    if indexing == "xy" and len(grids) > 1:
        grids = [grid.transpose(0, 1) for grid in grids]
    return tuple(grids)
