"""Gather and scatter: rows and elements by index along one dim.

Other dims keep their split if the index has their size. Along a split dim, each rank handles the entries that fall into
its own rows. A gather is then a sum over the ranks. A scatter writes entries of other ranks into a spare row, which is
dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from workbench.core.layout import Shape
from workbench.core.rules import Signature
from workbench.core.sbp import Sbp, Split, broadcast, partial_sum
from workbench.tensors.dispatch.dispatcher import beside, call_by_plan
from workbench.tensors.dispatch.local_call import can_read
from workbench.tensors.dispatch.registry import (
    USER_FUNCTION_NAMES,
    Call,
    Resolution,
    composite,
    fold_name,
    handler,
    normalize_dims,
    rule,
    term,
)
from workbench.tensors.global_tensor import GlobalTensor, Spec
from workbench.tensors.rules.indexing.indexing import check_bounds, masked_lookup, own_term, shifted, wrapped
from workbench.tensors.rules.reduction.two_stage import own_rows
from workbench.tensors.rules.views.concatenation import splits_dim

_WHOLE = slice(None)


@rule("index_select")
def _index_select(call: Call) -> Resolution | None:
    ndim = len(call.shapes[0])
    if not ndim:
        return None
    dim = int(call.args[1]) % ndim
    found = [Signature((Split(d), broadcast), (Split(d),), chr(97 + d)) for d in range(ndim) if d != dim]
    if call.shapes[1]:
        found.append(Signature((broadcast, Split(0)), (Split(dim),), "n"))
    if call.operands[0].dtype != torch.bool:
        found.append(Signature((Split(dim), broadcast), (partial_sum,), "r"))
    found += [Signature((entry, broadcast), (entry,)) for entry in (partial_sum, broadcast)]

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> Any:
        if not splits_dim(inputs[0], dim):
            return None
        size, bounds = call.shapes[0][dim], {dim: own_rows(inputs[0], dim)}

        def look_up(x: torch.Tensor, _: int, index: torch.Tensor) -> torch.Tensor:
            check_bounds(index, 0, size)
            items: list[Any] = [_WHOLE] * ndim
            items[dim] = index.reshape(-1)
            return masked_lookup(x, items, bounds, ndim - dim - 1)

        return look_up

    return Resolution(found, localize)


def _aligned(call: Call, dim: int, tensors: Sequence[int]) -> list[int]:
    """Dims other than ``dim`` in which all tensors have the same size, so that equal slices belong together."""
    shapes = [call.shapes[k] for k in tensors]
    return [d for d in range(len(shapes[0])) if d != dim and len({shape[d] for shape in shapes}) == 1]


@rule("gather")
def _gather(call: Call) -> Resolution | None:
    """Also for ``take_along_dim``, once the shapes are equal."""
    ndim = len(call.shapes[0])
    if not ndim or len(call.shapes[1]) != ndim:
        return None
    dim = int(call.args[1]) % ndim
    found = [Signature((Split(d), Split(d)), (Split(d),), chr(97 + d)) for d in _aligned(call, dim, [0, 1])]
    found.append(Signature((broadcast, Split(dim)), (Split(dim),), "n"))
    if call.operands[0].dtype != torch.bool:
        found.append(Signature((Split(dim), broadcast), (partial_sum,), "r"))
    found += [Signature((entry, broadcast), (entry,)) for entry in (partial_sum, broadcast)]

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> Any:
        if not splits_dim(inputs[0], dim):
            return None
        size, (start, stop) = call.shapes[0][dim], own_rows(inputs[0], dim)

        def look_up(x: torch.Tensor, _: int, index: torch.Tensor, **options: Any) -> torch.Tensor:
            check_bounds(index, 0, size)
            row, valid = shifted(index, start, stop)
            if start == stop:
                x = torch.cat([x, x.new_zeros([1 if d == dim else s for d, s in enumerate(x.shape)])], dim)
            found = torch.gather(x, dim, row, **options)
            return own_term(found, valid)

        return look_up

    return Resolution(found, localize)


@composite("take_along_dim")
def take_along_dim(input: Any, indices: Any, dim: int | None = None) -> Any:
    """A gather after broadcasting all dims but one."""
    if dim is None:
        return torch.gather(input.reshape(-1), 0, indices.reshape(-1))
    if input.dim() != indices.dim():
        raise RuntimeError(
            "torch.take_along_dim(): input and indices should have the same number of dimensions, "
            f"but got {input.dim()} dimensions for input, and {indices.dim()} dimensions for indices"
        )
    [dim] = normalize_dims(dim, input.dim())
    sizes = list(
        torch.broadcast_shapes(*[[1 if d == dim else s for d, s in enumerate(t.shape)] for t in (input, indices)])
    )
    whole, rows = list(sizes), list(sizes)
    if sizes:
        whole[dim], rows[dim] = input.shape[dim], indices.shape[dim]
        indices = indices % whole[dim]  # as torch does: gather refuses what is out of range
    return torch.gather(input.expand(whole), dim, indices.expand(rows))


@composite("take")
def take(input: Any, index: Any) -> Any:
    """The elements of the flattened ``input`` at ``index``."""
    return input.reshape(-1)[index] if index.dim() else input.reshape(-1)[index.reshape(1)].reshape(())


@rule("index_add", "index_reduce", "index_copy", "index_fill")
def _index_write(call: Call) -> Resolution | None:
    """Rows by index. Added rows may come from any rank: each rank adds its own, and the result is the sum over the
    ranks.
    """
    ndim = len(call.shapes[0])
    if not ndim or (len(call.operands) == 3 and len(call.shapes[2]) not in (0, ndim)):
        return None
    dim = int(call.args[1]) % ndim
    has_rows = len(call.operands) == 3 and len(call.shapes[2]) == ndim
    rest = call.operands[2:]

    def signature(entry: Sbp, row_entry: Sbp, letter: str = "", index: Sbp = broadcast) -> Signature:
        rows = (row_entry if has_rows else broadcast,) * len(rest)
        return Signature((entry, index, *rows), (entry,), letter)

    found = [signature(Split(d), Split(d), chr(97 + d)) for d in range(ndim) if d != dim]
    found.append(signature(Split(dim), broadcast, "r"))
    if call.name == "index_add" and has_rows:
        if call.shapes[1]:
            found.append(signature(partial_sum, Split(dim), "n", Split(0)))
        found.append(signature(partial_sum, partial_sum))
    elif call.name == "index_copy" and has_rows:
        found.append(signature(partial_sum, partial_sum))
    found.append(signature(broadcast, broadcast))

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> Any:
        if not splits_dim(inputs[0], dim):
            return None
        return _with_spare_row(call, inputs[0], dim)

    return Resolution(found, localize)


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@composite("bincount")
def bincount(input: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Each rank counts its own values, and the counts are terms. Their number is read: it follows from the values."""
    fits = input.dim() == 1 and input.numel() and (weights is None or weights.shape == input.shape) and minlength >= 0
    lies_whole = all(not isinstance(t, GlobalTensor) or t._spec.layout.is_broadcast for t in (input, weights))
    if lies_whole or not fits or input.dtype not in _INTEGERS:
        return NotImplemented
    smallest, largest = torch.stack(input.aminmax()).tolist()
    if smallest < 0:
        return NotImplemented  # torch's own error
    rows = torch.ones_like(input, dtype=torch.int64) if weights is None else weights.detach()
    if weights is not None and rows.dtype != torch.float32:
        rows = rows.double()
    return input.new_zeros(max(minlength, largest + 1), dtype=rows.dtype).index_add(0, input.long(), rows)


