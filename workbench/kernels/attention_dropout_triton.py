"""The Triton kernels of ``attention_dropout``: flash attention (Dao et al., arXiv 2205.14135) that drops by position.

Forward, a program has a block of query rows and passes over the keys, with an online softmax. Backward, one kernel does
the same for the gradient of queries, and one passes over the query rows for a block of keys. No kernel writes scores to
memory: each draws the mask again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from workbench.kernels.launch import ceil_div, is_interpreted, launch
from workbench.kernels.philox_triton import bound_of, in_order, is_below, words
from workbench.kernels.triton_types import FLOATS

_IS_INTERPRETED = tl.constexpr(is_interpreted())
_NO_MASK, _CHOICE, _ADDEND = 0, 1, 2


class Matrices(NamedTuple):
    """One matrix for every outer and inner number (of the batch, and of the head), by strides."""

    start: Any
    outer: Any
    inner: Any
    row: Any
    column: Any


@triton.jit
def _at(given: Matrices, outer: tl.tensor, inner: tl.tensor) -> tl.tensor:
    """The address of one matrix."""
    return given.start + outer * given.outer + inner * given.inner


@triton.jit
def _rows(
    start: tl.tensor, row: tl.tensor, stride: tl.tensor, num_rows: tl.tensor, width: tl.constexpr, padded: tl.constexpr
) -> tl.tensor:
    """Rows of a matrix, (rows, padded); zeros outside of it."""
    column = tl.arange(0, padded)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    return tl.load(start + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(
    start: tl.tensor, row: tl.tensor, num_rows: tl.tensor, value: tl.tensor, width: tl.constexpr, padded: tl.constexpr
) -> None:
    """Write rows of a contiguous matrix."""
    column = tl.arange(0, padded)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    tl.store(start + row.to(tl.int64)[:, None] * width + column[None, :], value, mask=inside)


@triton.jit
def _multiply(a: tl.tensor, b: tl.tensor, addend: tl.tensor = None) -> tl.tensor:
    """A matrix product in 32 bits, of 32-bit operands as three products in TF32."""
    if _IS_INTERPRETED:  # Triton's interpreter multiplies the bits of bfloat16 as integers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, addend, input_precision="tf32x3")


@triton.jit
def _seen(
    scores: tl.tensor,
    mask: tl.tensor,
    strides: Matrices,
    row: tl.tensor,
    column: tl.tensor,
    num_rows: tl.tensor,
    num_keys: tl.tensor,
    first_row: tl.tensor,
    is_causal: tl.constexpr,
    mask_kind: tl.constexpr,
) -> tl.tensor:
    """Scores with the masks; ``row`` and ``column`` have a dim of size 1 each, so that scores may be transposed."""
    visible = column < num_keys
    if mask_kind != 0:
        at = row.to(tl.int64) * strides.row + column.to(tl.int64) * strides.column
        given = tl.load(mask + at, mask=visible & (row < num_rows), other=0)
        if mask_kind == 1:
            visible = visible & (given != 0)
        else:
            scores += given.to(tl.float32)
    if is_causal:
        visible = visible & (column <= first_row + row)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _is_kept(
    key: tl.tensor,
    first: tl.tensor,
    row_step: tl.tensor,
    bound: tl.tensor,
    row: tl.tensor,
    first_column: tl.tensor,
    is_aligned: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> tl.tensor:
    """Which scores of a block stay, (rows, columns). ``first``: the position of the first score of the matrix."""
    start = first + row.to(tl.int64) * row_step
    if is_aligned:  # a row begins between two counters
        counter = (start >> 2)[:, None] + (first_column // 4 + tl.arange(0, columns // 4))[None, :]
        a, b, c, d = words(key, counter, 0)
        return is_below(in_order(a, b, c, d, rows, columns), bound)
    position = start[:, None] + (first_column + tl.arange(0, columns))[None, :]
    a, b, c, d = words(key, position >> 2, 0)
    place = position & 3
    return is_below(tl.where(place < 2, tl.where(place == 0, a, b), tl.where(place == 2, c, d)), bound)


_CHANGING = ["key", "first", "outer_step", "inner_step", "row_step", "bound", "first_row"]
"""Arguments that change between calls: Triton must not compile again because one of them is 1 or even."""


@triton.jit(do_not_specialize=_CHANGING)
def _forward(
    query: Matrices, keys: Matrices, value: Matrices, mask: Matrices, out: tl.tensor, lse: tl.tensor,
    num_inner: tl.tensor, num_rows: tl.tensor, num_keys: tl.tensor, scale: tl.tensor, gain: tl.tensor, key: tl.tensor,
    first: tl.tensor, outer_step: tl.tensor, inner_step: tl.tensor, row_step: tl.tensor, bound: tl.tensor,
    first_row: tl.tensor, is_causal: tl.constexpr, mask_kind: tl.constexpr, is_aligned: tl.constexpr,
    narrow: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr, padded: tl.constexpr,
    value_padded: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    """``lse``: the log of the sum of exponentials of each row; 0 where a row sees no key."""
    matrix = (tl.program_id(0) // tl.cdiv(num_rows, rows)).to(tl.int64)
    outer, inner = matrix // num_inner, matrix % num_inner
    row = tl.program_id(0) % tl.cdiv(num_rows, rows) * rows + tl.arange(0, rows)
    keys_at, value_at, mask_at = _at(keys, outer, inner), _at(value, outer, inner), _at(mask, outer, inner)
    first += outer * outer_step + inner * inner_step
    q = _rows(_at(query, outer, inner), row, query.row, num_rows, width, padded)
    largest = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    result = tl.zeros((rows, value_padded), tl.float32)
    stop = tl.minimum(num_keys, first_row + tl.max(row, 0) + 1) if is_causal else num_keys
    for start in range(0, stop, columns):
        column = start + tl.arange(0, columns)
        k = _rows(keys_at, column, keys.row, num_keys, width, padded)
        scores = _multiply(q, tl.trans(k)) * scale
        scores = _seen(
            scores, mask_at, mask, row[:, None], column[None, :], num_rows, num_keys, first_row, is_causal, mask_kind
        )
        larger = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # no key is visible so far
        weights = tl.exp(scores - shift[:, None])
        shrunk = tl.exp(largest - shift)
        total = total * shrunk + tl.sum(weights, 1)
        kept = _is_kept(key, first, row_step, bound, row, start, is_aligned, rows, columns)
        weights = tl.where(kept, weights, 0.0).to(narrow)
        v = _rows(value_at, column, value.row, num_keys, value_width, value_padded)
        result = _multiply(weights, v, result * shrunk[:, None])
        largest = larger
    sees_any = largest != float("-inf")
    result *= (gain / tl.where(sees_any, total, 1.0))[:, None]
    _store_rows(out + matrix * num_rows * value_width, row, num_rows, result.to(narrow), value_width, value_padded)
    log_total = tl.where(sees_any, largest + tl.log(tl.where(sees_any, total, 1.0)), 0.0)
    tl.store(lse + matrix * num_rows + row, log_total, mask=row < num_rows)


@triton.jit(do_not_specialize=_CHANGING)
def _backward_queries(
    query: Matrices, keys: Matrices, value: Matrices, mask: Matrices, grad: Matrices,
    out: tl.tensor, lse: tl.tensor, delta: tl.tensor, grad_query: tl.tensor,
    num_inner: tl.tensor, num_rows: tl.tensor, num_keys: tl.tensor, scale: tl.tensor, gain: tl.tensor, key: tl.tensor,
    first: tl.tensor, outer_step: tl.tensor, inner_step: tl.tensor, row_step: tl.tensor, bound: tl.tensor,
    first_row: tl.tensor, is_causal: tl.constexpr, mask_kind: tl.constexpr, is_aligned: tl.constexpr,
    narrow: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr, padded: tl.constexpr,
    value_padded: tl.constexpr, rows: tl.constexpr, columns: tl.constexpr,
) -> None:  # fmt: skip
    """Also writes ``delta``, the product of each row's result and gradient, for ``_backward_keys``."""
    matrix = (tl.program_id(0) // tl.cdiv(num_rows, rows)).to(tl.int64)
    outer, inner = matrix // num_inner, matrix % num_inner
    row = tl.program_id(0) % tl.cdiv(num_rows, rows) * rows + tl.arange(0, rows)
    keys_at, value_at, mask_at = _at(keys, outer, inner), _at(value, outer, inner), _at(mask, outer, inner)
    first += outer * outer_step + inner * inner_step
    q = _rows(_at(query, outer, inner), row, query.row, num_rows, width, padded)
    g = _rows(_at(grad, outer, inner), row, grad.row, num_rows, value_width, value_padded)
    o = _rows(out + matrix * num_rows * value_width, row, value_width, num_rows, value_width, value_padded)
    product = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta + matrix * num_rows + row, product, mask=row < num_rows)
    log_total = tl.load(lse + matrix * num_rows + row, mask=row < num_rows, other=0.0)
    result = tl.zeros((rows, padded), tl.float32)
    stop = tl.minimum(num_keys, first_row + tl.max(row, 0) + 1) if is_causal else num_keys
    for start in range(0, stop, columns):
        column = start + tl.arange(0, columns)
        k = _rows(keys_at, column, keys.row, num_keys, width, padded)
        scores = _multiply(q, tl.trans(k)) * scale
        scores = _seen(
            scores, mask_at, mask, row[:, None], column[None, :], num_rows, num_keys, first_row, is_causal, mask_kind
        )
        weights = tl.exp(scores - log_total[:, None])
        v = _rows(value_at, column, value.row, num_keys, value_width, value_padded)
        of_weights = _multiply(g, tl.trans(v)) * gain
        kept = _is_kept(key, first, row_step, bound, row, start, is_aligned, rows, columns)
        of_scores = weights * (tl.where(kept, of_weights, 0.0) - product[:, None])
        result = _multiply(of_scores.to(narrow), k, result)
    _store_rows(grad_query + matrix * num_rows * width, row, num_rows, (result * scale).to(narrow), width, padded)


