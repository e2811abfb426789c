"""What takes the place of one optimizer's parameters during a step."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
from torch.optim import Optimizer

from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.tensors.tensor_state import version_of
from workbench.tensors.torch_patches.copying import make_like, own_attributes
from workbench.training.gradients.nested_steps import holds_another
from workbench.training.gradients.optimizer_kinds import is_elementwise, is_of_torch
from workbench.training.gradients.overlap import GradientReducer
from workbench.training.gradients.shard import shard_of, state_spec
from workbench.training.gradients.state_on_host import state_on_host


class Swap:
    """The local tensors with which one optimizer steps; made again when its parameters change."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.groups = [list(group["params"]) for group in optimizer.param_groups]
        self.parameters = [p for params in self.groups for p in params if isinstance(p, GlobalTensor)]
        self.specs = [state_spec(p) for p in self.parameters]
        self.present = [p for p in self.parameters if not p._spec.is_placeholder]
        self.elementwise = is_elementwise(optimizer)
        self.step = inspect.unwrap(type(optimizer).step)
        self.keeps_on_host = [p._keeps_state_on_host for p in self.parameters]
        self.is_torchs = is_of_torch(optimizer)
        # Parts have no history, which a differentiable step needs.
        is_differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
        self.uses_parameters = is_differentiable or (not self.is_torchs and holds_another(optimizer))
        self.on_host = state_on_host(optimizer, self.parameters, self.is_torchs)
        self.reducers = GradientReducer.of_all(self.parameters)
        self.is_sharded = any(shard_of(p) is not None for p in self.parameters)
        self.is_summed = any(len(p._spec.term_ranks) > 1 for p in self.present)
        stepping = self.present if self.elementwise else self.parameters
        places = {id(p): number for number, p in enumerate(stepping)}
        # For each group: indices of its global parameters among those that step, and its plain parameters.
        self.members = [
            [places.get(id(p), p) for p in params if not isinstance(p, GlobalTensor) or id(p) in places]
            for params in self.groups
        ]
        self.plain = [p for params in self.groups for p in params if not isinstance(p, GlobalTensor)]
        self.stepping = stepping
        self.held: list[Any] | None = None
        self.fused: list[dict[str, Any]] = []
        self.state: Any = None
        self.pairs: list[tuple[GlobalTensor, torch.Tensor]] = []
        self._versions: list[tuple[Any, Any]] = []

    def take_places(self, pairs: list[tuple[GlobalTensor, torch.Tensor]]) -> None:
        """These parts are about to take the places of their parameters.

        To an optimizer that is not torch's they are what the parameters are, also to ``isinstance``, and it may
        have kept the parameters elsewhere: their versions will tell which of the two it has changed.
        """
        self.pairs = pairs
        if not self.is_torchs:
            for owner, part in pairs:
                make_like(part, owner, own_attributes(owner))
            self._versions = [(_version(owner), _version(part)) for owner, part in pairs]

    def end_places(self) -> set[int]:
        """The attributes that an own optimizer has set go to the parameters. Returns the positions of pairs of which it
        has changed the parameter, and not the part.
        """
        if self.is_torchs:
            return set()
        for owner, part in self.pairs:
            vars(owner).update(own_attributes(part))
        now = [(_version(owner), _version(part)) for owner, part in self.pairs]
        before, self._versions = self._versions, []
        return {
            place
            for place, ((owner, part), (owner_now, part_now)) in enumerate(zip(before, now, strict=True))
            if owner != owner_now and part == part_now
        }

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has the same parameters in the same layouts as when this was made, and their reducers
        still observe them: a change of strategy may keep all layouts.
        """
        groups = optimizer.param_groups
        return (
            all(map(operator.is_, self.specs, map(state_spec, self.parameters)))
            and not any(reducer.is_removed for reducer in self.reducers)
            and self.keeps_on_host == [p._keeps_state_on_host for p in self.parameters]
            and len(groups) == len(self.groups)
            and all(
                len(known) == len(group["params"]) and all(map(operator.is_, known, group["params"]))
                for known, group in zip(self.groups, groups, strict=True)
            )
        )


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    with local_torch():
        return version_of(tensor), tensor.data_ptr()
