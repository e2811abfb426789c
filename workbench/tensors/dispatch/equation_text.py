"""Equation texts for calls whose dims come as arguments: softmax over ``dim``, a sum over ``dims``."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def normalize_dims(dims: int | Sequence[int] | None, ndim: int) -> list[int]:
    """Dims counted from the front; None and an empty list mean all."""
    if dims is None:
        return list(range(ndim))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return [dim % max(1, ndim) for dim in listed] or list(range(ndim))


def term(ndim: int, whole: Collection[int] = (), ones: Collection[int] = (), dropped: Collection[int] = ()) -> str:
    """``term(3, whole=[1])`` is ``"aBc"``; ``ones`` become dims of size one, ``dropped`` ones are left out."""
    names = []
    for dim in range(ndim):
        if dim in dropped:
            continue
        letter = _LETTERS[dim]
        names.append("1" if dim in ones else letter.upper() if dim in whole else letter)
    return "".join(names)


def elementwise_except(ndim: int, whole: Collection[int], addend: bool = False) -> str:
    """An equation for a function that keeps the shape and works along ``whole`` dims, like softmax or cumsum."""
    return f"{'+' * addend}{term(ndim, whole)} -> {term(ndim, whole)}"


def reduction(ndim: int, dims: Collection[int], keepdim: bool, whole: bool, addend: bool = False) -> str:
    """An equation that removes ``dims``: summed over (``whole=False``), or reduced by a function that
    needs all of them.
    """
    left = term(ndim, dims if whole else ())
    right = term(ndim, ones=dims) if keepdim else term(ndim, dropped=dims)
    return f"{'+' * addend}{left} -> {right}"


def along(ndim: int, dim: int, letter: str) -> str:
    """A term for broadcasting operands with one named dim: ``along(3, 1, "X")`` is ``"...Xa"``."""
    return f"...{letter}{_LETTERS[: ndim - 1 - dim % max(1, ndim)]}"
