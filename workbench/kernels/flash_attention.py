"""torch's flash attention for CPUs, faster where it is causal or where heads share keys.

The kernel computes causal scores in blocks as wide as 512 keys, also what they hide: with 1,024 positions half as many
scores again as count. So causal attention is cut: the scores of short pieces near the diagonal are causal; those of
later rows and earlier keys hide nothing and are added, for pieces that are twice as long each time. Where nothing is
hidden, the heads that share keys are rows of one head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_LEAST_ROWS = 128
"""Of a piece. The kernel's products are slower on fewer rows."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """Scores that one call of the kernel computes: those of pieces of the rows, each with a piece of the keys.

    Attributes:
        groups: of heads. Those of a group share keys.
        num_pieces: of all rows, and of all keys.
        by_pairs: of two pieces, the rows of the later one see the keys of the earlier one.
    """

    groups: int
    num_pieces: int = 1
    is_causal: bool = False
    by_pairs: bool = False

    @property
    def rows(self) -> slice:
        """Which of the pieces of the rows."""
        return slice(1, None, 2) if self.by_pairs else slice(None)

    @property
    def keys(self) -> slice:
        """Which of the pieces of the keys."""
        return slice(0, None, 2) if self.by_pairs else slice(None)

    def part(self, x: torch.Tensor, pieces: slice) -> torch.Tensor:
        """A view of (batch, heads, rows, ...): (batch, groups, heads of a group, pieces, rows of a piece, ...)."""
        return x.unflatten(2, (self.num_pieces, -1)).unflatten(1, (self.groups, -1))[:, :, :, pieces]

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """What the kernel takes of a tensor of rows: (batch, groups and pieces, heads of a group and rows, ...)."""
        return self.part(x, self.rows).transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        """What the kernel takes of keys or values."""
        return self.part(for_all_heads(x, self.groups), self.keys).flatten(1, 3)

    def found(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """A result of the kernel for ``heads`` heads, with the dims of ``part``."""
        return x.unflatten(2, (heads // self.groups, -1)).unflatten(1, (self.groups, -1)).transpose(2, 3)


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The result and ``lse``.

    Args:
        query: (batch, heads, rows, width).
        key, value: (batch, heads or fewer groups of heads, keys, width).
        mask: addends that broadcast to (batch, heads, rows, keys); not with ``is_causal``.
        is_causal: row n sees the keys up to n.
    """
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    totals: list[torch.Tensor] = []
    for cut in _cuts(query, key, mask, is_causal):
        operands = cut.of_rows(query), cut.of_keys(key), cut.of_keys(value)
        results = flash(*operands, 0.0, cut.is_causal, attn_mask=mask, scale=scale)
        parts = [cut.found(x, query.shape[1]) for x in results]
        if totals:
            add_block(*(cut.part(x, cut.rows) for x in totals), *parts)
        else:
            totals = [x.flatten(3, 4).flatten(1, 2) for x in parts]
    return totals[0], totals[1]


def flash_attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    is_causal: bool, out: torch.Tensor, lse: torch.Tensor, scale: float,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients of query, key and value.

    Args:
        out, lse: of these rows, for these keys or for more.
    """
    flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    totals: list[torch.Tensor] = []
    for cut in _cuts(query, key, mask, is_causal):
        grads, queries, outs, sums = map(cut.of_rows, (grad, query, out, lse))
        keys, values = map(cut.of_keys, (key, value))
        results = flash(grads, queries, keys, values, outs, sums, 0.0, cut.is_causal, attn_mask=mask, scale=scale)
        parts = [
            cut.found(x, heads) for x, heads in zip(results, (query.shape[1], cut.groups, cut.groups), strict=True)
        ]
        if totals:
            for total, pieces, part in zip(totals, (cut.rows, cut.keys, cut.keys), parts, strict=True):
                cut.part(total, pieces).add_(part)
        else:
            wholes = [x.flatten(3, 4).flatten(1, 2) for x in parts]
            totals = [wholes[0], *(of_groups(x, key.shape[1]) for x in wholes[1:])]
    return totals


def _cuts(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> list[_Cut]:
    """The calls whose results add up. The first one is for all rows and keys."""
    heads, groups = query.shape[1], key.shape[1]
    if not is_causal:
        return [_Cut(groups if mask is None else heads)]
    num_pieces, rows = 1, query.shape[2]
    while rows == key.shape[2] and rows % (2 * num_pieces) == 0 and rows // (2 * num_pieces) >= _LEAST_ROWS:
        num_pieces *= 2
    if query.element_size() < 4:  # sums of the pieces would round
        num_pieces = 1
    cuts = [_Cut(heads, num_pieces, is_causal=True)]
    while num_pieces > 1:
        cuts.append(_Cut(groups, num_pieces, by_pairs=True))
        num_pieces //= 2
    return cuts


def add_block(total: torch.Tensor, total_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Add the result of a block to that of others, in place; the totals begin as zero and minus infinity."""
    both = torch.logaddexp(total_lse, lse)
    finite = both.masked_fill(both == -torch.inf, 0.0)
    total.mul_((total_lse - finite).exp_().unsqueeze(-1))
    total.addcmul_(out.to(total.dtype), (lse - finite).exp_().unsqueeze(-1))
    total_lse.copy_(both)


def for_all_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values of groups of heads, for each of the heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def of_groups(grad: torch.Tensor, groups: int) -> torch.Tensor:
    """The gradients of keys or values that groups of heads share, from those for each of the heads."""
    if grad.shape[1] == groups:
        return grad
    return grad.unflatten(1, (groups, grad.shape[1] // groups)).sum(2)
