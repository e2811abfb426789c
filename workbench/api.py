"""The public names of the runtime, as ``import workbench as wb`` shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workbench.core.boxing import BoxingPlan
from workbench.core.boxing_path import BoxingPath, find_boxing_path
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.tensors.agreement import check_agreement
from workbench.tensors.boxing.calibration import calibrate
from workbench.tensors.boxing.explicit import explicit_boxing
from workbench.tensors.boxing.fused import to_global_many
from workbench.tensors.conversion import to_global
from workbench.tensors.creation import arange, empty, eye, full, ones, rand, randint, randn, randperm, tensor, zeros
from workbench.tensors.dispatch.extension import local_map, rule
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.proof import prove
from workbench.tensors.random import manual_seed
from workbench.tensors.world import barrier, current, init, rank, rebuild, world_size
from workbench.training.capture.step import capture
from workbench.training.costs.dry_run import dry_run
from workbench.training.data import GlobalDataLoader
from workbench.training.exporting import export_safetensors
from workbench.training.gradients.overlap import no_sync
from workbench.training.parallel import parallelize
from workbench.training.pipelining.balance import balance
from workbench.training.pipelining.step import evaluate, forward_backward
from workbench.training.pipelining.timeline import timeline
from workbench.training.precision import GradScaler
from workbench.training.saving.checkpoints import Checkpoints
from workbench.training.saving.store import load, save
from workbench.training.strategies.loading import load_safetensors
from workbench.training.watching.nonfinite import find_nonfinite
from workbench.training.watching.reporting import memory_report
from workbench.training.watching.trace import trace


class _PlacementFactory:
    """``wb.placement("cpu", ranks=[0, 1])``; nested ranks make a grid, their order is meaningful."""

    def __call__(self, type: str, ranks: Any) -> Placement:
        placement = Placement.of(type, ranks)
        placement.check_world(current().world_size)
        return placement

    def all(self, type: str) -> Placement:
        """All ranks of the world on one axis: ``wb.placement.all("cpu")``."""
        return Placement.of(type, list(range(current().world_size)))


placement = _PlacementFactory()
"""``wb.placement("cpu", ranks=[0, 1])``: a ``Placement`` on ranks that exist in the current world.

Nested ranks make a grid with several axes; their order is meaningful. ``wb.placement.all("cpu")`` takes all ranks.

Args:
    type: ``"cpu"`` or ``"cuda"``.
    ranks: a list, or nested lists of equal lengths.

Raises:
    PlacementError: a rank that does not exist, or twice.

>>> wb.placement("cpu", ranks=[[0], [1]]).shape
(2, 1)
"""


LayoutLike = Layout | tuple[Placement, Any]


def boxing_plan(
    source: LayoutLike, destination: LayoutLike, shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> BoxingPlan | BoxingPath:
    """The plan that brings a tensor from one layout to another; ``print`` it. Needs no data and moves none.

    It is the plan for this world's transport: one exchange, or a path of several where that is faster. Layouts are
    ``(placement, sbp)`` pairs, or what ``x.layout_on_ranks`` gives.

    >>> p = wb.placement("cpu", ranks=[0, 1])
    >>> wb.boxing_plan((p, "S(0)"), (p, "B"), (4, 4)).wire_bytes
    64
    """
    layouts = [value if isinstance(value, Layout) else Layout.of(*value) for value in (source, destination)]
    source, destination = layouts
    return find_boxing_path(source, destination, tuple(shape), dtype.itemsize, current().transport.cost)


__all__ = [
    "Checkpoints", "GlobalDataLoader", "GlobalTensor", "GradScaler", "arange", "balance", "barrier", "boxing_plan",
    "calibrate", "capture", "check_agreement", "dry_run", "empty", "evaluate", "explicit_boxing",
    "export_safetensors", "eye", "find_nonfinite", "forward_backward", "full", "init", "load", "load_safetensors",
    "local_map", "manual_seed", "memory_report", "no_sync", "ones", "parallelize", "placement", "prove",
    "rand", "randint", "randn", "randperm", "rank", "rebuild", "rule", "save", "tensor", "timeline", "to_global",
    "to_global_many", "trace", "world_size", "zeros",
]  # fmt: skip
