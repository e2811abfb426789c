"""The conditions of a replay besides its inputs: modes and strategies of the modules, and which parameters take
gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.training.gradients.overlap import GradientReducer
from workbench.training.gradients.reduction import forget_sums
from workbench.training.strategies.state import STATE


class Guards:
    """The guards of the parallelized modules that a step has called so far."""

    def __init__(self) -> None:
        self._roots: list[nn.Module] = []
        self._parts: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Add modules that the step has called."""
        for module in modules:
            if not any(module is root for root in self._roots):
                self._roots.append(module)
                self._parts += module.modules()
                self._parameters += module.parameters()

    def now(self) -> Any:
        """The present values. While they are the same, a replay is allowed."""
        with local_torch():
            return (
                tuple([root.__dict__.get(STATE) for root in self._roots]),
                tuple([part.training for part in self._parts]),
                tuple([parameter.requires_grad for parameter in self._parameters]),
            )


def end_sums(modules: Iterable[nn.Module]) -> None:
    """Wait for sums of gradients that the step has begun and none of its optimizers has used."""
    for module in modules:
        parameters = [p for p in module.parameters() if isinstance(p, GlobalTensor)]
        for reducer in {id(w): w for p in parameters if (w := GradientReducer.of(p)) is not None}.values():
            reducer.drain()
        forget_sums(parameters)