@triton.jit(do_not_specialize=_CHANGING)
def _backward_keys(
    query: Matrices, keys: Matrices, value: Matrices, mask: Matrices, grad: Matrices,
    lse: tl.tensor, delta: tl.tensor, grad_keys: tl.tensor, grad_value: tl.tensor,
    num_inner: tl.tensor, num_rows: tl.tensor, num_keys: tl.tensor, scale: tl.tensor, gain: tl.tensor, key: tl.tensor,
    first: tl.tensor, outer_step: tl.tensor, inner_step: tl.tensor, row_step: tl.tensor, bound: tl.tensor,
    first_row: tl.tensor, is_causal: tl.constexpr, mask_kind: tl.constexpr, is_aligned: tl.constexpr,
    narrow: tl.constexpr, width: tl.constexpr, value_width: tl.constexpr, padded: tl.constexpr,
    value_padded: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr,
) -> None:  # fmt: skip
    """Scores are transposed here, (columns, rows), as the products over rows need them."""
    matrix = (tl.program_id(0) // tl.cdiv(num_keys, columns)).to(tl.int64)
    outer, inner = matrix // num_inner, matrix % num_inner
    first_column = tl.program_id(0) % tl.cdiv(num_keys, columns) * columns
    column = first_column + tl.arange(0, columns)
    query_at, grad_at, mask_at = _at(query, outer, inner), _at(grad, outer, inner), _at(mask, outer, inner)
    first += outer * outer_step + inner * inner_step
    k = _rows(_at(keys, outer, inner), column, keys.row, num_keys, width, padded)
    v = _rows(_at(value, outer, inner), column, value.row, num_keys, value_width, value_padded)
    of_keys = tl.zeros((columns, padded), tl.float32)
    of_value = tl.zeros((columns, value_padded), tl.float32)
    begin = tl.maximum(0, first_column - first_row) // rows * rows if is_causal else 0
    for start in range(begin, num_rows, rows):
        row = start + tl.arange(0, rows)
        q = _rows(query_at, row, query.row, num_rows, width, padded)
        scores = _multiply(k, tl.trans(q)) * scale
        scores = _seen(
            scores, mask_at, mask, row[None, :], column[:, None], num_rows, num_keys, first_row, is_causal, mask_kind
        )
        log_total = tl.load(lse + matrix * num_rows + row, mask=row < num_rows, other=0.0)
        weights = tl.exp(scores - log_total[None, :])
        g = _rows(grad_at, row, grad.row, num_rows, value_width, value_padded)
        kept = tl.trans(_is_kept(key, first, row_step, bound, row, first_column, is_aligned, rows, columns))
        of_value = _multiply(tl.where(kept, weights, 0.0).to(narrow), g, of_value)
        of_weights = _multiply(v, tl.trans(g)) * gain
        product = tl.load(delta + matrix * num_rows + row, mask=row < num_rows, other=0.0)
        of_scores = weights * (tl.where(kept, of_weights, 0.0) - product[None, :])
        of_keys = _multiply(of_scores.to(narrow), q, of_keys)
    of_keys, of_value = (of_keys * scale).to(narrow), (of_value * gain).to(narrow)
    _store_rows(grad_keys + matrix * num_keys * width, column, num_keys, of_keys, width, padded)
    _store_rows(grad_value + matrix * num_keys * value_width, column, num_keys, of_value, value_width, value_padded)


_BLOCKS = {
    _forward: {(2, 64): (64, 64, 4, 3), (2, 128): (64, 64, 4, 2), (4, 64): (32, 32, 4, 2), (4, 128): (64, 32, 4, 1)},
    _backward_queries: {
        (2, 64): (64, 64, 4, 3), (2, 128): (64, 32, 4, 3), (4, 64): (32, 32, 4, 2), (4, 128): (32, 32, 4, 1)
    },
    _backward_keys: {
        (2, 64): (64, 64, 4, 3), (2, 128): (64, 32, 4, 3), (4, 64): (32, 16, 4, 2), (4, 128): (32, 32, 4, 1)
    },
}  # fmt: skip
"""By bytes of an element and width of a head: rows (or keys) of a program, keys (or rows) of a pass, warps, stages. No
register is spilled in usual cases, and a program takes the shared memory that all GPUs from sm_80 on have.
"""


def forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``attention_dropout``."""
    width = value.shape[-1]
    query, key, value = map(_widened, (query, key, value))
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    matrices, arguments = _describe(query, key, value, *rest)
    _launch(_forward, query, value, *matrices, out, lse, *arguments)
    return _narrowed(out, width), lse


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *settings: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``attention_dropout_backward``."""
    widths = query.shape[-1], key.shape[-1], value.shape[-1]
    query, key, value, grad, out = map(_widened, (query, key, value, grad, out))
    out, lse = out.contiguous(), lse.contiguous()  # a ring gives some of the rows that it holds
    of_query, of_key, of_value = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    delta = torch.empty_like(lse)
    matrices, arguments = _describe(query, key, value, mask, *settings)
    matrices += (_matrices_of(grad),)
    _launch(_backward_queries, query, value, *matrices, out, lse, delta, of_query, *arguments)
    _launch(_backward_keys, key, value, *matrices, lse, delta, of_key, of_value, *arguments)
    of_query, of_key, of_value = map(_narrowed, (of_query, of_key, of_value), widths)
    return of_query, of_key, of_value


_WIDTHS = (16, 64, 128)
"""Of heads in 16 bits. On an H100, Triton 3.6 gave right numbers for these, and wrong ones for heads of 24, which
cannot be loaded 16 bytes at a time.
"""


def _widened(x: torch.Tensor) -> torch.Tensor:
    """With zeros up to the next of ``_WIDTHS``, if its numbers have 16 bits."""
    width = x.shape[-1]
    wide = width if x.element_size() != 2 else min(w for w in _WIDTHS if w >= width)
    return x if wide == width else torch.nn.functional.pad(x, (0, wide - width))


def _narrowed(x: torch.Tensor, width: int) -> torch.Tensor:
    return x if x.shape[-1] == width else x[..., :width].contiguous()


def _launch(kernel: Any, blocks_of: torch.Tensor, value: torch.Tensor, *args: Any) -> None:
    """A program for each block of rows of ``blocks_of``."""
    outer, inner, num_rows, width = blocks_of.shape
    own, passed, num_warps, num_stages = _BLOCKS[kernel][
        value.element_size(), 64 if max(width, value.shape[-1]) <= 64 else 128
    ]
    grid = (outer * inner * ceil_div(num_rows, own),)
    launch(kernel, grid, value, *args, own, passed, num_warps=num_warps, num_stages=num_stages)


def _matrices_of(x: torch.Tensor) -> Matrices:
    x = x if x.stride(-1) == 1 else x.contiguous()
    return Matrices(x, *x.stride())


def _describe(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal_from: int | None,
    probability: float,
    seed: int,
    first: int,
    strides: Sequence[int],
) -> tuple[tuple[Matrices, ...], tuple[Any, ...]]:
    """The first and the last arguments of all kernels, but for the sizes of blocks."""
    of_mask = Matrices(query, 0, 0, 0, 0) if mask is None else Matrices(mask, *mask.stride())
    mask_kind = _NO_MASK if mask is None else _CHOICE if mask.dtype == torch.bool else _ADDEND
    gain = 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)
    widths = query.shape[-1], value.shape[-1]
    padded = [max(16, triton.next_power_of_2(width)) for width in widths]
    is_aligned = not any(step % 4 for step in (first, *strides[:3]))
    arguments = (
        query.shape[1], query.shape[2], key.shape[2], scale, gain, seed, first, *strides[:3],
        bound_of(1.0 - probability), causal_from or 0, causal_from is not None, mask_kind, is_aligned,
        FLOATS[query.dtype], *widths, *padded,
    )  # fmt: skip
    return (*map(_matrices_of, (query, key, value)), of_mask), arguments