@rule("scatter", "scatter_add", "scatter_reduce")
def _scatter(call: Call) -> Resolution | None:
    """Elements by index; a source may be larger than the index."""
    ndim = len(call.shapes[0])
    if not ndim or any(len(shape) != ndim for shape in call.shapes[1:]):
        return None
    dim = int(call.args[1]) % ndim
    count = len(call.operands)
    reduces = call.name != "scatter" or call.arg(4, "reduce") is not None
    aligned = _aligned(call, dim, range(count))
    found = [Signature((Split(d),) * count, (Split(d),), chr(97 + d)) for d in aligned]
    found.append(Signature((Split(dim), *[broadcast] * (count - 1)), (Split(dim),), "r"))
    if call.name == "scatter_add" and call.shapes[1][dim] == call.shapes[2][dim]:
        found.append(Signature((partial_sum, Split(dim), Split(dim)), (partial_sum,), "n"))
    if call.name == "scatter_add" or (not reduces and count == 3):
        found.append(Signature((partial_sum, broadcast, partial_sum), (partial_sum,)))
    found.append(Signature((broadcast,) * count, (broadcast,)))

    def localize(call: Call, inputs: list[Spec], outputs: list[Spec], letters: tuple[str, ...]) -> Any:
        return _with_spare_row(call, inputs[0], dim) if splits_dim(inputs[0], dim) else None

    return Resolution(found, localize)


