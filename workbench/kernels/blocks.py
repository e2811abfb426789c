"""Copies and reductions of blocks: each target gets one source, or the sum (max, min) of several, of any strides.

This covers all copies of boxing on a device: slices of the peers' shards are copied or reduced straight into place;
``pack`` and ``unpack`` copy the slices of a shard into one buffer for an exchange, and back. Targets and sources are
views, so uneven sizes, any dim and transposed tensors differ only in their strides.

The reference is torch. On a GPU one Triton kernel moves all blocks in one launch (``blocks_triton``). Terms are added
in the order of the sources, low precision in 32 bits, and rounded once: all ranks that sum the same terms get the same
bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.kernels.launch import accumulator, can_launch, identity_element
from workbench.kernels.operators import writes_first


@writes_first
def move_blocks(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], counts: Sequence[int], reduction: str
) -> None:
    """Fill every target from its sources.

    Args:
        targets: views that do not overlap, of one dtype on one device.
        sources: the sources of the first target, then those of the second, and so on; each of its target's shape.
        counts: number of sources of each target. A target without a source is filled with the identity element of the
            reduction: zero, or the lowest or highest number.
        reduction: "none" (each target has one source), "sum", "max" or "min".

    Two terms of a sum:

    >>> out = torch.empty(2)
    >>> move_blocks([out], [torch.ones(2), torch.full((2,), 4.0)], [2], "sum")
    >>> out
    tensor([5., 5.])
    """
    if targets and can_launch(targets[0]):
        from workbench.kernels.blocks_triton import launch

        if launch(targets, sources, counts, reduction):
            return
    move_blocks_reference(targets, sources, counts, reduction)


def move_blocks_reference(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], counts: Sequence[int], reduction: str
) -> None:
    """``move_blocks`` in torch, block by block."""
    start = 0
    for target, count in zip(targets, counts, strict=True):
        terms = sources[start : start + count]
        start += count
        if count == 0:
            target.fill_(identity_element(target.dtype, reduction))
        elif count == 1:
            target.copy_(terms[0])
        else:
            target.copy_(_reduced(terms, reduction))


def _reduced(terms: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    if reduction == "sum":
        total = terms[0].to(accumulator(terms[0].dtype), copy=True)
        for term in terms[1:]:
            total += term
        return total
    combine = torch.maximum if reduction == "max" else torch.minimum
    total = terms[0].clone()
    for term in terms[1:]:
        combine(total, term, out=total)
    return total


def pack(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy views of one dtype into one buffer, in one pass; the results are contiguous views of the buffer.

    >>> table = torch.arange(4).view(2, 2)
    >>> [piece.tolist() for piece in pack([table[:, :1], table[:, 1:]])]
    [[[0], [2]], [[1], [3]]]
    """
    sizes = [view.numel() for view in views]
    buffer = views[0].new_empty(sum(sizes)) if views else torch.empty(0)
    pieces = [piece.view(view.shape) for piece, view in zip(buffer.split(sizes), views, strict=True)]
    move_blocks(pieces, list(views), [1] * len(views), "none")
    return pieces


def slice_region(tensor: torch.Tensor, region: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The part of ``tensor`` in ``region``, as a view."""
    for dim, (start, stop) in enumerate(region):
        if stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor
