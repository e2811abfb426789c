"""What must hold for a replay: the strategies, modes and frozen parameters of the modules that a step calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from workbench.tensors.global_tensor import local_torch
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
