"""The public names that need torch, as ``import workbench as wb`` and its namespaces show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, overload

import torch

from workbench.core.boxing import BoxingPlan
from workbench.core.boxing_path import BoxingPath, find_boxing_path
from workbench.core.layout import Layout
from workbench.core.placement import Placement, RanksLike
from workbench.core.sbp import SbpLike
from workbench.errors import LayoutError, PlacementError
from workbench.tensors import conversion
from workbench.tensors.boxing.calibration import calibrate
from workbench.tensors.boxing.fused import to_global_many
from workbench.tensors.boxing.handle import Handle
from workbench.tensors.creation import arange, empty, eye, full, ones, rand, randint, randn, randperm, tensor, zeros
from workbench.tensors.dispatch.extension import register_rule
from workbench.tensors.dispatch.local_map import local_map
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.random import manual_seed
from workbench.tensors.world import barrier, current, init, rank, rebuild, shutdown, world_size
from workbench.training import torch_patches  # noqa: F401 - completes GlobalTensor and torch
from workbench.training.capture.step import capture
from workbench.training.data import GlobalDataLoader
from workbench.training.gradients.overlap import no_sync
from workbench.training.parallel import parallelize
from workbench.training.pipelining.step import evaluate, forward_backward


class _PlacementFactory:
    """``wb.placement(ranks=[0, 1])``. Nested lists of ranks make a grid; the order counts."""

    def __call__(self, type: str | None = None, ranks: RanksLike | None = None) -> Placement:
        world = current()
        if ranks is None:
            raise PlacementError(
                f"placement({'' if type is None else repr(type)}): which ranks? Name some of 0 to "
                f"{world.world_size - 1}, as in wb.placement(ranks=[0]), or take all: wb.placement.all()."
            )
        placement = Placement.of(world.device.type if type is None else type, ranks)
        placement.check_world(world.world_size)
        return placement

    def all(self, type: str | None = None) -> Placement:
        """All ranks of the world on one axis: ``wb.placement.all()``."""
        return self(type, list(range(current().world_size)))


placement = _PlacementFactory()
"""``wb.placement(ranks=[0, 1])``: a ``Placement`` on ranks of the current world.

Nested lists of ranks make a grid with several axes. The order of ranks counts. ``wb.placement.all()`` takes all ranks.

Args:
    type: ``"cpu"`` or ``"cuda"``. Default: the device on which this world's ranks work.
    ranks: a list, or nested lists of equal lengths.

Raises:
    PlacementError: no rank, one that does not exist, or one that appears twice.

>>> wb.placement(ranks=[[0], [1]]).shape
(2, 1)
"""


LayoutLike: TypeAlias = Layout | tuple[Placement, SbpLike]


def boxing_plan(
    source: LayoutLike, destination: LayoutLike, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> BoxingPlan | BoxingPath:
    """The plan that brings a tensor from one layout to another; ``print`` it. It needs no data and moves none.

    The plan is for this world's transport: one exchange, or a path of several where that is faster. A layout is a
    ``(placement, sbp)`` pair, or ``x.layout_on_ranks``.

    >>> p = wb.placement(ranks=[0, 1])
    >>> wb.debug.boxing_plan((p, "S(0)"), (p, "B"), (4, 4)).wire_bytes
    64
    """
    a, b = map(_layout_of, (source, destination))
    return find_boxing_path(a, b, tuple(shape), dtype.itemsize, current().transport.cost)


def _layout_of(value: LayoutLike) -> Layout:
    if isinstance(value, Layout):
        return value
    if not isinstance(value, tuple) or len(value) != 2:
        raise LayoutError(
            f"boxing_plan: {value!r} is a {type(value).__name__}, not a layout. Give placement and sbp, e.g. "
            '(wb.placement(ranks=[0, 1]), "S(0)"), or x.layout_on_ranks of a tensor.'
        )
    return Layout.of(*value)


@overload
def to_global(
    tensor: torch.Tensor, placement: Placement, sbp: SbpLike, *, broadcast_from: int | None = None
) -> GlobalTensor:
    """A plain tensor of each rank as one global tensor."""


@overload
def to_global(tensor: GlobalTensor, placement: Placement | None = None, sbp: SbpLike | None = None) -> GlobalTensor:
    """A global tensor in another layout, as ``GlobalTensor.to_global``."""


@overload
def to_global(
    tensor: Sequence[GlobalTensor], placement: Placement | None = None, sbp: SbpLike | None = None
) -> list[GlobalTensor]:
    """Several global tensors in another layout."""


@overload
def to_global(
    tensor: Sequence[GlobalTensor],
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    *,
    async_op: Literal[True],
) -> Handle[list[GlobalTensor]]:
    """Likewise, without a wait for the exchange."""


def to_global(
    tensor: torch.Tensor | Sequence[GlobalTensor],
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    *,
    broadcast_from: int | None = None,
    async_op: bool = False,
) -> GlobalTensor | list[GlobalTensor] | Handle[list[GlobalTensor]]:
    """A global tensor from plain tensors, one per rank; or several global tensors in another layout, in one exchange.

    All ranks of the world call it. From plain tensors, S concatenates the tensors of the ranks (of any sizes), P takes
    them as terms of a sum, and B requires equal values on all ranks, which it checks. Several global tensors share one
    message per pair of ranks and dtype, which saves time for small tensors.

    Args:
        tensor: this rank's tensor, ignored on ranks outside the placement; or a global tensor, or a list of them, the
            same tensors in the same order on all ranks.
        placement: the ranks that hold the result. Default for global tensors: their own.
        sbp: one entry per axis of the placement. Default for global tensors: their own.
        broadcast_from: the rank whose plain tensor all ranks get, e.g. 0.
        async_op: for a list, return a handle whose ``wait()`` gives the results.

    Raises:
        LayoutError: ranks disagree about dtype, number of dims, or the value of a broadcast tensor; an empty list, or a
            list with a plain tensor.

    On two ranks, ``wb.to_global(torch.ones(2, 3), placement=p, sbp=wb.sbp.split(0)).shape`` is (4, 3).
    ``w, b = wb.to_global([layer.weight, layer.bias], sbp="B")`` gathers both in one exchange.
    """
    if isinstance(tensor, GlobalTensor):
        return tensor.to_global(placement, sbp)
    if not isinstance(tensor, torch.Tensor):
        return to_global_many(tensor, placement, sbp, async_op=async_op)
    if placement is None or sbp is None:
        missing = "placement=" if placement is None else "sbp="
        raise LayoutError(
            f"to_global: a plain tensor {tuple(tensor.shape)} without {missing}. Say which ranks hold it and how: "
            'wb.to_global(x, placement=wb.placement(ranks=[0, 1]), sbp="S(0)").'
        )
    return conversion.to_global(tensor, placement, sbp, broadcast_from=broadcast_from)


__all__ = [
    "GlobalDataLoader", "GlobalTensor", "arange", "barrier", "boxing_plan", "calibrate", "capture", "empty", "evaluate",
    "eye", "forward_backward", "full", "init", "local_map", "manual_seed", "no_sync", "ones", "parallelize",
    "placement", "rand", "randint", "randn", "randperm", "rank", "rebuild", "register_rule", "shutdown", "tensor",
    "to_global", "world_size", "zeros",
]  # fmt: skip
