"""Attention of one block of scores, and the sum of blocks: what ring attention computes between its exchanges.

A block gives its result and the log of the sum of exponentials of each row (``lse``). Results of blocks with other keys
add up with the weights exp(lse - total), where exp(total) is the sum of the exp(lse). Backward takes the total, and
gives each block's part of the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench.kernels.attention_dropout import (
    DTYPES,
    MAX_WIDTH,
    attention_dropout,
    attention_dropout_backward,
    backward_of,
    drop,
    kept_of,
    log_sums,
    weights_of,
    with_mask,
)
from workbench.kernels.flash_attention import flash_attention, flash_attention_backward, for_all_heads, of_groups
from workbench.kernels.launch import runs_on

_ROWS_BYTES = 16 << 20
"""Scores that exist at a time where no flash kernel runs."""
_FAR = 64.0
"""A row of addends whose largest one is farther from zero has a peak."""


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """What attention on a block needs to know beside its operands.

    Attributes:
        scale: of the products of queries and keys.
        causal_from: row n sees the keys up to n + ``causal_from``, counted in the block. None: all keys.
        probability: of dropping a weight.
        seed: of the dropped weights.
        first, strides: position of the block's first score in the logical scores, and the strides of these.
        peaks: those of the mask's rows, for all blocks (``peaks_of``). None: there are none.
    """

    scale: float
    causal_from: int | None = None
    probability: float = 0.0
    seed: int = 0
    first: int = 0
    strides: Sequence[int] = (0, 0, 0, 0)
    peaks: torch.Tensor | None = None


def peaks_of(mask: torch.Tensor) -> torch.Tensor:
    """What the scores of a row lose behind its addends: their largest one if it is far from zero; 0 in other rows.

    Softmax does not change by it. It is for rows that see nothing but a large negative number, as in a padded text:
    beside that number, ``lse`` would lose how many keys a block has.

    Args:
        mask: addends of rows for all of their keys, (..., rows, keys).

    Returns:
        (..., rows, 1).
    """
    largest = mask.amax(-1, keepdim=True)
    return largest.masked_fill((largest.abs() <= _FAR) | ~largest.isfinite(), 0.0)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, settings: BlockSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and ``lse`` (behind peaks, without them): minus infinity, with a result of zero, for a row that sees
    no key of the block.

    Args:
        query: (batch, heads, rows, width).
        key: (batch, heads or fewer groups of heads, keys, width).
        value: (batch, as many, keys, its own width).
        mask: broadcasts to (batch, heads, rows, keys); True where a row sees a key, or addends. It gets no gradient.

    Returns:
        (batch, heads, rows, width of the values), and 32 bits (for float64: 64) (batch, heads, rows).
    """
    query, key, value = map(_with_rows, (query, key, value))
    if _has_flash(query, value, settings):
        out, lse = flash_attention(query, key, value, *_of_flash(query, key, mask, settings), settings.scale)
    elif _has_kernel(query, value):
        first, *rest = _of_kernel(query, key, mask, settings)
        out, lse = attention_dropout(query, *_for_all_heads(query, key, value), first, *rest)
    else:
        key, value = _for_all_heads(query, key, value)
        parts = [
            (drop(scores.softmax(-1).to(value.dtype), keep, settings.probability) @ value, log_sums(scores))
            for scores, keep, _ in _by_rows(query, key, mask, settings)
        ]
        out, lse = (torch.cat(some, 2) for some in zip(*parts, strict=True))
    sees = _rows_that_see(query, key, mask, settings)
    if sees is None:
        return out, lse
    return out.masked_fill(~sees.unsqueeze(-1), 0.0), lse.masked_fill(~sees, -math.inf)


def attend_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, settings: BlockSettings,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """This block's part of the gradients of query, key and value.

    Args:
        grad: gradient of ``out``.
        out, lse: of all blocks of these rows together.
    """
    grad, query, key, value = map(_with_rows, (grad, query, key, value))
    lse = lse.masked_fill(lse == -math.inf, 0.0)  # such a row has no score above minus infinity
    found: Any
    if _has_flash(query, value, settings):
        masked = _of_flash(query, key, mask, settings)
        return flash_attention_backward(grad, query, key, value, *masked, out, lse, settings.scale)
    groups = key.shape[1]
    key, value = _for_all_heads(query, key, value)
    if _has_kernel(query, value):
        first, *rest = _of_kernel(query, key, mask, settings)
        found = attention_dropout_backward(grad, query, key, value, first, out, lse, *rest)
    else:
        parts = [
            backward_of(
                of_result, rows, key, value, weights_of(scores, sums, key.dtype), keep, settings.probability,
                settings.scale, result,
            )
            for scores, keep, rows, of_result, result, sums in _by_rows(query, key, mask, settings, grad, out, lse)
        ]  # fmt: skip
        of_query, of_key, of_value = zip(*parts, strict=True)
        found = torch.cat(of_query, 2), sum(of_key), sum(of_value)
    of_query, of_key, of_value = found
    return of_query, of_groups(of_key, groups), of_groups(of_value, groups)