def _with_spare_row(call: Call, spec: Spec, dim: int) -> Callable[..., Any]:
    """Run the function on this rank's rows and a spare row, which receives all entries of other ranks."""
    size, (start, stop) = call.shapes[0][dim], own_rows(spec, dim)
    in_place = fold_name(call.func).in_place
    plain = getattr(torch.Tensor, call.name) if in_place else call.func

    def write(x: torch.Tensor, _: int, index: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        if call.name == "index_fill":  # of these functions it alone takes negative numbers
            index = wrapped(index, size)
        check_bounds(index, 0, size)
        row, valid = shifted(index, start, stop)
        spare = x.new_zeros([1 if d == dim else s for d, s in enumerate(x.shape)])
        row = torch.where(valid, row, stop - start)
        result = plain(torch.cat([x, spare], dim), dim, row, *rest, **options).narrow(dim, 0, stop - start)
        return x.copy_(result) if in_place else result

    return write


def _without(shape: Shape, dims: Sequence[int]) -> Shape:
    return tuple(size for d, size in enumerate(shape) if d not in dims)


@rule("diagonal_scatter", "select_scatter", "slice_scatter")
def _scatter_view(call: Call) -> Resolution | None:
    """A copy with one part replaced. The dims of that part's slice stay whole. Linear in both operands. torch looks at
    the part's shape when it writes: a wrong one may fit shards, and falls back.
    """
    shape, source = call.shapes
    ndim = len(shape)
    if call.name == "diagonal_scatter":
        pair = [call.arg(3, "dim1", 0) % ndim, call.arg(4, "dim2", 1) % ndim]
        if source[:-1] != _without(shape, pair):
            return None
        return Resolution(f"+{term(ndim, pair)}, +{term(ndim, dropped=pair)}Z -> {term(ndim, pair)}")
    dim = int(call.arg(2, "dim", 0)) % ndim
    if (source if call.name == "select_scatter" else _without(source, [dim])) != _without(shape, [dim]):
        return None
    part = term(ndim, dropped=[dim]) if call.name == "select_scatter" else term(ndim, [dim])
    return Resolution(f"+{term(ndim, [dim])}, +{part} -> {term(ndim, [dim])}")


@composite("put")
def put(input: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """A copy of ``input`` with ``source`` written at ``index`` of the flattened elements."""
    flat = input.reshape(-1)
    return torch.index_put(flat, (index.reshape(-1),), source.reshape(-1), accumulate).reshape(input.shape)


@handler("masked_scatter")
def masked_scatter(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.masked_scatter(mask, source)``, in place or not."""
    given, mask, source = args
    if mask.dtype != torch.bool or source.dtype != given.dtype:
        raise RuntimeError(
            f"{func.__name__}: input is {given.dtype}, mask {mask.dtype} and source {source.dtype}. The mask is "
            "boolean, and input and source have one dtype: convert one of them."
        )
    in_place = func.__name__.endswith("_")
    if in_place and not isinstance(given, GlobalTensor):
        return NotImplemented
    if in_place:
        mask, source = beside(given, (mask, source), "masked_scatter in place")
    shape = given.shape if in_place else torch.broadcast_shapes(given.shape, mask.shape)
    mask = mask.expand(shape)
    result = call_by_plan(take_where, (given.expand(shape), mask, _count(mask), source.reshape(-1)))
    return given.copy_(result) if in_place else result


def _count(mask: Any) -> Any:
    """How often the mask has been True up to each element: row by row, so that a batch that is split stays so."""
    if mask.dim() < 2:
        return mask.reshape(-1).cumsum(0).reshape(mask.shape)
    within = mask.flatten(1).cumsum(1)
    of_rows = mask.flatten(1).sum(1)
    return (within + (of_rows.cumsum(0) - of_rows).unsqueeze(1)).reshape(mask.shape)


def take_where(x: torch.Tensor, mask: torch.Tensor, counted: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Where ``mask`` is True, the element number ``counted`` of ``source`` (from one), elsewhere ``x``."""
    if can_read(counted) and counted.numel() and (count := int(counted.max())) > source.numel():
        raise RuntimeError(
            f"masked_scatter: source has {source.numel()} elements, and the mask is True for at least {count}. Each "
            "True takes the next element of source: give as many."
        )
    if not source.numel():
        return x.clone()
    return torch.where(mask, source[(counted - 1).clamp(min=0)], x)


USER_FUNCTION_NAMES[take_where] = "workbench.take_where"


@rule("workbench.take_where")
def _take_where(call: Call) -> Resolution:
    ndim = len(call.shapes[0])
    entries: list[Sbp] = [*map(Split, range(ndim)), broadcast]
    return Resolution([Signature((e, e, e, broadcast), (e,), str(e)) for e in entries])
