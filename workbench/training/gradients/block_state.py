"""Optimizers whose state is rounded in blocks of elements, each with its own scale: those of ``torchao.optim`` in 8 and
4 bits.

A step of such an optimizer is elementwise but for its blocks, which are runs of ``block_size`` elements in the order of
memory. It works on a rank's part as on the whole parameter if the part consists of whole blocks of the logical
parameter: all of it, or rows that begin and end where blocks do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from workbench.core.layout import Region, Shape
from workbench.errors import LayoutError
from workbench.tensors.global_tensor import GlobalTensor
from workbench.training.gradients.shard import state_spec

_SMALLEST = 4096
"""torchao rounds no state with fewer elements."""


def block_size_of(optimizer: Optimizer) -> int:
    """Elements that share a scale in the state of an optimizer of ``torchao.optim``; 0 for other optimizers."""
    base = getattr(sys.modules.get("torchao.optim.adam"), "_AdamBase", None)
    return int(optimizer.block_size) if base is not None and isinstance(optimizer, base) else 0


def has_whole_blocks(shape: Shape, region: Region, block_size: int) -> bool:
    """Whether a region of a tensor is a run of whole blocks.

    >>> has_whole_blocks((8, 64), ((4, 8), (0, 64)), 256), has_whole_blocks((8, 64), ((0, 8), (0, 32)), 256)
    (True, False)
    """
    sizes = [stop - start for start, stop in region]
    split = next((dim for dim, size in enumerate(sizes) if size > 1), len(sizes))
    if 0 in sizes or any(size != whole for size, whole in list(zip(sizes, shape, strict=True))[split + 1 :]):
        return 0 in sizes
    first = sum(start * math.prod(shape[dim + 1 :]) for dim, (start, _) in enumerate(region))
    return first % block_size == 0 == math.prod(sizes) % block_size


def _is_rounded(shape: Shape, block_size: int) -> bool:
    numel = math.prod(shape)
    return numel >= _SMALLEST and numel % block_size == 0


def check_blocks(optimizer: Optimizer, parameters: Sequence[GlobalTensor]) -> None:
    """Compare the parts of parameters with the blocks of an optimizer's state. All ranks find the same.

    Raises:
        LayoutError: a part ends inside a block. It lists all such parameters.
    """
    block_size, cut = block_size_of(optimizer), []
    for spec in map(state_spec, parameters) if block_size else ():
        regions = (spec.layout.region(spec.shape, rank) for rank in spec.layout.placement)
        are_whole = all(has_whole_blocks(spec.shape, region, block_size) for region in regions)
        if _is_rounded(spec.shape, block_size) and not are_whole:
            cut.append(f"{tuple(spec.shape)} as {spec.layout}")
    if cut:
        raise LayoutError(
            f"{type(optimizer).__name__}.step(): its state has one scale for {block_size} elements in a row, and "
            f"{len(cut)} of {len(parameters)} parameters are cut inside such blocks, which would give other numbers "
            f"than one device: {'; '.join(cut)}. Keep these layers whole ('data', no zero=), split them by columns "
            "('model:column') where rows have whole blocks, or use torch.optim.AdamW."
        )


def make_block_state(optimizer: Any, pairs: Sequence[tuple[GlobalTensor, torch.Tensor]]) -> None:
    """Make the state of parts that have a gradient and no state yet: rounded where that of the whole parameter would
    be, for torchao goes by the size that it sees.
    """
    amsgrad = {id(part): group["amsgrad"] for group in optimizer.param_groups for part in group["params"]}
    for owner, part in pairs:
        if part.grad is not None and not optimizer.state.get(part):
            is_rounded = _is_rounded(tuple(owner._spec.shape), optimizer.block_size) and part.numel() > 0
            optimizer.state[part] = _zeros(optimizer, part, is_rounded, amsgrad[id(part)])


def _zeros(optimizer: Any, part: torch.Tensor, is_rounded: bool, amsgrad: bool) -> dict[str, torch.Tensor]:
    """As torchao begins."""

    def new(signed: bool) -> torch.Tensor:
        if not is_rounded:
            return torch.zeros_like(part)
        found: torch.Tensor = optimizer._subclass_zeros(part, signed, optimizer.block_size)
        return found

    state = {"step": torch.tensor(0.0), "exp_avg": new(True), "exp_avg_sq": new(False)}
    return {**state, "max_exp_avg_sq": new(False)} if amsgrad else state


def refuse_block_state(optimizer: Optimizer, what: str, error: type[Exception]) -> None:
    """Raise ``error`` for such an optimizer with state: ``what`` cannot take its blocks along."""
    block_size = block_size_of(optimizer)
    if block_size and optimizer.state:
        raise error(
            f"{what}: the state of {type(optimizer).__name__} is rounded in blocks of {block_size} elements with "
            f"a scale each, for {len(optimizer.state)} parameters here, and can be neither split again nor saved. "
            "Make a new optimizer after wb.parallelize, leave it out of the checkpoint, or use torch.optim.AdamW."
        )
