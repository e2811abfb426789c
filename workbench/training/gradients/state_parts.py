"""Parts of an optimizer's state: what a rank keeps of a value that belongs to a whole parameter."""

from __future__ import annotations

from typing import Any

import torch

from workbench.errors import LayoutError
from workbench.kernels.blocks import slice_region
from workbench.tensors.boxing.box import box
from workbench.tensors.global_tensor import GlobalTensor, plain
from workbench.training.gradients.shard import state_spec
from workbench.training.gradients.stale_optimizer import MOVE_STATE


def own_part(parameter: GlobalTensor, value: Any) -> Any:
    """A value of an optimizer's state, which may be global or that of the whole parameter, as this rank's part.

    Raises:
        LayoutError: it is the part of another layout.
    """
    if not isinstance(value, torch.Tensor):
        return value
    return _part_of_state(parameter, value).contiguous()


def _part_of_state(parameter: GlobalTensor, value: torch.Tensor) -> torch.Tensor:
    spec = state_spec(parameter)
    if isinstance(value, GlobalTensor):
        if tuple(value._spec.shape) != tuple(spec.shape):
            return plain(value)
        return plain(box(value.detach(), spec.layout))
    if tuple(value.shape) == tuple(spec.shape) != tuple(spec.local_shape):
        return slice_region(value, spec.layout.region(spec.shape, spec.world.rank)).clone(
            memory_format=torch.contiguous_format
        )
    if value.dim() == len(spec.shape) > 0 and tuple(value.shape) != tuple(spec.local_shape):
        raise LayoutError(
            f"optimizer.step(): state of shape {tuple(value.shape)} for a parameter of shape {tuple(spec.shape)}, of "
            f"which this rank steps on {tuple(spec.local_shape)} ({spec.layout}). {MOVE_STATE}"
        )
    return value
