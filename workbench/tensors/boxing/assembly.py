"""Assembles this rank's new shard from the slices and terms that arrive for a boxing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from workbench.core.boxing import BoxingPlan, Move
from workbench.core.layout import Region
from workbench.core.sbp import Partial
from workbench.kernels import blocks, launch
from workbench.kernels.blocks import slice_region
from workbench.tensors.global_tensor import Spec
from workbench.transport.reduction import reduce_into

_VIEW_RELATIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def without_view_relations() -> Any:
    """A context in which a part of a buffer is no view to autograd: results of an ``autograd.Function`` that are made
    here can be written in place.
    """
    return torch._C._ExcludeDispatchKeyGuard(_VIEW_RELATIONS)


Pieces = list[tuple[Move, torch.Tensor]]


def assemble(plan: BoxingPlan, pieces: Pieces, target: Spec, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The new shard, in new memory; terms of a sum are added in the order of the placement, in at least 32 bits."""
    whole = tuple((0, size) for size in target.local_shape)
    if len(pieces) == 1 and pieces[0][0].destination_region == whole:
        return pieces[0][1].clone(memory_format=torch.contiguous_format)
    out = new_shard(target, dtype, device)
    assemble_many([(out, pieces)], plan.reduction, device)
    return out


def assemble_many(shards: Iterable[tuple[torch.Tensor, Pieces]], reduction: str | None, device: torch.device) -> None:
    """Put slices, or the sums of terms, into their places in new shards of one dtype."""
    places: list[torch.Tensor] = []
    terms: list[list[torch.Tensor]] = []
    for out, pieces in shards:
        of_region: dict[Region, list[torch.Tensor]] = {}
        for move, piece in pieces:
            of_region.setdefault(move.destination_region, []).append(piece)
        places += [slice_region(out, region) for region in of_region]
        terms += of_region.values()
    combine(places, terms, reduction, device)


def combine(
    places: list[torch.Tensor], terms: list[list[torch.Tensor]], reduction: str | None, device: torch.device
) -> None:
    """Fill each place with its one term, or with the reduction of its terms in their order."""
    flat = [term for of_place in terms for term in of_place]
    if launch.runs_on(device):
        blocks.move_blocks(places, flat, list(map(len, terms)), reduction or "none")
    elif reduction is None and places:
        torch._foreach_copy_(places, flat)
    else:
        for place, of_place in zip(places, terms, strict=True):
            reduce_into(of_place, place, reduction)


def packed(sends: list[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
    """The slices to send, packed by one kernel where one runs; else unchanged."""
    slices = [piece for _, piece in sends]
    if not sends or not launch.can_launch(slices[0]) or all(piece.is_contiguous() for piece in slices):
        return sends
    return [(rank, piece) for (rank, _), piece in zip(sends, blocks.pack(slices), strict=True)]


def new_shard(target: Spec, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that the slices fill; where other ranks' terms do, it holds what changes nothing under the reduction."""
    reduction = next((entry.reduction for entry in target.layout.sbp if isinstance(entry, Partial)), None)
    if reduction is None:
        return torch.empty(target.local_shape, dtype=dtype, device=device)
    if reduction == "sum":
        return torch.zeros(target.local_shape, dtype=dtype, device=device)
    return torch.full(target.local_shape, _extreme(dtype, reduction == "min"), dtype=dtype, device=device)


def _extreme(dtype: torch.dtype, highest: bool) -> float | int | bool:
    """The highest or lowest value of a dtype."""
    if dtype == torch.bool:
        return highest
    if dtype.is_floating_point:
        return torch.inf if highest else -torch.inf
    return torch.iinfo(dtype).max if highest else torch.iinfo(dtype).min


def region_shape(region: Region) -> tuple[int, ...]:
    """Sizes of a region."""
    return tuple(stop - start for start, stop in region)
