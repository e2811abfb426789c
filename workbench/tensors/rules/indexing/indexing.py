"""Indexing: numbers, slices, None, ``...``, masks and index tensors.

Dims that are taken whole keep their split. A slice of a split dim becomes a balanced split without a gather; a single
row of it is sent to all ranks. An index tensor over a split dim is looked up on every rank in its own rows, and the
result is the sum over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.core.rules import Signature, signatures
from workbench.core.sbp import NdSbp, Sbp, Split, broadcast, partial_sum
from workbench.tensors.dispatch.aliasing import is_basic
from workbench.tensors.dispatch.local_call import can_read
from workbench.tensors.dispatch.registry import Call, Resolution, rule, term
from workbench.tensors.global_tensor import Spec
from workbench.tensors.rules.reduction.two_stage import own_rows
from workbench.tensors.rules.views.concatenation import RowFunction, splits_dim
from workbench.tensors.rules.views.row_moves import RowPlan, Segment, Side, plan_rows

_WHOLE = slice(None)


def as_items(index: Any, ndim: int) -> list[Any]:
    """The items of an index, one for each dim and each None; ``...`` is expanded."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(_num_dims(item) for item in items)
    at = next((i for i, item in enumerate(items) if item is Ellipsis), None)
    if used > ndim:
        raise IndexError(f"too many indices for tensor of dimension {ndim}")
    filler = [_WHOLE] * (ndim - used)
    if at is None:
        return items + filler
    return [*items[:at], *filler, *(item for item in items[at + 1 :] if item is not Ellipsis)]


def _num_dims(item: Any) -> int:
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


@rule("getitem")
def _getitem(call: Call) -> Resolution | None:
    items = as_items(call.args[1], len(call.shapes[0]))
    if all(is_basic(item) for item in items):
        return basic(call, items)
    if all(isinstance(item, torch.Tensor) or item == _WHOLE for item in items):
        return lookup(call, items)
    return None


@rule("select")
def _select(call: Call) -> Resolution | None:
    if not isinstance(call.args[2], int):
        return None
    ndim = len(call.shapes[0])
    return basic(call, _at(ndim, call.args[1] % ndim, call.args[2]))


@rule("narrow")
def _narrow(call: Call) -> Resolution | None:
    ndim = len(call.shapes[0])
    dim, start, length = call.args[1] % ndim, call.args[2], call.args[3]
    if not isinstance(start, int):
        return None
    start = start + call.shapes[0][dim] if start < 0 else start
    return basic(call, _at(ndim, dim, slice(start, start + length)))


def _at(ndim: int, dim: int, item: Any) -> list[Any]:
    return [item if d == dim else _WHOLE for d in range(ndim)]


def basic(call: Call, items: list[Any]) -> Resolution:
    """Numbers, slices and None: a row map for each split dim that is cut."""
    shape = call.shapes[0]
    parts = call.operands[0]._spec.layout.placement.num_ranks
    found, cut = [], {}
    dim = out_dim = 0
    for item in items:
        if item is None:
            out_dim += 1
            continue
        after: Sbp = Split(out_dim)
        if isinstance(item, slice):
            rows = range(shape[dim])[item]
            if rows != range(shape[dim]):
                cut[dim] = Segment(0, rows.start, rows.step, 0, 0, len(rows))
                after = after if len(rows) >= parts else broadcast
        else:
            cut[dim] = Segment(0, int(item) % max(1, shape[dim]), 1, 0, 0, 1)
            after = broadcast
        found.append(Signature((Split(dim),), (after,), chr(97 + dim)))
        dim, out_dim = dim + 1, out_dim + isinstance(item, slice)
    found += [Signature((entry,), (entry,)) for entry in (partial_sum, broadcast)]

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> Any:
        split = [d for d in cut if splits_dim(inputs[0], d)]
        if not split:
            return (lambda x, *_, **__: x[place]) if call.name != "getitem" else None
        plans, rest = _row_maps(inputs[0], outputs[0].layout.sbp, {d: cut[d] for d in split}, items)
        return RowFunction(inputs[0].world, plans, [place], lambda x: x[rest])

    place = tuple(items)
    return Resolution(found, localize)


def _row_maps(source: Spec, target: NdSbp, cut: dict[int, Segment], items: list[Any]) -> tuple[list[RowPlan], Any]:
    """One row map per dim, and the index that remains for the shard."""
    plans, layout, shape = [], source.layout, source.shape
    for dim, segment in cut.items():
        before = Side(layout, shape)
        layout = layout.with_sbp(
            tuple(
                broadcast if entry == Split(dim) and not isinstance(after, Split) else entry
                for entry, after in zip(layout.sbp, target, strict=True)
            )
        )
        shape = (*shape[:dim], segment.length, *shape[dim + 1 :])
        plans.append(plan_rows(dim, (segment,), (before,), (Side(layout, shape),)))
    rest, dim = [], 0
    for item in items:
        rest.append(item if item is None or dim not in cut else _WHOLE if isinstance(item, slice) else 0)
        dim += item is not None
    return plans, tuple(rest)


def lookup(call: Call, items: list[Any]) -> Resolution:
    """Index tensors and whole dims. The index's own dims may be split too, if all index tensors have these dims."""
    shape, operands = call.shapes[0], call.operands
    indexed = [d for d, item in enumerate(items) if isinstance(item, torch.Tensor)]
    index_shapes = call.shapes[1:]
    common = torch.broadcast_shapes(*index_shapes)
    names = [chr(110 + i) for i in range(len(common))]
    terms = [
        "".join(
            name if size == whole else "1"
            for name, size, whole in zip(names[len(names) - len(s) :], s, common[len(common) - len(s) :], strict=True)
        )
        for s in index_shapes
    ]
    source = "".join(chr(65 + d) if d in indexed else chr(97 + d) for d in range(len(shape)))
    kept = "".join(chr(97 + d) for d in range(len(shape)) if d not in indexed)
    at = indexed[0] if indexed[-1] - indexed[0] + 1 == len(indexed) else 0
    text = f"{', '.join([source, *terms])} -> {kept[:at]}{''.join(names)}{kept[at:]}"
    found = list(signatures(text, call.shapes, [len(call.outputs[0][0])]))
    whole = (broadcast,) * len(index_shapes)
    found.insert(-1, Signature((partial_sum, *whole), (partial_sum,)))
    if operands[0].dtype != torch.bool:
        found = [*(Signature((Split(d), *whole), (partial_sum,), chr(65 + d)) for d in indexed), *found]

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> Any:
        split = [d for d in indexed if splits_dim(inputs[0], d)]
        if not split:
            return None
        bounds = {d: own_rows(inputs[0], d) for d in split}
        behind = len(kept) - at

        def look_up(x: torch.Tensor, index: Any) -> torch.Tensor:
            parts = list(index) if isinstance(index, tuple) else [index]
            parts = as_items(tuple(parts), len(shape))
            parts = [wrapped(part, shape[d]) if d in bounds else part for d, part in enumerate(parts)]
            return masked_lookup(x, parts, bounds, behind)

        return look_up

    return Resolution(found, localize)


def masked_lookup(x: torch.Tensor, items: list[Any], bounds: dict[int, tuple[int, int]], behind: int) -> torch.Tensor:
    """``x[items]`` as a term: this rank's rows (``own_term``); ``behind`` dims of the result follow the index's."""
    valid: torch.Tensor | None = None
    local = list(items)
    for dim, (start, stop) in bounds.items():
        local[dim], inside = shifted(items[dim], start, stop)
        valid = inside if valid is None else valid & inside
    assert valid is not None
    if any(start == stop for start, stop in bounds.values()):  # a lookup needs at least one row
        room = [int(d in bounds and x.shape[d] == 0) for d in reversed(range(x.dim()))]
        x = torch.nn.functional.pad(x, [size for missing in room for size in (0, missing)])
    found = x[tuple(local)]
    return own_term(found, valid.reshape(*valid.shape, *[1] * behind))


def own_term(found: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """What this rank has found, as a term of the sum over the ranks. Elsewhere it is -0.0: with 0.0 the sum would not
    keep a -0.0. (torch's sums of complex numbers never do.)
    """
    return found.masked_fill(~valid, -0.0)


def shifted(index: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An index relative to this rank's rows (0 for other rows), and a mask of the rows that this rank has."""
    valid = (index >= start) & (index < stop)
    return torch.where(valid, index - start, 0), valid


def wrapped(index: torch.Tensor, size: int) -> torch.Tensor:
    """An index with negative numbers counted from the end."""
    check_bounds(index, -size, size)
    return torch.where(index < 0, index + size, index)


def check_bounds(index: torch.Tensor, first: int, size: int) -> None:
    """Raise for an index below ``first``, or beyond a dim's size, if a check may read it. Each rank looks only for its
    own rows and would not notice.
    """
    if not can_read(index) or not index.numel():
        return
    low, high = int(index.min()), int(index.max())
    if low < first or high >= size:
        wrong = low if low < first else high
        raise IndexError(f"index {wrong} is out of bounds for dimension with size {size}")


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
