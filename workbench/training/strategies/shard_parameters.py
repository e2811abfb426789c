"""Parameters and buffers of a module as global tensors in the layouts of a strategy, each in memory of its own."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from workbench.core.layout import Layout
from workbench.core.sbp import broadcast
from workbench.core.strategy import ResolvedLayer
from workbench.errors import StrategyError
from workbench.tensors.boxing.box import box
from workbench.tensors.boxing.fused import box_many
from workbench.tensors.conversion import REPLACED
from workbench.tensors.dispatch.hooks import move_hooks
from workbench.tensors.dispatch.sparse_operands import is_sparse
from workbench.tensors.global_tensor import GlobalTensor, Spec, new_placeholder, spec_of, wrap
from workbench.tensors.tensor_state import DECLARED, spread_zero
from workbench.tensors.world import World
from workbench.training.strategies.layouts import StageLayouts
from workbench.training.strategies.state import ROOT

_numbers = itertools.count(1)


def parameter_spec(parameter: torch.Tensor, owner: ResolvedLayer, layouts: StageLayouts) -> Spec:
    """Where a parameter of a layer will lie, whether it is global yet or not."""
    shape = parameter._spec.shape if isinstance(parameter, GlobalTensor) else tuple(parameter.shape)
    layout = layouts.plan.parameter_layout(owner, len(shape))
    return spec_of(layouts.world, layout.normalized(shape), shape)


def move_parameters(
    owners: dict[nn.Parameter, ResolvedLayer],
    layouts: StageLayouts,
    converted: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Bring parameters that are global already to their layouts. They stay the same objects, so that optimizers go on
    with them.
    """
    present: list[Any] = [parameter for parameter in owners if isinstance(parameter, GlobalTensor)]
    targets = [parameter_spec(parameter, owners[parameter], layouts) for parameter in present]
    with torch.no_grad():
        moved = box_many([parameter.detach() for parameter in present], targets).wait()
    for parameter, data in zip(present, moved, strict=True):
        grad, parameter.grad = parameter.grad, None  # under ZeRO a shard, which the next strategy may not have
        parameter._take_data(data)
        parameter.grad = grad
        converted[parameter] = parameter


def shard_parameters(
    layer: nn.Module,
    owners: dict[nn.Parameter, ResolvedLayer],
    layouts: StageLayouts,
    converted: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Own parameters of a layer, with their hooks, attributes and gradients. One that is tied, or has several names, is
    converted once, for its owner.
    """
    for name, parameter in list(layer.named_parameters(recurse=False, remove_duplicate=False)):
        if parameter not in converted:
            layout = layouts.plan.parameter_layout(owners[parameter], parameter.dim())
            new: Any = nn.Parameter(shard_tensor(parameter, layout, layouts.world), parameter.requires_grad)
            new._number = next(_numbers)
            take_attributes(new, parameter)
            move_hooks(parameter, new)
            if parameter.grad is not None:
                new.grad = shard_tensor(parameter.grad, layout, layouts.world)
            converted[parameter] = converted[new] = new
            REPLACED[parameter] = True
        layer._parameters[name] = converted[parameter]


def replicate_buffers(module: nn.Module, layouts: StageLayouts) -> None:
    """Buffers are whole on every rank of the stage where they are needed; what layers of a stage share stays shared.

    Sparse ones stay plain, on every rank.
    """
    choices = {choice.name: choice for choice in layouts.plan.resolved.layers}
    nearest = layouts.plan.resolved.layers[0]
    converted: dict[tuple[int, Layout], GlobalTensor] = {}
    for name, submodule in module.named_modules():
        nearest = choices.get(name or ROOT, nearest)
        for short, buffer in list(submodule.named_buffers(recurse=False, remove_duplicate=False)):
            if is_sparse(buffer):
                submodule._buffers[short] = buffer.to(layouts.world.device)
                continue
            placement = layouts.placement_of_buffers(name or ROOT, submodule, nearest)
            layout = Layout(placement, (broadcast,) * placement.num_axes)
            if (id(buffer), layout) not in converted:
                converted[id(buffer), layout] = take_attributes(shard_tensor(buffer, layout, layouts.world), buffer)
            submodule._buffers[short] = converted[id(buffer), layout]


def take_attributes(new: Any, old: torch.Tensor) -> Any:
    """Give ``new`` what a program has set on ``old``, such as ``weight.no_decay = True``; returns it."""
    new.__dict__.update({name: value for name, value in old.__dict__.items() if name not in DECLARED})
    return new


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


def refuse_overlaps(module: nn.Module) -> None:
    """Raise for a parameter some of whose memory belongs to another parameter or buffer too, of this module or of one
    that is parallelized already.

    After ``wb.parallelize`` each tensor has memory of its own, so a step would change one and not the other. Plain
    tensors only: those of a parallelized module do not overlap.

    Raises:
        StrategyError: two tensors overlap, or another module had the same parameter; they are named.
    """
    for name, parameter in module.named_parameters():
        if parameter in REPLACED:
            raise StrategyError(
                f"parallelize: {name!r}, of shape {tuple(parameter.shape)}, is a parameter for which an earlier "
                "wb.parallelize has put a global one into another module, so the two are not tied any more. Tied "
                "modules go into one call: wb.parallelize(nn.ModuleList([actor, critic]), ...). Or have them hold one "
                "layer, not one weight in two layers, which may be parallelized with each of them."
            )
    parameters = {id(parameter) for parameter in module.parameters()}
    held = [
        (tensor, name)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    ]
    before: list[tuple[torch.Tensor, str]] = []  # that reach behind the start of the next
    for tensor, name in sorted(held, key=lambda pair: (str(pair[0].device), pair[0].data_ptr())):
        before = [pair for pair in before if pair[0].device == tensor.device and _end(pair[0]) > tensor.data_ptr()]
        for other, other_name in before:
            num_bytes = _shared_bytes(other, tensor) if {id(other), id(tensor)} & parameters else 0
            if num_bytes:
                raise StrategyError(
                    f"parallelize: {other_name!r} and {name!r} are two tensors that share memory ({num_bytes} bytes). "
                    "Each gets shards of its own, so a step would change one and not the other. Tie them as one "
                    "parameter (b.weight = a.weight), compute one from the other in forward, or give it memory of its "
                    "own (.clone())."
                )
        before.append((tensor, name))


def _end(tensor: torch.Tensor) -> int:
    """The address behind the last element."""
    if not tensor.numel():
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _shared_bytes(one: torch.Tensor, other: torch.Tensor) -> int:
    """The bytes that belong to both; columns of one table lie between each other and share none."""
    start = min(one.data_ptr(), other.data_ptr())
    belongs = torch.zeros(2, max(_end(one), _end(other)) - start, dtype=torch.bool, device="cpu")
    for row, tensor in zip(belongs, (one, other), strict=True):
        unit, first = tensor.element_size(), row.storage_offset() + tensor.data_ptr() - start
        row.as_strided((*tensor.shape, unit), (*(stride * unit for stride in tensor.stride()), 1), first).fill_(True)
    return int(belongs.all(0).sum())
