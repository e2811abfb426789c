"""Shards of a tensor for one axis, and the test whether results lie as a layout says. Shares no code with boxing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.core.sbp import Broadcast, Partial, Sbp, Split

_TOLERANCES = {torch.float64: (1e-9, 1e-9), torch.complex128: (1e-9, 1e-9), torch.bfloat16: (2e-2, 2e-2),
               torch.float16: (5e-3, 5e-3)}  # fmt: skip
_DEFAULT_TOLERANCE = (1e-4, 1e-5)


def cut(
    whole: torch.Tensor, entry: Sbp, num_ranks: int, generator: torch.Generator, one_holder: bool = False
) -> list[torch.Tensor]:
    """What each rank holds of ``whole``; each shard owns its storage.

    Terms of a sum are 0.6 and 0.4 of the whole plus noise that cancels, or, with ``one_holder``, the whole on the last
    rank and zeros elsewhere. Terms of a maximum hold the true value on one rank and less on the others.
    """
    if isinstance(entry, Split):
        return [part.clone() for part in torch.tensor_split(whole, num_ranks, entry.dim)]
    if isinstance(entry, Broadcast):
        return [whole.clone() for _ in range(num_ranks)]
    if entry.reduction != "sum":
        return _cut_extremum(whole, -1 if entry.reduction == "max" else 1, num_ranks, generator)
    if one_holder:
        return [*(torch.zeros_like(whole) for _ in range(num_ranks - 1)), whole.clone()]
    return _cut_sum(whole, num_ranks, generator)


def _cut_sum(whole: torch.Tensor, num_ranks: int, generator: torch.Generator) -> list[torch.Tensor]:
    if whole.is_floating_point() or whole.is_complex():
        terms = [
            (whole * (0.4 / (num_ranks - 1)) + torch.randn(whole.shape, generator=generator).to(whole.dtype)).where(
                whole.isfinite(), 0
            )  # one rank holds all infinite values and nans
            for _ in range(num_ranks - 1)
        ]
    else:
        terms = [torch.randint(0, 5, whole.shape, generator=generator).to(whole.dtype) for _ in range(num_ranks - 1)]
    if whole.dtype == torch.bool:
        return [whole & (term == 0) for term in (*terms, torch.zeros_like(whole))]
    first = whole.clone()
    for term in terms:
        first -= term
    return [first, *terms]


def _cut_extremum(whole: torch.Tensor, sign: int, num_ranks: int, generator: torch.Generator) -> list[torch.Tensor]:
    holder = torch.randint(0, num_ranks, whole.shape, generator=generator)
    worse = whole + sign * (1 + torch.randint(0, 3, whole.shape, generator=generator)).to(whole.dtype)
    return [torch.where(holder == rank, whole, worse) for rank in range(num_ranks)]


def mismatch(
    shards: list[torch.Tensor], entry: Sbp, whole: torch.Tensor, operands: Sequence[torch.Tensor] = ()
) -> str | None:
    """Why ``shards`` are not ``whole`` laid out as ``entry``, with both numbers; None if they are.

    ``operands``: what the numbers were computed from; they are as exact as the least exact of these.
    """
    if any(shard.dtype != whole.dtype for shard in shards):
        return f"the ranks return {shards[0].dtype}, one device {whole.dtype}"
    if isinstance(entry, Split) and not 0 <= entry.dim < whole.dim():
        return f"the result has {whole.dim()} dims, so it cannot be {entry}"
    expected = list(torch.tensor_split(whole, len(shards), entry.dim)) if isinstance(entry, Split) else [whole]
    have_one_shape = len({shard.shape for shard in shards}) == 1
    found = [_combine(shards, entry)] if isinstance(entry, Partial) and have_one_shape else shards
    for rank, value in enumerate(found):
        wanted = expected[rank] if isinstance(entry, Split) else whole
        where = "the terms together" if isinstance(entry, Partial) else f"rank {rank}"
        if value.shape != wanted.shape:
            verb = "have" if isinstance(entry, Partial) else "has"
            return (
                f"{where} {verb} shape {tuple(value.shape)}, {entry} of {tuple(whole.shape)} is {tuple(wanted.shape)}"
            )
        difference = _first_difference(value, wanted, [whole, *operands])
        if difference is not None:
            verb = "give" if isinstance(entry, Partial) else "gives"
            return f"{where} {verb} {difference[1]} at {difference[0]}, one device {difference[2]}"
    return None


def _combine(shards: list[torch.Tensor], entry: Partial) -> torch.Tensor:
    if entry.reduction == "sum" and shards[0].dtype == torch.bool:
        return torch.stack(shards).any(0)
    if entry.reduction == "sum":
        return torch.stack(shards).sum(0).to(shards[0].dtype)
    return torch.stack(shards).amax(0) if entry.reduction == "max" else torch.stack(shards).amin(0)


def _first_difference(
    value: torch.Tensor, wanted: torch.Tensor, sources: Sequence[torch.Tensor]
) -> tuple[list[int], object, object] | None:
    inexact = [source.dtype for source in sources if source.is_floating_point() or source.is_complex()]
    rtol, atol = max((_TOLERANCES.get(dtype, _DEFAULT_TOLERANCE) for dtype in inexact), default=_DEFAULT_TOLERANCE)
    if wanted.is_floating_point() or wanted.is_complex():
        close = torch.isclose(value, wanted, rtol=rtol, atol=atol, equal_nan=True)
    else:
        close = value == wanted
    if close.all():
        return None
    place = (~close).nonzero()[0].tolist()
    return place, _number(value, place), _number(wanted, place)


def _number(tensor: torch.Tensor, place: list[int]) -> object:
    value = tensor[tuple(place)].item()
    return float(f"{value:.6g}") if isinstance(value, float) else value