def _for_all_heads(query: torch.Tensor, *held: torch.Tensor) -> list[torch.Tensor]:
    return [for_all_heads(x, query.shape[1]) for x in held]


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """The tensor with consecutive elements in its rows, as flash kernels need it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _has_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    fits = query.dtype in DTYPES and max(query.shape[-1], value.shape[-1]) <= MAX_WIDTH
    return fits and runs_on(query.device)


def _of_kernel(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, settings: BlockSettings
) -> tuple[Any, ...]:
    if mask is not None:
        if settings.peaks is not None:  # before the sum: a kernel rounds such scores less than one device does
            mask = mask.float() - settings.peaks
        mask = mask.expand(*query.shape[:3], key.shape[2])
    return (
        mask, settings.scale, settings.causal_from, settings.probability, settings.seed, settings.first,
        list(settings.strides),
    )  # fmt: skip


def _has_flash(query: torch.Tensor, value: torch.Tensor, settings: BlockSettings) -> bool:
    is_plain = settings.probability == 0.0 and query.shape[-1] == value.shape[-1] and settings.peaks is None
    return is_plain and query.device.type in ("cpu", "meta") and not _has_kernel(query, value)


def _of_flash(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, settings: BlockSettings
) -> tuple[torch.Tensor | None, bool]:
    """The mask as addends, and whether it is torch's own causal mask, which begins at the first key."""
    if mask is None and settings.causal_from in (None, 0):
        return None, settings.causal_from == 0
    seen = _seen(query, key, settings)
    if mask is None:
        return None if seen is None else _addend(seen, query.dtype), False
    mask = _addend(mask, query.dtype)
    return mask if seen is None else mask.masked_fill(~seen, -math.inf), False


def _addend(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _seen(query: torch.Tensor, key: torch.Tensor, settings: BlockSettings) -> torch.Tensor | None:
    """The causal mask of the block, (rows, keys); None if every row sees every key."""
    start, num_keys = settings.causal_from, key.shape[2]
    if start is None or start >= num_keys - 1:
        return None
    return torch.ones(query.shape[2], num_keys, dtype=torch.bool, device=query.device).tril_(start)


def _rows_that_see(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, settings: BlockSettings
) -> torch.Tensor | None:
    """Which rows see a key, (batch, heads, rows); None if all do."""
    if mask is None and (settings.causal_from is None or settings.causal_from >= 0):
        return None
    seen = _seen(query, key, settings)
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else mask != -math.inf
        seen = allowed if seen is None else allowed & seen
    assert seen is not None
    return seen.any(-1).expand(query.shape[:3])


def _by_rows(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, settings: BlockSettings, *others: torch.Tensor
) -> Iterator[tuple[Any, ...]]:
    """For some rows of the query at a time: their scores, which of these dropout keeps, the rows, and those of
    ``others``.
    """
    num_rows, row_bytes = query.shape[2], math.prod(query.shape[:2]) * key.shape[2] * query.element_size()
    count = max(1, _ROWS_BYTES // max(1, row_bytes))
    for start in range(0, num_rows, count):
        rows = slice(start, start + count)
        part, own = query[:, :, rows], None if mask is None else _rows_of(mask, rows)
        if settings.peaks is not None and own is not None:
            own = own.to(torch.promote_types(own.dtype, torch.float32))
        causal_from = None if settings.causal_from is None else settings.causal_from + start
        scores = with_mask(part @ key.transpose(-2, -1) * settings.scale, own, causal_from)
        if settings.peaks is not None:
            scores -= _rows_of(settings.peaks, rows)  # after the sum, which rounds as one device does
        keep = None
        if settings.probability:
            place = settings.seed, settings.first + start * settings.strides[-2], list(settings.strides)
            keep = kept_of(scores.shape, scores.device, settings.probability, *place)
        yield scores, keep, part, *(x[:, :, rows] for x in others)


def _rows_of(mask: torch.Tensor, rows: slice) -> torch.Tensor:
    return mask[..., rows, :] if mask.shape[-2] > 1 else mask
