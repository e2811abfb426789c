"""Another strategy for a module that is being trained: the optimizer's state goes where its parameters go.

Parameters that are global already stay the same objects, so optimizers and schedulers go on with them. State is plain,
this rank's part, so what it is a part of is written down before the parameters move, and it is boxed after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from workbench.errors import StrategyError
from workbench.tensors.boxing.fused import box_many
from workbench.tensors.global_tensor import GlobalTensor, Spec, new_placeholder, plain, spec_of, wrap
from workbench.tensors.object_collectives import all_gather_object
from workbench.tensors.world import World
from workbench.training.gradients.block_state import refuse_block_state
from workbench.training.gradients.failed_steps import end_failed_steps
from workbench.training.gradients.optim import forget_layouts
from workbench.training.gradients.optimizer_kinds import keeps_parts
from workbench.training.gradients.shard import spec_like, state_spec
from workbench.training.gradients.stale_optimizer import check_state_layouts
from workbench.training.gradients.state_on_host import bring_back
from workbench.training.strategies.shard_parameters import shard_tensor


@dataclass(frozen=True, slots=True)
class _Element:
    """Global state, and parts of state with a value per element of the parameter, as ranks that hold none of it hear
    of it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Scalar:
    """State that is whole on every rank: a count of steps, or statistics that a step on global tensors has made."""

    value: torch.Tensor
    is_on_device: bool


def states_of(optimizers: Sequence[Optimizer], module: nn.Module, world: World) -> list[OptimizerState]:
    """Those of optimizers over the module's parameters. All ranks call it.

    A wrapper may show the state of the optimizer that it holds as its own. Such a state moves once, with the optimizer
    that holds it.
    """
    end_failed_steps(optimizers, world)
    seen: set[int] = set()
    states = []
    for optimizer in sorted(optimizers, key=_is_shown):
        stepped = _specs_of_last_step(optimizer)
        _check_others(optimizer, module, stepped)
        bring_back(optimizer)  # which may make another object for the state
        moves = id(optimizer.state) not in seen
        states.append(OptimizerState(optimizer, module, world, stepped, moves))
        seen.add(id(optimizer.state))
    return states


def _specs_of_last_step(optimizer: Optimizer) -> dict[GlobalTensor, Spec]:
    """How state lies since the last step, by parameter: a change of strategy without the optimizer did not move it.
    Nothing where no step was made, or state was loaded since.
    """
    swap = vars(optimizer).get("_workbench_swap")
    if swap is None or optimizer.state is not swap.state:
        return {}
    return dict(zip(swap.parameters, swap.specs, strict=True))


def _check_others(optimizer: Optimizer, module: nn.Module, stepped: dict[GlobalTensor, Spec]) -> None:
    """Refuse state of other modules' parameters that have other layouts now: the optimizer is about to forget theirs.

    Raises:
        LayoutError: on all ranks, if one has such state.
    """
    own = {id(parameter) for parameter in module.parameters()}
    others = {p: spec for p, spec in stepped.items() if id(p) not in own}
    check_state_layouts(optimizer, list(others), list(others.values()))


def _is_shown(optimizer: Optimizer) -> tuple[bool, int]:
    """Sorts those first that hold their state, of these the ones with the most parameters."""
    return "state" not in vars(optimizer), -sum(len(group["params"]) for group in optimizer.param_groups)


class OptimizerState:
    """The state of an optimizer while its parameters change their layouts: of those that are the module's. Others, of a
    loss for example, stay as they are. ``stepped``: see ``_specs_of_last_step``. ``moves``: no other optimizer has
    moved it.
    """

    def __init__(
        self, optimizer: Optimizer, module: nn.Module, world: World, stepped: dict[GlobalTensor, Spec], moves: bool
    ) -> None:
        self.optimizer, self.world, self.moves = optimizer, world, moves
        self.keeps_parts = keeps_parts(optimizer)
        own = list(module.parameters())
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self.parameters = [p for p in own if id(p) in held]
        if held and not self.parameters:
            raise StrategyError(
                f"parallelize(optimizer=): {len(held)} of the optimizer's {len(held)} parameters are not among the "
                f"module's {len(own)}. The state moves with the parameters: pass the module that has them. Optimizers "
                "from before the first wb.parallelize of a module are given in that call, several as a list."
            )
        refuse_block_state(optimizer, "parallelize(optimizer=)", StrategyError)
        self.specs = [_spec_of_state(p, stepped) if isinstance(p, GlobalTensor) else None for p in self.parameters]
        self._moves: list[tuple[dict[str, Any], str, Spec, bool]] = []
        mine = [self._described(p, spec) for p, spec in zip(self.parameters, self.specs, strict=True)]
        every = all_gather_object(mine, world, "state of an optimizer")
        self.described = [next((d for d in found if d is not None), None) for found in zip(*every, strict=True)]

    def _described(self, parameter: torch.Tensor, spec: Spec | None) -> dict[str, Any] | None:
        """Per-element state by its dtype, the rest by its value; None on ranks that have none, or of another stage:
        what an optimizer makes when it is made is there too, and stays as it was.
        """
        state = self.optimizer.state.get(parameter)
        if not state or (spec is not None and spec.is_placeholder and self.keeps_parts):
            return None
        return {key: _describe(key, value, parameter, spec, self.keeps_parts) for key, value in state.items()}

    def reshard(self, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
        """Bring the state to where the parameters are now; ``replaced`` has the new ones by the old."""
        if self.moves:
            self._move(replaced)
        for group in self.optimizer.param_groups:
            group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
        forget_layouts(self.optimizer)

    def _move(self, replaced: dict[nn.Parameter, nn.Parameter]) -> None:
        states = [self.optimizer.state.pop(parameter, {}) for parameter in self.parameters]
        with torch.no_grad():
            for old, state, spec, described in zip(self.parameters, states, self.specs, self.described, strict=True):
                if described is not None:
                    parameter = replaced.get(old, old)
                    values = self._resharded(state, parameter, spec, described)
                    is_placeholder = isinstance(parameter, GlobalTensor) and state_spec(parameter).is_placeholder
                    if not (is_placeholder and self.keeps_parts):
                        self.optimizer.state[parameter] = values
            self._box()

    def _resharded(
        self, values: dict[str, Any], parameter: torch.Tensor, spec: Spec | None, described: dict[str, Any]
    ) -> dict[str, Any]:
        moved: dict[str, Any] = {}
        has_others = spec is not None and spec.is_placeholder and self.keeps_parts
        for key, what in described.items():
            value = values.get(key, what)
            if not isinstance(what, _Element) and (value is what or has_others):
                value = what
                if isinstance(what, _Scalar):
                    value = what.value.to(self.world.device) if what.is_on_device else what.value
            is_global = isinstance(value, GlobalTensor)
            if isinstance(what, _Element) and isinstance(parameter, GlobalTensor):
                if is_global or spec is not None:
                    target = spec_like(state_spec(parameter), what.shape)
                    self._moves.append((moved, key, target, is_global))
                if is_global:
                    value = value.detach()
                elif spec is None:
                    value = shard_tensor(value, state_spec(parameter).layout, self.world)
                    value = plain(value) if self.keeps_parts else value
                elif isinstance(value, _Element):
                    value = wrap(new_placeholder(spec.shape, what.dtype, self.world.device), spec)
                else:
                    value = wrap(value.detach(), spec)
            moved[key] = value
        return moved

    def _box(self) -> None:
        """Box the state of all parameters together."""
        boxed = box_many(
            [state[key] for state, key, *_ in self._moves], [target for *_, target, _ in self._moves]
        ).wait()
        for (state, key, _, is_global), value in zip(self._moves, boxed, strict=True):
            state[key] = value if is_global else plain(value)


def _spec_of_state(parameter: GlobalTensor, stepped: dict[GlobalTensor, Spec]) -> Spec:
    spec = state_spec(parameter)
    return spec_of(spec.world, stepped[parameter].layout, spec.shape) if parameter in stepped else spec


def _describe(key: str, value: Any, parameter: torch.Tensor, spec: Spec | None, is_part: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        kind = torch.Tensor if is_part else GlobalTensor
        inside = [leaf for leaf in tree_leaves(value) if isinstance(leaf, kind) and leaf.dim()]
        if inside:
            raise StrategyError(
                f"parallelize(optimizer=): optimizer state {key!r} of a parameter {tuple(parameter.shape)} is a "
                f"{type(value).__name__} with {len(inside)} tensors. Only tensors that are values of the state itself "
                "move to another layout. Save and load it with wb.checkpoint, or make a new optimizer after "
                "wb.parallelize."
            )
        return value
    if isinstance(value, GlobalTensor):
        return _Element(value.dtype, tuple(value.shape))
    local_shape = tuple(parameter.shape) if spec is None else spec.local_shape
    if value.dim() and tuple(value.shape) == local_shape and (is_part or spec is None):
        return _Element(value.dtype, tuple(parameter.shape))
    if value.dim() == 0 or not is_part or spec is None or spec.layout.is_broadcast:
        return _Scalar(value.detach().cpu(), value.device.type != "cpu")
    raise StrategyError(
        f"parallelize: optimizer state {key!r} of a parameter {tuple(parameter.shape)} has shape {tuple(value.shape)} "
        f"on this rank, which holds {local_shape} of it. Only scalars and state per element can be split again. "
        "Make a new optimizer after wb.parallelize, or keep this parameter whole (data)."
    )
