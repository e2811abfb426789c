"""``optimizer.state_dict()``: state of which each rank holds a part is global there, and knows which part it is.

As plain tensors, the parts of one rank would look like everyone's: a file of rank 0, loaded on every rank, would give
all of them its moments. ``load_state_dict`` takes global state and that of whole parameters (``part_of``).

Under ``offload=optimizer`` the parts stay in host memory. ``full_tensor()`` brings this rank's part to the device and
makes the whole there, so device memory has to hold the wholes that are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from workbench.errors import LayoutError
from workbench.tensors.global_tensor import GlobalTensor, plain, wrap
from workbench.tensors.patch_table import patch
from workbench.training.gradients.nested_steps import distinct, is_within_step
from workbench.training.gradients.optim import put_back
from workbench.training.gradients.optimizer_kinds import keeps_parts
from workbench.training.gradients.shard import state_spec


def _as_global(parameter: Any, value: Any) -> Any:
    if not isinstance(parameter, GlobalTensor) or type(value) is not torch.Tensor or value.dim() == 0:
        return value
    spec = state_spec(parameter)
    if spec.is_whole_everywhere or tuple(value.shape) != spec.local_shape:
        return value
    made = wrap(plain(value), spec)
    made._is_read_in_place = True  # each stage of a pipeline has entries of its own
    return made


def _after_failed_steps(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer and those within it whose step has raised: parts are in the places of their parameters."""
    swaps = [(each, each.__dict__.get("_workbench_swap")) for each in distinct(optimizer)]
    held = [each for each, swap in swaps if swap is not None and swap.held is not None]
    return [each for each in held if not is_within_step(each)]


def _for_parameters(torchs_own: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(torchs_own)
    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        for each in _after_failed_steps(self):
            put_back(each)
        torchs_own(self, state_dict)

    return load_state_dict


def _with_global_state(torchs_own: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(torchs_own)
    def state_dict(self: Optimizer) -> dict[str, Any]:
        for each in _after_failed_steps(self):
            if each.__dict__["_workbench_swap"].is_sharded:  # that is an exchange, and one rank may call this alone
                raise LayoutError(
                    f"{type(each).__name__}.state_dict(): its last step raised, and 1 rank cannot end it under zero=1 "
                    "and zero=2. Call optimizer.zero_grad() on every rank first, or wb.checkpoint.save."
                )
            put_back(each)
        found = torchs_own(self)
        if not keeps_parts(self):
            return found
        parameters = dict(enumerate(p for group in self.param_groups for p in group["params"]))
        found["state"] = {
            key: {name: _as_global(parameters.get(key), value) for name, value in state.items()}
            if isinstance(state, dict)
            else state
            for key, state in found["state"].items()
        }
        return found

    return state_dict


patch(
    "torch.optim.Optimizer.state_dict",
    "plain parts of one rank's state would look like everyone's",
    _with_global_state,
)
patch(
    "torch.optim.Optimizer.load_state_dict",
    "a step that raised has left local parts in the place of parameters",
    _for_parameters,
)
