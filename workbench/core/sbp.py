"""Split, broadcast, partial sum: the layout of a tensor on one axis of a placement.

    S(d)   the ranks hold consecutive slices of dim d (balanced: the first ``n % p`` slices have one row more)
    B      every rank holds the whole tensor
    P      every rank holds one term; the tensor is their sum (also ``P(max)``, ``P(min)``)

The notion and the names are OneFlow's (Yuan et al., arXiv 2110.15032).

>>> from workbench.core import sbp
>>> sbp.parse("S(0), B")
(S(0), B)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from workbench.errors import SbpError


@dataclass(frozen=True, slots=True)
class Split:
    """Consecutive slices of tensor dim ``dim``; a negative ``dim`` counts from the end, as in torch.

    >>> Split(0)
    S(0)
    """

    dim: int

    def __repr__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The whole tensor on every rank. Callable, so that ``sbp.broadcast()`` reads like ``sbp.split(0)``.

    >>> broadcast
    B
    """

    def __call__(self) -> Broadcast:
        return self

    def __repr__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """One term per rank of a ``reduction``: ``"sum"``, ``"max"`` or ``"min"``. Callable like ``broadcast``.

    >>> partial_sum, partial_max
    (P, P(max))
    """

    reduction: str = "sum"

    def __call__(self) -> Partial:
        return self

    def __repr__(self) -> str:
        return "P" if self.reduction == "sum" else f"P({self.reduction})"


Sbp = Split | Broadcast | Partial
NdSbp = tuple[Sbp, ...]
"""One entry per axis of a placement, outermost axis first."""
SbpLike: TypeAlias = Sbp | str | Sequence[Sbp | str]
"""An entry, a text, or a list of these: ``split(0)``, ``"S(0), B"``, ``["S(0)", broadcast]``."""

broadcast = Broadcast()
partial_sum = Partial("sum")
partial_max = Partial("max")
partial_min = Partial("min")

_ENTRY = re.compile(r"S\((-?\d+)\)|B|P(?:\((sum|max|min)\))?")
_ENTRIES = re.compile(rf"\(?\s*(?:{_ENTRY.pattern})(?:\s*,\s*(?:{_ENTRY.pattern}))*\s*,?\s*\)?")


def split(dim: int) -> Split:
    """Split along tensor dim ``dim``: ``split(0)`` is ``S(0)``. Raises ``SbpError`` if ``dim`` is not an int.

    >>> split(1)
    S(1)
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise SbpError(f"split(dim={dim!r}): dim is a {type(dim).__name__}, not an int. Write e.g. split(0).")
    return Split(dim)


def parse(text: str) -> NdSbp:
    """Parse a text such as ``"S(0), B"``. The ``str`` of an nd-sbp parses to the same value.

    Raises:
        SbpError: the text is not entries with commas between them.

    >>> parse("S(0), P(max)")
    (S(0), P(max))
    """
    if not _ENTRIES.fullmatch(text.strip()):
        raise SbpError(
            f"sbp {text!r}: an axis has one of S(dim), B, P, P(max), P(min), with a comma between two axes. Write e.g. "
            '"S(0)", or "S(0), B" for two axes.'
        )
    return tuple(map(_entry, _ENTRY.finditer(text)))


def _entry(match: re.Match[str]) -> Sbp:
    if match[0] == "B":
        return broadcast
    return Split(int(match[1])) if match[1] is not None else Partial(match[2] or "sum")


def as_nd_sbp(value: SbpLike) -> NdSbp:
    """One entry per axis, from an entry, a text, or a list of these.

    >>> as_nd_sbp(split(0)), as_nd_sbp("S(0), B"), as_nd_sbp([broadcast])
    ((S(0),), (S(0), B), (B,))
    """
    if isinstance(value, (Split, Broadcast, Partial)):
        return (value,)
    if isinstance(value, str):
        return parse(value)
    if not isinstance(value, Sequence):
        raise SbpError(
            f"sbp={value!r}: {type(value).__name__} is no layout. Give sbp.split(dim), sbp.broadcast, sbp.partial_sum."
        )
    entries: list[Sbp] = []
    for item in value:
        if callable(item) and not isinstance(item, (Broadcast, Partial)):
            raise SbpError(f"sbp entry {item!r} is a function. Did you mean sbp.split(0)?")
        entries.extend(as_nd_sbp(item))
    return tuple(entries)


def dual(entry: Sbp) -> Sbp:
    """The layout of a gradient: ``dual(S(d)) = S(d)``, ``dual(B) = P``, ``dual(P) = B``.

    Local autograd computes the gradient of the sum over ranks of the local results. Every copy of a broadcast tensor
    therefore gets one term of its gradient, and every term of a partial sum gets the whole gradient.

    >>> dual(split(0)), dual(broadcast), dual(partial_sum)
    (S(0), P, B)

    Raises:
        SbpError: ``P(max)`` and ``P(min)`` are not linear and have no gradient.
    """
    if isinstance(entry, Split):
        return entry
    if isinstance(entry, Broadcast):
        return partial_sum
    if entry.reduction == "sum":
        return broadcast
    raise SbpError(f"{entry} has no gradient: only partial sums are linear. Box it to B before the loss.")
