"""What a recorded step depends on besides its inputs: its modules' modes and strategies, and what learns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.training.gradients.overlap import GradientReducer
from workbench.training.gradients.reduction import forget_sums
from workbench.training.strategies.state import STATE


class Guards:
    """Of the parallelized modules that a step calls, as far as it has been run."""

    def __init__(self) -> None:
        self._roots: list[nn.Module] = []
        self._parts: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []

    def add(self, modules: Iterable[nn.Module]) -> None:
        """The step has called these."""
        for module in modules:
            if not any(module is root for root in self._roots):
                self._roots.append(module)
                self._parts += module.modules()
                self._parameters += module.parameters()

    def now(self) -> Any:
        """As long as this stays, the step does what it did."""
        with local_torch():
            return (
                tuple([root.__dict__.get(STATE) for root in self._roots]),
                tuple([part.training for part in self._parts]),
                tuple([parameter.requires_grad for parameter in self._parameters]),
            )


def end_sums(modules: Iterable[nn.Module]) -> None:
    """Wait for the sums of gradients that the step has begun and no optimizer in it has taken."""
    for module in modules:
        parameters = [p for p in module.parameters() if isinstance(p, GlobalTensor)]
        for reducer in {id(w): w for p in parameters if (w := GradientReducer.of(p)) is not None}.values():
            reducer.drain()
        forget_sums(parameters)
