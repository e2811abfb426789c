"""Recordings of a captured step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec

from workbench.tensors.global_tensor import GlobalTensor, Spec, local_torch
from workbench.tensors.tensor_state import memory_of
from workbench.training.capture.optimizer_steps import OptimizerStep
from workbench.training.capture.read_numbers import Numbers
from workbench.training.capture.trace import Trace
from workbench.transport.traffic import TrafficCount


@dataclass(slots=True)
class Recording:
    """One trace, and what else a replay needs.

    Attributes:
        strides: of the step's inputs on this rank; None for those that it writes to.
        leaves: of autograd, each with the number of the output that becomes its gradient, and the spec of a shard.
        used_grads: leaves whose gradient the trace reads; these are its last inputs.
        cleared: leaves whose earlier gradient the step drops.
        placeholders: leaves of other ranks, each with whether its owner has a gradient when the step ends; also those
            whose gradient the step drops.
        results: for every leaf of the step's result: whether it is a tensor, and the spec of a global one, or the
            constant itself.
        addresses: the tensors that the step works on, each with its address.
        memory: those that all ranks know, each with what stands for its memory: a rank without a part has no address.
        written: tensors among them that the step writes to.
        steps: the optimizers' steps.
        traffic: exchanges and bytes of one step.
    """

    trace: Trace
    run: Callable[..., Sequence[torch.Tensor]]
    strides: list[tuple[int, ...] | None]
    leaves: list[tuple[torch.Tensor, int, Spec | None]]
    used_grads: list[torch.Tensor]
    cleared: list[torch.Tensor]
    placeholders: list[tuple[GlobalTensor, bool]]
    results: list[tuple[bool, Any]]
    structure: TreeSpec
    addresses: list[tuple[torch.Tensor, int]]
    memory: list[tuple[GlobalTensor, object]]
    written: list[torch.Tensor]
    steps: list[OptimizerStep]
    traffic: TrafficCount

    def fits(self) -> bool:
        """Whether every tensor that the step works on has the memory that it had, on all ranks."""
        with local_torch():
            is_same = all(memory_of(tensor) is memory for tensor, memory in self.memory)
            return is_same and all(tensor.data_ptr() == address for tensor, address in self.addresses)


@dataclass(slots=True, eq=False)
class InputKind:
    """The recordings for one kind of inputs, under the same guards and numbers.

    Attributes:
        numbers: that the recordings have read. Without a recording there are none, as a normal call may replay blocks
            (see ``forward_cache``) on some ranks and not on others.
        leaves: the leaves of autograd that the step works on.
        held: the parameters and buffers of the modules that it calls.
        optimizers: that have stepped in the normal call.
        recordings: by the leaves that take a gradient, and that have one, when the step begins.
    """

    numbers: Numbers
    leaves: list[torch.Tensor]
    held: list[torch.Tensor]
    optimizers: list[Optimizer]
    recordings: dict[tuple[tuple[bool, bool], ...], Recording]
