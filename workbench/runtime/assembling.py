"""What arrives for a boxing becomes this rank's new shard: slices are put side by side, terms are combined."""

from __future__ import annotations

import torch

from workbench.core.boxing import BoxingPlan, Move
from workbench.core.layout import Region
from workbench.core.sbp import Partial
from workbench.runtime.tensor import Spec
from workbench.runtime.transport.base import ACCUMULATED_IN_32_BITS


def assemble(
    plan: BoxingPlan, pieces: list[tuple[Move, torch.Tensor]], target: Spec, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Put the slices into new memory, the new shard; terms of a sum are added in the order of the placement, in at
    least 32 bits.
    """
    whole = tuple((0, size) for size in target.local_shape)
    if len(pieces) == 1 and pieces[0][0].destination_region == whole:
        return pieces[0][1].clone(memory_format=torch.contiguous_format)
    reduction = plan.reduction
    sums_low_precision = reduction == "sum" and dtype in ACCUMULATED_IN_32_BITS
    if reduction is None and not target.layout.has_partial:  # the slices fill the shard
        out = torch.empty(target.local_shape, dtype=dtype, device=device)
    else:
        out = identity(target, torch.float32 if sums_low_precision else dtype, device, reduction)
    for move, piece in pieces:
        place = slice_region(out, move.destination_region)
        if reduction is None:
            place.copy_(piece)
        elif reduction == "sum":
            place.add_(piece) if dtype != torch.bool else place.logical_or_(piece)
        else:
            torch.maximum(place, piece, out=place) if reduction == "max" else torch.minimum(place, piece, out=place)
    return out.to(dtype)


def identity(target: Spec, dtype: torch.dtype, device: torch.device, source_reduction: str | None) -> torch.Tensor:
    """An empty shard, or one filled with what changes nothing under the reduction."""
    reductions: list[str | None] = [entry.reduction for entry in target.layout.sbp if isinstance(entry, Partial)] or [
        source_reduction
    ]
    if reductions[0] in (None, "sum"):
        return torch.zeros(target.local_shape, dtype=dtype, device=device)
    bounds = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    lowest = -torch.inf if dtype.is_floating_point else bounds.min
    highest = torch.inf if dtype.is_floating_point else bounds.max
    return torch.full(target.local_shape, lowest if reductions[0] == "max" else highest, dtype=dtype, device=device)


def region_shape(region: Region) -> tuple[int, ...]:
    """Sizes of a region."""
    return tuple(stop - start for start, stop in region)


def slice_region(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The part of ``tensor`` that lies in ``region``, as a view."""
    for dim, (start, stop) in enumerate(region):
        if stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor
