"""Creation functions: torch's, with ``placement=`` and ``sbp=``. All ranks of the world call them.

Values never depend on the layout: ``randn(..., sbp=split(0))`` holds the slices of ``randn(..., sbp=broadcast)``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex, TypeAlias

import torch

from workbench.core.layout import Layout, Shape
from workbench.core.placement import Placement
from workbench.core.sbp import SbpLike
from workbench.tensors import random
from workbench.tensors.boxing.box import box
from workbench.tensors.boxing.exchange import check_devices
from workbench.tensors.conversion import refuse_dtensor, to_global
from workbench.tensors.global_tensor import GlobalTensor, new_placeholder, spec_of, wrap
from workbench.tensors.world import World, current

Size: TypeAlias = SupportsIndex | Sequence[SupportsIndex]
"""A size, or all of them in one list."""
Fill = Callable[[Layout, World], torch.Tensor]
"""Makes this rank's shard for a layout of splits and broadcasts."""


def create(
    shape: Shape, dtype: torch.dtype, placement: Placement, sbp: SbpLike, fill: Fill, requires_grad: bool = False
) -> GlobalTensor:
    """A global tensor whose shard on each rank ``fill`` makes; the terms of a partial sum are the whole and zeros."""
    world = current()
    wanted = Layout.of(placement, sbp).normalized(shape)
    whole = wanted.without_terms()
    spec = spec_of(world, whole, shape)
    check_devices(world, placement)
    local = new_placeholder(shape, dtype, world.device) if spec.is_placeholder else fill(whole, world)
    result = box(wrap(local, spec), wanted)
    if requires_grad:
        result.requires_grad_()
    return result


def _shape_of(size: tuple[Size, ...]) -> Shape:
    listed: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    return tuple(map(operator.index, listed))


def _constant(
    make: Callable[..., torch.Tensor],
    size: tuple[Size, ...],
    placement: Placement,
    sbp: SbpLike,
    dtype: torch.dtype | None,
    requires_grad: bool,
) -> GlobalTensor:
    """The result of ``make`` for the size of this rank's shard."""
    shape, kind = _shape_of(size), dtype or torch.get_default_dtype()

    def fill(layout: Layout, world: World) -> torch.Tensor:
        return make(layout.local_shape(shape, world.rank), dtype=kind, device=world.device)

    return create(shape, kind, placement, sbp, fill, requires_grad)


def zeros(
    *size: Size, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """``torch.zeros`` as a global tensor.

    >>> wb.zeros(7, 4, placement=wb.placement(ranks=[0, 1]), sbp="S(0)").to_local().shape    # of rank 0
    torch.Size([4, 4])
    """
    return _constant(torch.zeros, size, placement, sbp, dtype, requires_grad)


def ones(
    *size: Size, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """``torch.ones`` as a global tensor. As a partial sum one rank holds the ones, and the others hold zeros.

    >>> wb.ones(2, 3, placement=wb.placement(ranks=[0, 1]), sbp="P").shape
    torch.Size([2, 3])
    """
    return _constant(torch.ones, size, placement, sbp, dtype, requires_grad)


def empty(
    *size: Size, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """``torch.empty`` as a global tensor: the values are undefined and differ between ranks.

    >>> wb.empty(4, 5, placement=wb.placement(ranks=[0, 1]), sbp="S(1)").to_local().shape    # of rank 0
    torch.Size([4, 3])
    """
    return _constant(torch.empty, size, placement, sbp, dtype, requires_grad)


def full(
    size: Sequence[int],
    fill_value: float,
    *,
    placement: Placement,
    sbp: SbpLike,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:
    """``torch.full`` as a global tensor.

    >>> wb.full((4, 5), 0.5, placement=wb.placement(ranks=[0, 1]), sbp="B").dtype
    torch.float32
    """
    shape, kind = tuple(size), dtype or torch.tensor(fill_value).dtype

    def fill(layout: Layout, world: World) -> torch.Tensor:
        return torch.full(layout.local_shape(shape, world.rank), fill_value, dtype=kind, device=world.device)

    return create(shape, kind, placement, sbp, fill, requires_grad)


def _cut(value: torch.Tensor, placement: Placement, sbp: SbpLike, requires_grad: bool) -> GlobalTensor:
    """This rank's region of a tensor that every rank can compute."""
    shape = tuple(value.shape)

    def fill(layout: Layout, world: World) -> torch.Tensor:
        region = layout.region(shape, world.rank)
        return value[tuple(slice(start, stop) for start, stop in region)].clone().to(world.device)

    return create(shape, value.dtype, placement, sbp, fill, requires_grad)


def arange(
    *args: float, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """``torch.arange`` as a global tensor.

    >>> wb.arange(7, placement=wb.placement(ranks=[0, 1]), sbp="S(0)").to_local()    # of rank 0
    tensor([0, 1, 2, 3])
    """
    return _cut(torch.arange(*args, dtype=dtype), placement, sbp, requires_grad)


def eye(
    n: int,
    m: int | None = None,
    *,
    placement: Placement,
    sbp: SbpLike,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:
    """``torch.eye`` as a global tensor.

    >>> wb.eye(3, placement=wb.placement(ranks=[0, 1]), sbp="S(1)").to_local().shape    # of rank 0
    torch.Size([3, 2])
    """
    return _cut(torch.eye(n, n if m is None else m, dtype=dtype), placement, sbp, requires_grad)


def tensor(
    data: Any, *, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """``torch.tensor`` as a global tensor: a copy of ``data`` without its history.

    ``data`` is the logical value, the same on every rank, or a global tensor.

    >>> wb.tensor([[1, 2], [3, 4]], placement=wb.placement(ranks=[0, 1]), sbp="S(0)").to_local()    # of rank 0
    tensor([[1, 2]])
    """
    refuse_dtensor(data, "wb.tensor")
    if isinstance(data, GlobalTensor):
        copy = to_global(data.detach().clone().to(dtype or data.dtype), placement, sbp)
        if requires_grad:
            copy.requires_grad_()
        return copy
    return _cut(torch.as_tensor(data, dtype=dtype).detach(), placement, sbp, requires_grad)


def _random(
    shape: Shape,
    dtype: torch.dtype,
    placement: Placement,
    sbp: SbpLike,
    sampler: random.Sampler,
    requires_grad: bool,
    filling: str,
    *bounds: int,
) -> GlobalTensor:
    """Numbers of ``sampler``, where torch's own ``filling`` takes the dtype and the bounds."""
    random.check_filling(filling, dtype, *bounds)
    key = random.draw_key(current())  # on every rank, outside the placement too

    def fill(layout: Layout, world: World) -> torch.Tensor:
        return random.sample_shard(sampler, key, layout, shape, dtype, world)

    return create(shape, dtype, placement, sbp, fill, requires_grad)


def randn(
    *size: Size, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """Standard normal numbers, the same for every layout.

    >>> wb.randn(4, 5, placement=wb.placement(ranks=[0, 1]), sbp=wb.sbp.split(0)).shape
    torch.Size([4, 5])
    """
    kind = dtype or torch.get_default_dtype()
    return _random(_shape_of(size), kind, placement, sbp, random.normal_sampler(), requires_grad, "normal_")


def rand(
    *size: Size, placement: Placement, sbp: SbpLike, dtype: torch.dtype | None = None, requires_grad: bool = False
) -> GlobalTensor:
    """Uniform numbers in [0, 1), the same for every layout.

    >>> wb.rand(4, 5, placement=wb.placement(ranks=[0, 1]), sbp="B").shape
    torch.Size([4, 5])
    """
    kind = dtype or torch.get_default_dtype()
    return _random(_shape_of(size), kind, placement, sbp, random.uniform_sampler(), requires_grad, "uniform_")


def randint(
    low: SupportsIndex,
    high: Size | None = None,
    size: Sequence[SupportsIndex] = (),
    *,
    placement: Placement,
    sbp: SbpLike,
    dtype: torch.dtype = torch.int64,
) -> GlobalTensor:
    """Random integers in [low, high), or in [0, low) without ``high``; the same for every layout.

    >>> wb.randint(10, (4, 5), placement=wb.placement(ranks=[0, 1]), sbp="S(0)").dtype
    torch.int64
    """
    if isinstance(high, SupportsIndex):
        bounds = operator.index(low), operator.index(high)
    else:
        bounds, size = (0, operator.index(low)), size if high is None else high
    sampler = random.integer_sampler(*bounds)
    return _random(_shape_of((size,)), dtype, placement, sbp, sampler, False, "random_", *bounds)


def randperm(n: int, *, placement: Placement, sbp: SbpLike, dtype: torch.dtype = torch.int64) -> GlobalTensor:
    """The numbers from 0 to n - 1 in random order, the same for every layout.

    >>> wb.randperm(7, placement=wb.placement(ranks=[0, 1]), sbp="S(0)").to_local().shape    # of rank 0
    torch.Size([4])
    """
    return _cut(random.permutation(n, dtype, current()), placement, sbp, requires_grad=False)
