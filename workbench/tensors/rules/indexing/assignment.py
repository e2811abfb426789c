"""Index expressions that a rule cannot express: masks and lists, which become index tensors, and assignments.

An assignment keeps the layout of its target. Each rank writes into its own rows. If the target is a sum of terms, so is
the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workbench.core.sbp import Partial, Sbp, Split, broadcast, partial_sum
from workbench.tensors.boxing.box import box_implicitly
from workbench.tensors.conversion import from_local
from workbench.tensors.dispatch.aliasing import is_basic
from workbench.tensors.dispatch.dispatcher import call_by_plan
from workbench.tensors.dispatch.placeholder_calls import write_placeholder
from workbench.tensors.dispatch.registry import handler
from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.rules.indexing.indexing import as_items, wrapped
from workbench.tensors.rules.reduction.two_stage import own_rows

_WHOLE = slice(None)
_MASKS = (torch.bool, torch.uint8)


@handler("getitem")
def getitem(func: Any, args: Any, kwargs: Any) -> Any:
    """Numbers, slices and None are left to the rule; then come index tensors, with all other dims whole."""
    index = args[1]
    if type(index) is int or type(index) is slice:
        return NotImplemented
    if type(index) is tuple and all(map(is_basic, index)):
        return NotImplemented
    if not isinstance(args[0], GlobalTensor) or index is None or index is Ellipsis:
        return NotImplemented
    items = tensor_items(args[0], index)
    if items is None:
        return NotImplemented
    first = tuple(_WHOLE if isinstance(item, torch.Tensor) else item for item in items)
    source = args[0] if all(item == _WHOLE for item in first) else args[0][first]
    rest = tuple(item if isinstance(item, torch.Tensor) else _WHOLE for item in items if not isinstance(item, int))
    return call_by_plan(torch.Tensor.__getitem__, (source, rest))


def tensor_items(target: GlobalTensor, index: Any) -> list[Any] | None:
    """One item per dim, with lists as tensors and masks as index tensors; None if only torch can read the index."""
    items = [_as_tensor(item, target) for item in _listed(index)]
    if any(_is_condition(item) for item in items):
        return None
    found: list[Any] = []
    for item in as_items(tuple(items), len(target._spec.shape)):
        if isinstance(item, torch.Tensor) and item.dtype in _MASKS:
            _check_mask(item, target, sum(i is not None for i in found))
            found.extend(torch.nonzero(item).unbind(1))
        elif isinstance(item, torch.Tensor):
            found.append(item.long() if item.dtype != torch.int64 else item)
        else:
            found.append(item)
    return found


def _as_tensor(item: Any, target: GlobalTensor) -> Any:
    if isinstance(item, Sequence) or (hasattr(item, "__array__") and not isinstance(item, torch.Tensor)):
        item = torch.as_tensor(list(item) if isinstance(item, Sequence) else item)
        if not item.numel():
            item = item.long()
    if isinstance(item, torch.Tensor) and not isinstance(item, GlobalTensor):
        return from_local(item, target._spec.world, target._spec.layout)
    return item


def _is_condition(item: Any) -> bool:
    """True, False, and masks without dims: they select everything or nothing."""
    return isinstance(item, bool) or (isinstance(item, torch.Tensor) and item.dtype in _MASKS and not item.dim())


def _listed(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _check_mask(mask: Any, target: GlobalTensor, dim: int) -> None:
    shape = tuple(target._spec.shape)
    if tuple(mask.shape) != shape[dim : dim + mask.dim()]:
        raise IndexError(f"The shape of the mask {list(mask.shape)} at index {dim} does not match {list(shape)}")


@handler("setitem")
def setitem(func: Any, args: Any, kwargs: Any) -> None:
    """``x[index] = value``, in the layout of ``x``."""
    target, index, value = args
    if not isinstance(target, GlobalTensor):  # assignment to a plain tensor would write only this rank's part
        return call_by_plan(func, args)
    listed = _listed(index)
    if all(map(is_basic, listed)):
        return _assign(target, as_items(listed, len(target._spec.shape)), value)
    mask = listed[0] if len(listed) == 1 else None
    if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.dim() and _num_elements(value) == 1:
        _check_mask(mask, target, 0)
        mask = mask.reshape(*mask.shape, *[1] * (target.dim() - mask.dim()))
        return _fill_where(target, mask, value)
    items = tensor_items(target, listed)
    if items is None:
        return call_by_plan(func, (target, listed, value))
    if _looks_up(listed, _num_elements(value)):
        _check_dtypes(target, value)
    return _assign(target, items, value)


def _looks_up(listed: tuple[Any, ...], num_values: int) -> bool:
    """Whether torch looks places up: it fills where a mask is true with one value."""
    others = [item for item in listed if not is_basic(item)]
    kinds = [i.dtype for i in others if isinstance(i, torch.Tensor)]
    return bool(others) and (num_values > 1 or any(kind not in _MASKS for kind in kinds))


def _num_elements(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 1


def _fill_where(target: GlobalTensor, mask: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.reshape(()).to(target.dtype)
    target.masked_fill_(mask, value)


def _assign(target: GlobalTensor, items: list[Any], value: Any) -> None:
    indices = [item for item in items if isinstance(item, torch.Tensor)]
    if not indices:
        return write_slices(target, items, _global(value, target))
    first = tuple(_WHOLE if isinstance(item, torch.Tensor) else item for item in items)
    if any(item != _WHOLE for item in first):  # numbers and slices make a view: write through it
        view: Any = target[first]
        value = _global(value, target)
        items = [item if isinstance(item, torch.Tensor) else _WHOLE for item in items if not isinstance(item, int)]
        view[tuple(items)] = value
        return None
    num_dims = len(items) - len(indices) + max(index.dim() for index in indices)
    return write_rows(target, items, _without_ones(_global(value, target), num_dims), accumulate=False)


def _check_dtypes(target: GlobalTensor, value: Any) -> None:
    """Let torch refuse a tensor of another dtype, which its assignments by index tensors do not convert."""
    if isinstance(value, torch.Tensor) and value.dtype != target.dtype:
        torch.zeros(1, dtype=target.dtype).index_put_(
            (torch.zeros(1, dtype=torch.long),), torch.zeros(1, dtype=value.dtype)
        )


def _without_ones(value: Any, num_dims: int) -> Any:
    """A value without leading dims of size one beyond ``num_dims``, which torch drops in ``x[index] = value``."""
    while value.dim() > num_dims and value._spec.shape[0] == 1:
        value = value.squeeze(0)
    return value


def _check_shape(value: GlobalTensor, place: Sequence[int]) -> None:
    """Refuse a value that does not fit, on all ranks alike: it may fit the shards of some."""
    shape = value._spec.shape
    fits = [size in (1, whole) for size, whole in zip(reversed(shape), reversed(place), strict=False)]
    if len(shape) > len(place) or not all(fits):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(shape)} cannot be broadcast to indexing result of shape "
            f"{list(place)}"
        )


def _global(value: Any, target: GlobalTensor) -> GlobalTensor:
    if isinstance(value, GlobalTensor):
        converted: Any = value if value.dtype == target.dtype else value.to(target.dtype)
        return converted
    spec = target._spec
    if isinstance(value, (int, float, complex)):  # torch refuses those that the dtype cannot represent
        plain = torch.full((), value, dtype=target.dtype, device=spec.world.device)
    else:
        plain = torch.as_tensor(value, device=spec.world.device).to(target.dtype)
    return from_local(plain, spec.world, spec.layout)


def _boxed_value(value: GlobalTensor, target: GlobalTensor, result_dims: list[int | None]) -> GlobalTensor:
    """The value in the layout that the write needs: B along whole dims, a term for a sum of terms."""
    spec = target._spec
    entries: list[Sbp] = []
    for entry in spec.layout.sbp:
        wanted: Sbp = entry if isinstance(entry, Partial) else broadcast
        if isinstance(entry, Split) and entry.dim in result_dims:
            at = result_dims.index(entry.dim) - len(result_dims) + value.dim()
            if at >= 0 and value._spec.shape[at] == spec.shape[entry.dim]:
                wanted = Split(at)
        entries.append(wanted)
    return box_implicitly(value, spec.layout.with_sbp(tuple(entries)), "index assignment in place")


def write_slices(target: GlobalTensor, items: list[Any], value: Any) -> None:
    """``x[numbers, slices and None] = value``: each rank writes the part in its own rows."""
    spec = target._spec
    sources = [dim for dim, item in enumerate(i for i in items if i is not None)]
    dims = iter(sources)
    by_item = [None if item is None else next(dims) for item in items]
    whole = {d for d, item in zip(by_item, items, strict=True) if d is not None and _takes_all(item, spec.shape[d])}
    kept = [(d, item) for d, item in zip(by_item, items, strict=True) if not isinstance(item, int)]
    value = _without_ones(value, len(kept))
    _check_shape(value, [1 if d is None else len(range(spec.shape[d])[item]) for d, item in kept])
    boxed = _boxed_value(value, target, [d if d in whole else None for d, _ in kept])
    if spec.is_placeholder:
        write_placeholder(target, [target, boxed])
        return _count_write(target)
    with local_torch():
        place: list[slice | int] = []
        part: list[Any] = []
        sizes: list[int] = []
        for d, item in zip(by_item, items, strict=True):
            if d is None:
                part.append(0)
                sizes.append(1)
                continue
            size, (start, stop) = spec.shape[d], own_rows(spec, d)
            if isinstance(item, int) and not -size <= item < size:
                raise IndexError(f"index {item} is out of bounds for dimension {d} with size {size}")
            rows = range(size)[item] if isinstance(item, slice) else range(item % size, item % size + 1)
            own, skipped = _own_slice(rows, start, stop)
            place.append(own)
            count = len(range(*own.indices(stop - start)))
            if isinstance(item, slice):
                sizes.append(count if d in whole else len(rows))
                part.append(_WHOLE if d in whole else slice(skipped, skipped + count))
            elif count:  # a number: with the place's strides, torch takes a value that is this very place
                place[-1] = own.start
            else:
                part.append(None)
        target[tuple(place)] = boxed.expand(sizes)[tuple(part)]
    return _count_write(target)


def _takes_all(item: Any, size: int) -> bool:
    return isinstance(item, slice) and range(size)[item] == range(size)


def _own_slice(rows: range, start: int, stop: int) -> tuple[slice, int]:
    """The part of ``rows`` in [start, stop) as a slice of the shard, and the number of rows before it."""
    skipped = max(0, -((rows.start - start) // rows.step))
    first = rows.start + skipped * rows.step
    count = len(range(first, min(rows.stop, stop), rows.step))
    return slice(first - start, first - start + count * rows.step, rows.step) if count else slice(0, 0), skipped


def write_rows(target: GlobalTensor, items: list[Any], value: GlobalTensor, accumulate: bool) -> None:
    """``x[index tensors and whole dims] = value`` (or ``+=``): each rank writes its own rows."""
    spec = target._spec
    dims = [d for d, item in enumerate(items) if isinstance(item, torch.Tensor)]
    indices = [box_implicitly(items[d], spec.layout.broadcast(), "index assignment in place") for d in dims]
    shape = torch.broadcast_shapes(*(tuple(index._spec.shape) for index in indices))
    kept: list[int | None] = [d for d in range(len(items)) if d not in dims]
    at = dims[0] if dims[-1] - dims[0] + 1 == len(dims) else 0
    result = [*kept[:at], *[None] * len(shape), *kept[at:]]
    sizes = [spec.shape[d] for d in range(len(items)) if d not in dims]
    _check_shape(value, [*sizes[:at], *shape, *sizes[at:]])
    boxed = _boxed_value(value, target, result)
    if spec.is_placeholder:
        write_placeholder(target, [target, boxed])
        return _count_write(target)
    with local_torch():
        local = [spec.local_shape[d] for d in range(len(items)) if d not in dims]
        part = boxed.expand([*local[:at], *shape, *local[at:]])
        if part.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
            part = part.clone()  # ``x[i, number] += 1``: the value is a view of the target
        valid: torch.Tensor | None = None
        rows = []
        for d, index in zip(dims, indices, strict=True):
            size, (start, stop) = spec.shape[d], own_rows(spec, d)
            row = wrapped(index, size) - start
            rows.append(row)
            if stop - start < size:
                inside = (row >= 0) & (row < stop - start)
                valid = inside if valid is None else valid & inside
        if valid is not None:
            valid = valid.expand(shape)
            rows = [row.expand(shape)[valid] for row in rows]
            part = part.movedim(list(range(at, at + len(shape))), list(range(len(shape))))[valid].movedim(0, at)
        index_of = dict(zip(dims, rows, strict=True))
        place = [index_of.get(d) for d in range(len(items))]
        torch.ops.aten.index_put_.default(target, place, part, accumulate)  # Tensor.index_put_ does not accept None
    return _count_write(target)


def _count_write(target: GlobalTensor) -> None:
    """Raise the tensor's version on every rank, also where nothing was written: boxings are cached by version."""
    with local_torch():
        torch.autograd.graph.increment_version(target)


@handler("index_put")
def index_put(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.index_put_((i, None, j), values, accumulate)``, in place or not. Nothing can be added to terms of a maximum,
    as some ranks have the least number there: they fall back.
    """
    names = ("input", "indices", "values", "accumulate")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    target, accumulate = given.pop("input", given.pop("self", None)), bool(given.get("accumulate", False))
    if not isinstance(target, GlobalTensor):
        return NotImplemented
    items = tensor_items(target, tuple(_WHOLE if item is None else item for item in given["indices"]))
    assert items is not None
    if not func.__name__.endswith("_"):
        target = target.clone()
    _check_dtypes(target, given["values"])
    if accumulate and any(isinstance(e, Partial) and e != partial_sum for e in target._spec.layout.sbp):
        return call_by_plan(torch.Tensor.index_put_, (target, given["indices"], given["values"], True))
    write_rows(target, items, _global(given["values"], target), accumulate)
    return target
