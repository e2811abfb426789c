"""Functions that search for values among others: ``bucketize``, ``searchsorted``, ``isin``."""

from __future__ import annotations

from workbench.tensors.dispatch.equation_text import term
from workbench.tensors.dispatch.registry import Call, Resolution, rule


@rule("bucketize")
def _bucketize(call: Call) -> Resolution | None:
    return Resolution("..., N -> ...") if len(call.operands) == 2 else None


@rule("searchsorted")
def _searchsorted(call: Call) -> Resolution | None:
    """One sorted row for all values, or a row for each row of values."""
    if len(call.operands) < 2:
        return None
    has_sorter = len(call.operands) == 3
    if len(call.shapes[0]) == 1:
        return Resolution(f"N, ...{', N' * has_sorter} -> ...")
    rows = term(len(call.shapes[0]) - 1)
    return Resolution(f"{rows}N, {rows}z{f', {rows}N' * has_sorter} -> {rows}z")


@rule("isin")
def _isin(call: Call) -> Resolution | None:
    if len(call.operands) != 2:
        return None
    return Resolution(f"..., {term(len(call.shapes[1]), range(8))} -> ...")
