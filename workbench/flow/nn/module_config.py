"""The settings of a module for the graph that holds it: its pipeline stage, and whether it is recomputed."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map

from workbench.core.placement import Placement
from workbench.errors import StrategyError
from workbench.tensors.global_tensor import GlobalTensor
from workbench.training.recompute import Recomputed


class ModuleConfig:
    """The settings of one module, ``module.config``; newer programs write ``module.to(flow.nn.graph.GraphModule)``."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._stage_id: int | None = None
        self._entry: Any = None
        self._recomputed: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_module": self._module, "_stage_id": self._stage_id, "_entry": None, "_recomputed": None}

    @property
    def stage_id(self) -> int | None:
        """The pipeline stage of the module and its parts, counted from 0."""
        return self._stage_id

    @stage_id.setter
    def stage_id(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise StrategyError(
                f"{type(self._module).__name__}.config.stage_id = {value!r}: stages are whole numbers from 0 on. "
                "Number them 0, 1, 2 and so on in the order of the forward."
            )
        self._stage_id = value

    def set_stage(self, stage_id: int | None = None, placement: Placement | None = None) -> None:
        """Set the stage, and the ``placement`` to which a call of the module boxes its inputs.

        The forward then needs no ``to_global`` between stages. The parameters keep their placement.
        """
        if stage_id is not None:
            self.stage_id = stage_id
        if self._entry is not None:
            self._entry.remove()
            self._entry = None
        if placement is not None:
            self._entry = self._module.register_forward_pre_hook(partial(_box_inputs, placement), with_kwargs=True)

    @property
    def activation_checkpointing(self) -> bool:
        """Whether the module's activations are computed again in backward instead of being kept."""
        return self._recomputed is not None

    @activation_checkpointing.setter
    def activation_checkpointing(self, value: bool) -> None:
        if self._recomputed is not None:
            self._recomputed.remove()
        self._recomputed = Recomputed(self._module) if value else None


def _box_inputs(placement: Placement, module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(lambda leaf: _boxed(leaf, placement), (args, kwargs))


def _boxed(leaf: Any, placement: Placement) -> Any:
    """A global tensor on ``placement`` with its old sbp, or with B if the grids have different numbers of axes."""
    if not isinstance(leaf, GlobalTensor) or leaf.placement == placement:
        return leaf
    sbp = leaf.sbp if leaf.placement.num_axes == placement.num_axes else ("B",) * placement.num_axes
    return GlobalTensor.to_global(leaf, placement, sbp)


def config_of(module: nn.Module) -> ModuleConfig | None:
    """The settings of a module for graphs; None if it has none."""
    config = module.__dict__.get("config")
    return config if isinstance(config, ModuleConfig) else None


def is_recomputed(module: nn.Module) -> bool:
    """Whether ``module`` or a part of it has ``activation_checkpointing``."""
    return any(config is not None and config.activation_checkpointing for config in map(config_of, module.modules()))
