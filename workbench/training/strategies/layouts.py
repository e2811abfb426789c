"""A sharding plan on the ranks of a world: which stage is here, and where operands of several stages meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from itertools import accumulate
from typing import Any, NoReturn

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from workbench.core.placement import Placement
from workbench.core.sharding_plan import ShardingPlan
from workbench.core.strategy import ResolvedLayer
from workbench.errors import CheckpointError
from workbench.tensors.execution_context import ModuleCall
from workbench.tensors.world import World


class StageLayouts:
    """A sharding plan on the ranks of a world.

    Attributes:
        plan: the layouts of layers, and the ranks of every stage.
        everywhere: all ranks of all stages, on one axis; with a single stage, its placement.
        own_stage: the first stage of this rank; 0 on a rank outside of all stages.
    """

    def __init__(self, world: World, plan: ShardingPlan) -> None:
        self.world, self.plan = world, plan
        ranks = [rank for placement in dict.fromkeys(plan.placements) for rank in placement]
        is_one = len(plan.placements) == 1
        self.everywhere = plan.placements[0] if is_one else Placement.of(world.device.type, ranks)
        self.own_stage = next((stage for stage, ranks in enumerate(plan.placements) if world.rank in ranks), 0)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The ranks of every stage."""
        return self.plan.placements

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
        if nearest.expert is not None and name == nearest.name:
            return self.plan.parameter_layout(nearest, 1).placement
        if name == nearest.name or isinstance(module, _NormBase):
            return self.placements[nearest.stage]
        while name and name not in self._stages_inside:
            name = name.rpartition(".")[0]
        stages = self._stages_inside[name]
        return self.placements[min(stages)] if len(stages) == 1 else self.everywhere

    @cached_property
    def _stages_inside(self) -> dict[str, set[int]]:
        """By path of a module, the stages of the layers in it, itself among them."""
        found: dict[str, set[int]] = {}
        for layer in self.plan.resolved.layers:
            for path in accumulate(("", *layer.name.split(".")), "{}.{}".format):
                found.setdefault(path.removeprefix("."), set()).add(layer.stage)
        return found


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

    def __reduce__(self) -> NoReturn:
        """Hooks belong to the ranks of a world, and a pickled module would take them along."""
        raise CheckpointError(
            "a parallelized module cannot be pickled: its hooks belong to the ranks of this world. Save its weights: "
            "wb.checkpoint.save(path, model=model), which can be loaded under any strategy, or "
            "torch.save(model.state_dict(), file), a file for each rank."
        )
