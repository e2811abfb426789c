"""Building blocks for functions along a split dim: local results on every rank, and their combination.

A reduction over a split dim has two stages. The first works on each shard and leaves one row per rank: a tensor with as
many rows as the dim has shards, split as before. The ranks gather these rows; the tensor itself does not move. The
second stage reduces them. Gradients need nothing more: both stages run under local autograd, and the gather is a
boxing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench.core.layout import Layout, Shape
from workbench.core.sbp import Partial, Split, broadcast
from workbench.tensors.boxing.box import Box, box_implicitly
from workbench.tensors.dispatch.local_call import Out, local_call, on_shards
from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch, spec_of, wrap


@dataclass(frozen=True)
class Stages:
    """The layouts and shapes of a two-stage reduction.

    Attributes:
        dims: the reduced dims, counted from the front.
        axes: the axes of the placement that split a reduced dim.
        rows_shape: shape of the tensor with one row per shard of the reduced dims; its layout is the tensor's.
        gathered: the layout in which every rank holds all the rows.
        kept_shape, dropped_shape: the result's shape with the reduced dims of size one, and without them.
        dropped: the layout of the result without the reduced dims; with them it is ``gathered``.
    """

    dims: tuple[int, ...]
    axes: tuple[int, ...]
    layout: Layout
    rows_shape: Shape
    gathered: Layout
    kept_shape: Shape
    dropped_shape: Shape
    dropped: Layout

    def result(self, keepdim: bool, dtype: torch.dtype, reduction: str | None = None) -> Out:
        """The spec of the result: whole along the axes that split it, or terms of ``reduction`` there."""
        layout = self.gathered if keepdim else self.dropped
        if reduction is not None:
            sbp = tuple(Partial(reduction) if axis in self.axes else e for axis, e in enumerate(layout.sbp))
            layout = layout.with_sbp(sbp)
        return layout, self.kept_shape if keepdim else self.dropped_shape, dtype


def stages_of(tensor: GlobalTensor, dims: Sequence[int]) -> Stages:
    """The stages of a reduction of ``dims`` (counted from the front) of a tensor without partial sums."""
    spec = tensor._spec
    key = ("stages", spec, tuple(dims))
    found: Stages | None = spec.plans.get(key)
    if found is None:
        found = spec.plans[key] = _make_stages(spec, tuple(dims))
    return found


def _make_stages(spec: Spec, dims: tuple[int, ...]) -> Stages:
    layout, shape = spec.layout, spec.shape
    axes = tuple(a for a, entry in enumerate(layout.sbp) if isinstance(entry, Split) and entry.dim in dims)
    parts = {d: math.prod(layout.placement.shape[a] for a in layout.axes_splitting(d)) for d in dims}
    gathered = layout.with_sbp(tuple(broadcast if a in axes else e for a, e in enumerate(layout.sbp)))
    kept = [d for d in range(len(shape)) if d not in dims]
    moved = tuple(Split(kept.index(e.dim)) if isinstance(e, Split) else e for e in gathered.sbp)
    return Stages(
        dims,
        axes,
        layout,
        tuple(parts.get(d, size) for d, size in enumerate(shape)),
        gathered,
        tuple(1 if d in dims else size for d, size in enumerate(shape)),
        tuple(shape[d] for d in kept),
        layout.with_sbp(moved),
    )


def splits(tensor: Any, dims: Sequence[int] | None = None) -> bool:
    """Whether an axis splits one of ``dims`` (None: any dim) of ``tensor``."""
    if type(tensor) is not GlobalTensor or tensor._spec.layout.is_broadcast:
        return False
    return any(isinstance(e, Split) and (dims is None or e.dim in dims) for e in tensor._spec.layout.sbp)


def needs_grad(*tensors: torch.Tensor) -> bool:
    """Whether a result of these tensors needs a gradient; the same on all ranks, placeholders included."""
    if not torch.is_grad_enabled():
        return False
    with local_torch():
        return any(tensor.requires_grad for tensor in tensors)


def gathered_rows(
    tensor: GlobalTensor, stages: Stages, first: Callable[..., Any], dtypes: Sequence[torch.dtype], name: str
) -> list[GlobalTensor]:
    """The results of ``first`` on all shards, one row each, on every rank."""
    outs = [(stages.layout, stages.rows_shape, dtype) for dtype in dtypes]
    rows = on_shards(first, [tensor], [stages.layout], outs, name)
    return [box_implicitly(row, stages.gathered, name) for row in rows]


def two_stages(
    tensor: GlobalTensor,
    stages: Stages,
    keepdim: bool,
    first: Callable[..., Any],
    second: Callable[..., Any],
    dtypes: tuple[torch.dtype, torch.dtype],
    name: str,
) -> GlobalTensor:
    """Reduce each shard to a row with ``first`` (dims kept), and all rows with ``second``; given the dtypes of the two
    results.

    ``second`` keeps the dims too. This function drops them if the caller asks.
    """
    rows = gathered_rows(tensor, stages, first, dtypes[:1], name)
    out = stages.result(keepdim, dtypes[1])
    shape = spec_of(tensor._spec.world, out[0], out[1]).local_shape
    return local_call(lambda x: second(x).reshape(shape), rows, [stages.gathered], out, name)


def dropped(kept: GlobalTensor, stages: Stages) -> GlobalTensor:
    """A result without its reduced dims, which have size one."""
    out = stages.result(False, kept.dtype)
    shape = spec_of(kept._spec.world, out[0], out[1]).local_shape
    return local_call(lambda x: x.reshape(shape), [kept], [stages.gathered], out, "squeeze")


def terms(
    function: Callable[..., Any],
    operands: Sequence[GlobalTensor],
    layouts: Sequence[Layout],
    stages: Stages,
    keepdim: bool,
    dtype: torch.dtype,
    name: str,
    reduction: str = "sum",
) -> GlobalTensor:
    """The result of ``function`` on each shard (dims kept), as one term of the reduction."""
    out = stages.result(keepdim, dtype, reduction)
    shape = spec_of(operands[0]._spec.world, out[0], out[1]).local_shape
    return local_call(lambda *shards: function(*shards).reshape(shape), operands, layouts, out, name)


class _BoxWithKnownSum(Box):
    """Boxing of terms with a known sum: forward moves nothing, and the gradient moves as in the boxing."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, local: torch.Tensor, source: Spec, target: Spec, tag: int, value: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.boxing = (source, target, tag, local.dtype, local.device, None)
        return value.clone()  # callers could not write to a view


def with_gradient_of(value: GlobalTensor, sum_terms: GlobalTensor) -> GlobalTensor:
    """``value`` with the gradient of the sum of ``sum_terms``."""
    world = value._spec.world
    with local_torch():
        result = _BoxWithKnownSum.apply(
            sum_terms, sum_terms._spec, value._spec, world.context.next_tag(), value.detach()
        )
    return wrap(result, value._spec)


def own_rows(spec: Spec, dim: int) -> tuple[int, int]:
    """This rank's rows of ``dim``; all rows on a rank outside the placement."""
    return (0, spec.shape[dim]) if spec.is_placeholder else spec.layout.region(spec.shape, spec.world.rank)[dim]


def shard_sizes(tensor: GlobalTensor, dim: int) -> list[int]:
    """Rows of ``dim`` in each of its shards, in logical order."""
    layout, shape = tensor._spec.layout, tensor._spec.shape
    by_place: dict[tuple[int, ...], int] = {}
    axes = layout.axes_splitting(dim)
    for rank in layout.placement:
        coordinates = layout.placement.coordinates(rank)
        start, stop = layout.region(shape, rank)[dim]
        by_place[tuple(coordinates[axis] for axis in axes)] = stop - start
    return [by_place[place] for place in sorted(by_place)]
