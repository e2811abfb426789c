"""Methods of ``GlobalTensor`` that change or read its layout; importing this module completes the class."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from workbench.core.boxing import BoxingPlan
from workbench.core.boxing_path import BoxingPath, find_boxing_path
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.tensors import checkpoint_chunks, dispatch, rules  # noqa: F401 - rules register themselves
from workbench.tensors.boxing.box import box, box_to
from workbench.tensors.boxing.fused import to_global_async
from workbench.tensors.conversion import from_local
from workbench.tensors.conversion import to_local as convert_to_local
from workbench.tensors.dispatch.read_values import check_reading, on_all_ranks
from workbench.tensors.global_tensor import GlobalTensor, local_torch, spec_of
from workbench.tensors.torch_patches import checkpoint, compile_ddp_fsdp, copying, torch_function_bypasses

_MAX_TARGETS = 64
"""Ways to ask for a layout that a spec remembers."""


def to_global(tensor: GlobalTensor, placement: Placement | None = None, sbp: Any = None) -> GlobalTensor:
    """The same logical tensor in another layout: a boxing. All ranks of the world call it.

    In the layout that it has already it is the tensor itself; in every other one the result has memory of its own.

    Args:
        placement: the ranks that hold the result; default those of the tensor.
        sbp: one entry per axis of the placement; default those of the tensor.

    Raises:
        SbpError: wrong number of entries, or a split dim out of range.
        PlacementError: a rank that the world does not have.

    ``x.to_global(sbp=wb.sbp.broadcast)`` of a split ``x`` is an all-gather.
    """
    targets = tensor._spec.targets
    try:
        target = targets.get((placement, sbp))
    except TypeError:  # a list of entries cannot be looked up
        target = None
    if target is None:
        target = spec_of(tensor._spec.world, _layout(tensor, placement, sbp), tensor._spec.shape)
        if isinstance(sbp, Hashable) and len(targets) < _MAX_TARGETS:
            targets[placement, sbp] = target
    return box_to(tensor, target)


def boxing_plan(tensor: GlobalTensor, placement: Placement | None = None, sbp: Any = None) -> BoxingPlan | BoxingPath:
    """What ``to_global`` with the same arguments would do; printable, moves nothing.

    >>> p = wb.placement("cpu", ranks=[0, 1])
    >>> wb.ones(4, 4, placement=p, sbp="S(0)").boxing_plan(sbp="B").bytes_sent
    {0: 32, 1: 32}
    """
    with local_torch():
        itemsize = tensor.element_size()
    spec = tensor._spec
    return find_boxing_path(
        spec.layout, _layout(tensor, placement, sbp), spec.shape, itemsize, spec.world.transport.cost
    )


def to_local(tensor: GlobalTensor, *, grad_sbp: Any = None) -> torch.Tensor:
    """This rank's shard as a plain tensor that shares its storage; empty on ranks outside the placement.

    A loss computed from it counts once per rank for splits and partial sums; for copies (B) each rank's counts one
    n-th, so that the same plain loss on all ranks gives one device's gradient.

    Args:
        grad_sbp: how the gradient that will come back lies, one entry per axis; default B where the tensor is B. For a
            B tensor of which every rank makes a loss of its own, P.

    Raises:
        SbpError: ``grad_sbp`` is no layout that a gradient of this tensor can have.
    """
    return convert_to_local(tensor, grad_sbp)


def full_tensor(tensor: GlobalTensor) -> torch.Tensor:
    """The logical tensor as a plain one, on every rank of the world, those outside its placement too. All ranks call
    it.

    It keeps its history: a loss made of it counts once if all ranks make it.

    Raises:
        StrategyError: inside a scheduled step of several stages, where ranks are at different micro-batches.
        ExplicitBoxingError: under ``wb.debug.explicit_boxing()``, of a tensor that some rank has no part of.

    >>> last = wb.placement("cpu", ranks=[0])
    >>> wb.ones(2, 3, placement=last, sbp="B").full_tensor().sum()
    tensor(6.)
    """
    check_reading(tensor, "full_tensor")
    return convert_to_local(on_all_ranks(tensor))


def _layout(tensor: GlobalTensor, placement: Placement | None, sbp: Any) -> Layout:
    current = tensor._spec.layout
    layout = Layout.of(placement or current.placement, current.sbp if sbp is None else sbp)
    layout.placement.check_world(tensor._spec.world.world_size)
    return layout.normalized(tensor._spec.shape)


for _function in (to_global, to_global_async, boxing_plan, to_local, full_tensor):
    setattr(GlobalTensor, _function.__name__, _function)
GlobalTensor.box = staticmethod(box)
GlobalTensor.enter = staticmethod(from_local)
GlobalTensor.show = staticmethod(dispatch.read_values.format_values)
compile_ddp_fsdp.install()
copying.install()
torch_function_bypasses.install()
checkpoint.install()
checkpoint_chunks.install()
dispatch.hooks.install()
