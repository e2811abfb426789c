"""Assembles this rank's new shard from the slices and terms that arrive for a boxing."""

from __future__ import annotations

from typing import Any

import torch

from workbench.core.boxing import BoxingPlan, Move
from workbench.core.layout import Region
from workbench.core.sbp import Partial
from workbench.kernels import blocks, launch
from workbench.kernels.blocks import slice_region
from workbench.tensors.global_tensor import Spec
from workbench.transport.base import ACCUMULATED_IN_32_BITS

_VIEW_RELATIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def without_view_relations() -> Any:
    """A context in which a part of a buffer is no view to autograd: results of an ``autograd.Function`` that are made
    here can be written in place.
    """
    return torch._C._ExcludeDispatchKeyGuard(_VIEW_RELATIONS)


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
    if launch.runs_on(device):
        return _assemble_at_once(pieces, _new_shard(target, dtype, device), reduction or "none")
    widens = reduction == "sum" and dtype in ACCUMULATED_IN_32_BITS
    out = _new_shard(target, torch.float32 if widens else dtype, device)
    begun = set()
    for move, piece in pieces:
        place = slice_region(out, move.destination_region)
        if move.destination_region not in begun:  # terms of one place have the same region, and the first overwrites it
            place.copy_(piece)
            begun.add(move.destination_region)
        elif reduction == "sum":
            place.add_(piece) if dtype != torch.bool else place.logical_or_(piece)
        else:
            torch.maximum(place, piece, out=place) if reduction == "max" else torch.minimum(place, piece, out=place)
    return out.to(dtype)


def _assemble_at_once(pieces: list[tuple[Move, torch.Tensor]], out: torch.Tensor, reduction: str) -> torch.Tensor:
    """``assemble`` by one kernel for all slices."""
    terms: dict[Region, list[torch.Tensor]] = {}
    for move, piece in pieces:
        terms.setdefault(move.destination_region, []).append(piece)
    targets = [slice_region(out, region) for region in terms]
    sources = [piece for parts in terms.values() for piece in parts]
    blocks.move_blocks(targets, sources, [len(parts) for parts in terms.values()], reduction)
    return out


def packed(sends: list[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
    """The slices to send, packed by one kernel where one runs; else unchanged."""
    slices = [piece for _, piece in sends]
    if not sends or not launch.can_launch(slices[0]) or all(piece.is_contiguous() for piece in slices):
        return sends
    return [(rank, piece) for (rank, _), piece in zip(sends, blocks.pack_views(slices), strict=True)]


def _new_shard(target: Spec, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
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
