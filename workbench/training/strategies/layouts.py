"""The placements and layouts of every layer's parameters and inputs under a resolved strategy. Moves no data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.core.sbp import Sbp, broadcast, split
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy
from workbench.core.weight_splits import TABLE, TRANSPOSED_KINDS, feature_dim
from workbench.tensors.execution_context import ModuleCall
from workbench.tensors.world import World


class StageLayouts:
    """Placements of the stages, and the layouts that layers have on them.

    Attributes:
        axes: for every stage, names of the axes of its placement, in order: "data", "model".
        placements: the ranks of every stage.
        everywhere: all ranks of all stages; with a single stage, its placement.
        own_stage: the first stage of this rank; 0 on a rank outside of all stages.
    """

    def __init__(self, world: World, resolved: ResolvedStrategy) -> None:
        self.world, self.resolved = world, resolved
        self._input_layouts: dict[tuple[str, int, int], Layout] = {}
        self.axes = [self._axes(*resolved.stage_width(stage)) for stage in range(resolved.num_stages)]
        self.placements = tuple(self._placement(stage) for stage in range(resolved.num_stages))
        ranks = [rank for placement in dict.fromkeys(self.placements) for rank in placement]
        is_one = len(set(self.placements)) == 1
        self.everywhere = self.placements[0] if is_one else Placement.of(world.device.type, ranks)
        self.own_stage = next((i for i, ranks in enumerate(self.placements) if world.rank in ranks.ranks), 0)

    @staticmethod
    def _axes(data: int, model: int) -> list[str]:
        """Axes of size one are left out: boxing along them would do nothing, at a price."""
        return [name for name, size in (("data", data), ("model", model)) if size > 1] or ["data"]

    def _placement(self, stage: int) -> Placement:
        grid = self.resolved.stage_grid(stage)
        ranks: Any = grid if len(self.axes[stage]) == 2 else self.resolved.stage_ranks(stage)
        return Placement.of(self.world.device.type, ranks)

    def layout(self, choice: ResolvedLayer, data: Sbp, model: Sbp) -> Layout:
        """A layout on the layer's stage from one entry for each of the two axes."""
        axes = self.axes[choice.stage]
        return Layout(self.placements[choice.stage], tuple(data if axis == "data" else model for axis in axes))

    def input_layout(self, choice: ResolvedLayer, ndim: int, batch_dim: int = 0) -> Layout:
        """The layout of the layer's input under its choice; B for a scalar. ``batch_dim`` counts samples."""
        known = self._input_layouts.get((choice.name, ndim, batch_dim))
        if known is None:
            known = self._input_layouts[choice.name, ndim, batch_dim] = self._input_layout(choice, ndim, batch_dim)
        return known

    def _input_layout(self, choice: ResolvedLayer, ndim: int, batch_dim: int) -> Layout:
        if ndim == 0:
            return self.layout(choice, broadcast, broadcast)
        samples = split(batch_dim)
        if choice.parallel == "data":
            return self.layout(choice, samples, samples)
        if self.resolved.options.sequence and "Norm" in choice.kind and ndim > 2:
            return self.layout(choice, samples, split(0 if batch_dim == 1 else 1))
        takes_slices = choice.split == "row" and choice.kind != TABLE
        return self.layout(choice, samples, split(feature_dim(choice.kind, ndim)) if takes_slices else broadcast)

    def parameter_layout(self, choice: ResolvedLayer, ndim: int) -> Layout:
        """The layout of a parameter, see the table at the top of ``training/parallel.py``."""
        outputs_last = choice.kind in (TABLE, *TRANSPOSED_KINDS)
        if choice.split == "column":
            entry: Sbp = split(ndim - 1) if outputs_last else split(0)
        elif choice.split == "row" and ndim > 1:
            entry = split(0) if outputs_last else split(1)
        else:
            entry = broadcast
        return self.layout(choice, broadcast, entry)

    def output_layout(self, choice: ResolvedLayer, following: ResolvedLayer | None, ndim: int) -> Layout:
        """The layout for the sums of a row-split layer and the columns of a table: that of the next layer's input."""
        if self.resolved.options.sequence and ndim > 2:
            return self.layout(choice, split(0), split(1))
        if following is None:
            return self.layout(choice, split(0), split(0))
        if following.split == "row":
            return self.layout(choice, split(0), broadcast)
        return self.input_layout(following, ndim)

    @property
    def stage_order(self) -> tuple[Placement, ...]:
        """For ``ModuleCall``: the placements on which operands of different stages may meet; empty with one stage."""
        return (self.everywhere, *self.placements) if len(self.placements) > 1 else ()

    def combining_on_latest_stage(self) -> AbstractContextManager[None]:
        """A context in which operands of different stages meet as inside the module's call."""
        return self.world.context.temporarily(call=ModuleCall(self.stage_order))

    def placement_of_buffers(self, name: str, module: nn.Module, nearest: ResolvedLayer) -> Placement:
        """The placement of a module's buffers. ``nearest`` is the module as a layer, or the layer before it.

        Buffers of a layer are on its stage, and so are running statistics, which forward writes. Buffers of another
        module (rotary frequencies, masks) are on the stage of the layers in it, or of those around it if it has none.
        If these layers are on several stages, the buffers are on all ranks.
        """
        if name == nearest.name or isinstance(module, _NormBase):
            return self.placements[nearest.stage]
        stages = self._stages_inside(name) or self._stages_inside(name.rpartition(".")[0])
        return self.placements[stages.pop()] if len(stages) == 1 else self.everywhere

    def _stages_inside(self, name: str) -> set[int]:
        return {layer.stage for layer in self.resolved.layers if not name or f"{layer.name}.".startswith(f"{name}.")}


class LayoutsInUse:
    """The layouts that a module's hooks and steps use. All of them hold this one object.

    Attributes:
        layouts: those on the ranks of the world; during an action of a rank with several stages, those of its stage.
    """

    def __init__(self, layouts: StageLayouts) -> None:
        self.layouts = layouts

    @contextmanager
    def replaced_by(self, layouts: StageLayouts) -> Iterator[None]:
        """A context in which hooks and steps use ``layouts``, which have another world."""
        before, self.layouts = self.layouts, layouts
        try:
            yield
        finally:
            self.layouts = before

    def __deepcopy__(self, memo: dict[int, Any]) -> LayoutsInUse:
        """A copied module has the layouts of the module."""
        return self
