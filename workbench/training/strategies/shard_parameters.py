"""Parameters and buffers of a module as global tensors in the layouts of a strategy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from workbench.core.layout import Layout
from workbench.core.sbp import broadcast
from workbench.core.strategy import ResolvedLayer
from workbench.tensors.boxing.box import box
from workbench.tensors.boxing.fused import box_many
from workbench.tensors.global_tensor import GlobalTensor, new_placeholder, spec_of, wrap
from workbench.tensors.placeholder_storage import spread_zero
from workbench.tensors.world import World
from workbench.training.gradients.stale_optimizer import mark_replaced
from workbench.training.strategies.layouts import StageLayouts
from workbench.training.strategies.state import ROOT


def move_parameters(
    owners: dict[nn.Parameter, ResolvedLayer],
    layouts: StageLayouts,
    converted: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Bring parameters that are global already to their layouts. They stay the same objects, so that optimizers go on
    with them.
    """
    present: list[Any] = [parameter for parameter in owners if isinstance(parameter, GlobalTensor)]
    targets = [
        spec_of(
            layouts.world, layouts.plan.parameter_layout(owners[p], p.dim()).normalized(p._spec.shape), p._spec.shape
        )
        for p in present
    ]
    with torch.no_grad():
        moved = box_many([parameter.detach() for parameter in present], targets).wait()
    for parameter, data in zip(present, moved, strict=True):
        grad, parameter.grad = parameter.grad, None  # under ZeRO a shard, which the next strategy may not have
        parameter.data = data
        parameter.grad = grad
        converted[parameter] = parameter


def shard_parameters(
    layer: nn.Module,
    owners: dict[nn.Parameter, ResolvedLayer],
    layouts: StageLayouts,
    converted: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Own parameters of a layer. One that is tied, or has several names, is converted once, for its owner."""
    for name, parameter in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
        if parameter not in converted:
            layout = layouts.plan.parameter_layout(owners[parameter], parameter.dim())
            new = nn.Parameter(shard_tensor(parameter, layout, layouts.world), parameter.requires_grad)
            converted[parameter] = converted[new] = new
            mark_replaced(parameter)
        layer._parameters[name] = converted[parameter]


def replicate_buffers(module: nn.Module, layouts: StageLayouts) -> None:
    """Buffers are whole on every rank of the stage where they are needed; what layers of a stage share stays shared."""
    choices = {choice.name: choice for choice in layouts.plan.resolved.layers}
    nearest = layouts.plan.resolved.layers[0]
    converted: dict[tuple[int, Layout], GlobalTensor] = {}
    for name, submodule in module.named_modules():
        nearest = choices.get(name or ROOT, nearest)
        for short, buffer in list(submodule.named_buffers(recurse=False, remove_duplicate=False)):
            placement = layouts.placement_of_buffers(name or ROOT, submodule, nearest)
            layout = Layout(placement, (broadcast,) * placement.num_axes)
            if (id(buffer), layout) not in converted:
                converted[id(buffer), layout] = shard_tensor(buffer, layout, layouts.world)
            submodule._buffers[short] = converted[id(buffer), layout]


def shard_tensor(tensor: torch.Tensor, layout: Layout, world: World) -> GlobalTensor:
    """This rank's slices of a tensor that all ranks hold, or of one that is global already; of meta, no storage."""
    with torch.no_grad():
        if isinstance(tensor, GlobalTensor):
            detached: Any = tensor.detach()
            return box(detached, layout.normalized(tensor._spec.shape))
        spec = spec_of(world, layout, tuple(tensor.shape))
        if spec.is_placeholder:
            return wrap(new_placeholder(spec.shape, tensor.dtype, world.device), spec)
        if tensor.is_meta:
            return wrap(spread_zero(spec.local_shape, tensor.dtype, world.device), spec)
        region = spec.layout.region(spec.shape, world.rank)
        part = tensor.detach()[tuple(slice(start, stop) for start, stop in region)]
        return wrap(part.to(world.device, copy=True).contiguous(), spec)
