"""Plain tensors of which all ranks have a copy, and one is saved: whether the copies are the same, but for rounding."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten_with_path

from workbench.errors import CheckpointError
from workbench.tensors.object_collectives import all_gather_object, run_on_all_ranks
from workbench.tensors.world import World

_NUM_ELEMENTS = 256
_TOLERANCE = 1e-3
"""Relative to the magnitude; at least two units in the last place of the dtype."""


class Sample(NamedTuple):
    """Numbers of a tensor in 64 bits: copies that differ by rounding have nearly the same ones, other parts do not."""

    what: str
    """Place in the entry, shape and dtype."""
    tolerance: float
    total: float
    magnitude: float
    elements: torch.Tensor

    def is_near(self, other: Sample) -> bool:
        """Whether both may be of copies."""
        if self.what != other.what:
            return False
        apart = max(abs(self.total - other.total), abs(self.magnitude - other.magnitude))
        elements_apart, elements = (self.elements - other.elements).abs().sum(), self.elements.abs().sum()
        return apart <= self.tolerance * self.magnitude and bool(elements_apart <= self.tolerance * elements)


def checksum(value: Any) -> int | None:
    """The CRC-32 of the plain tensors of floating point in a leaf: places, shapes, dtypes and bytes. None for none.

    Other contents may differ between ranks: numbers without dims, and whole numbers such as the states of generators.
    """
    so_far, found = 0, _compared(value)
    for what, tensor in found:
        so_far = zlib.crc32(what.encode(), so_far)
        if tensor.numel():
            elements: Any = tensor.cpu().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8).numpy()
            so_far = zlib.crc32(elements, so_far)
    return so_far if found else None


def unlike_entries(
    checksums: Sequence[Mapping[str, int]], value_of: Callable[[str], Any], world: World, what: str
) -> dict[str, int]:
    """The entries whose copies differ by rounding, each with the first rank that has it. All ranks call it.

    Args:
        checksums: by rank, those of the entries that it has. Ranks without an entry agree with all others.
        value_of: an entry of this rank by its name.

    Raises:
        CheckpointError: copies differ by more. All ranks raise it.
    """
    first: dict[str, int] = {}
    unlike: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(checksums):
        for name, number in of_rank.items():
            if checksums[first.setdefault(name, rank)][name] != number:
                unlike.setdefault(name, []).append(rank)
    if not unlike:
        return {}
    own = checksums[world.rank]
    samples = all_gather_object(
        run_on_all_ranks(lambda: {name: samples_of(value_of(name)) for name in unlike if name in own}, world, what),
        world,
        what,
    )
    for name, others in unlike.items():
        one = samples[first[name]][name]
        far = [rank for rank in others if not _are_near(one, samples[rank][name])]
        if far:
            _refuse(name, first[name], far[0], len(unlike) - 1, what)
    return {name: first[name] for name in unlike}


def samples_of(value: Any) -> list[Sample]:
    """Those of the tensors that ``checksum`` reads."""
    return [_sample(what, tensor) for what, tensor in _compared(value)]


def _sample(what: str, tensor: torch.Tensor) -> Sample:
    tolerance = max(_TOLERANCE, 2 * torch.finfo(tensor.dtype).eps)
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    tensor = tensor.cpu().to(torch.promote_types(torch.float32, tensor.dtype) if tensor.itemsize > 1 else torch.float32)
    tensor = tensor.nan_to_num(0.0, 0.0, 0.0).flatten()
    total, magnitude = tensor.sum(dtype=torch.float64), tensor.abs().sum(dtype=torch.float64)
    elements = tensor[:: -(-tensor.numel() // _NUM_ELEMENTS) or 1].double().clone()
    return Sample(what, tolerance, total.item(), magnitude.item(), elements)


def _are_near(samples: Sequence[Sample], others: Sequence[Sample]) -> bool:
    return len(samples) == len(others) and all(map(Sample.is_near, samples, others))


def _refuse(name: str, one: int, other: int, num_more: int, what: str) -> None:
    more = f", and copies of {num_more} other entries are not equal" if num_more else ""
    raise CheckpointError(
        f"{what}: {name} has other plain tensors on rank {one} than on rank {other}, by more than rounding{more}. Of "
        "plain tensors one copy is kept, so after a load all ranks would have that of one rank. Give the objects that "
        f"know which rank holds what: {name.partition('.')[0]}=optimizer in place of optimizer.state_dict(), the "
        "optimizer inside a wrapper, a parallelized module; or global tensors (wb.to_global)."
    )


def _compared(value: Any) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{place} {tuple(leaf.shape)} {leaf.dtype}", leaf.detach())
        for place, leaf in tree_flatten_with_path(value)[0]
        if _is_compared(leaf)
    ]


def _is_compared(leaf: Any) -> bool:
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided or leaf.is_meta:
        return False
    return leaf.dim() > 0 and (leaf.is_floating_point() or leaf.is_complex())
