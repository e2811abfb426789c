"""Local reductions (sum, max, min) of several tensors in a fixed order, accumulated in at least 32 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from zlib import crc32

import torch

from workbench.core.layout import balanced_bounds
from workbench.transport.base import ACCUMULATED_IN_32_BITS

_CACHED_NUMEL = 65536
"""Reductions of more than two terms run in blocks of this many elements, which stay in the core's cache."""
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def reduce_into(terms: Sequence[torch.Tensor], out: torch.Tensor, reduction: str | None) -> None:
    """Reduce ``terms`` from left to right into ``out``; sums of 16-bit floats in 32 bits. A single term is copied."""
    if len(terms) == 1:
        out.copy_(terms[0])
        return
    assert reduction is not None
    function = _FUNCTIONS[reduction]
    widens = _widens(out, reduction)
    if len(terms) == 2 and not widens:
        function(terms[0], terms[1], out=out)
    elif out.device.type == "cpu" and all(tensor.is_contiguous() for tensor in (*terms, out)):
        flat, target = [term.view(-1) for term in terms], out.view(-1)
        for start in range(0, target.numel(), _CACHED_NUMEL):
            block = slice(start, start + _CACHED_NUMEL)
            _reduce([term[block] for term in flat], target[block], function, widens)
    else:
        _reduce(terms, out, function, widens)


def reduce_terms(terms: Sequence[torch.Tensor], reduction: str | None) -> torch.Tensor:
    """Like ``reduce_into``, but into a new tensor."""
    if len(terms) == 1:
        return terms[0].clone(memory_format=torch.contiguous_format)
    assert reduction is not None
    if terms[0].numel() <= _CACHED_NUMEL and not _widens(terms[0], reduction):
        total = _FUNCTIONS[reduction](terms[0], terms[1]).contiguous()
        for term in terms[2:]:
            _FUNCTIONS[reduction](total, term, out=total)
        return total
    out = torch.empty(terms[0].shape, dtype=terms[0].dtype)
    reduce_into(terms, out, reduction)
    return out


def _widens(term: torch.Tensor, reduction: str) -> bool:
    return reduction == "sum" and term.dtype in ACCUMULATED_IN_32_BITS


def _reduce(
    terms: Sequence[torch.Tensor], out: torch.Tensor, function: Callable[..., torch.Tensor], widens: bool
) -> None:
    total = function(terms[0].float(), terms[1]) if widens else function(terms[0], terms[1], out=out)
    for term in terms[2:]:
        function(total, term, out=total)
    if widens:
        out.copy_(total)


def split_pieces(tensors: Sequence[torch.Tensor], piece_numel: int) -> Iterator[list[torch.Tensor]]:
    """The concatenated elements of ``tensors`` in pieces of ``piece_numel`` elements (the last may be shorter).

    >>> [[part.tolist() for part in piece] for piece in split_pieces([torch.arange(3), torch.arange(3, 8)], 4)]
    [[[0, 1, 2], [3]], [[4, 5, 6, 7]]]
    """
    if sum(tensor.numel() for tensor in tensors) <= piece_numel:
        yield list(tensors)
        return
    piece: list[torch.Tensor] = []
    room = piece_numel
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        while flat.numel():
            piece.append(flat[:room])
            room -= piece[-1].numel()
            flat = flat[piece[-1].numel() :]
            if room == 0:
                yield piece
                piece, room = [], piece_numel
    if piece:
        yield piece


def slices_of(group: Sequence[int], numel: int, is_one_shot: bool) -> dict[int, slice]:
    """By rank, the elements of a flat tensor that it reduces: all of them, or a slice for the whole group.

    >>> slices_of([0, 2], 5, is_one_shot=False)
    {0: slice(0, 3, None), 2: slice(3, 5, None)}
    """
    bounds = [(0, numel)] * len(group) if is_one_shot else balanced_bounds(numel, len(group))
    return {rank: slice(*bound) for rank, bound in zip(group, bounds, strict=True)}


def group_tag(tag: int, group: Sequence[int]) -> int:
    """A tag for the messages of a reduction, distinct for groups that use the same number at the same time."""
    return (crc32(repr(tuple(group)).encode()) >> 1) << 31 | tag & 0x3FFFFFFF
