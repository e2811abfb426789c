"""Fake tensors: a model and its batch with shapes and dtypes, but no values and no memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode


class FakeTensorConverter:
    """Tensors, and whatever holds some, as fake ones of one mode; a tensor that comes twice has one fake."""

    def __init__(self, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
        self.mode, self.dtype = mode, dtype
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, value: Any) -> Any:
        """The value with every tensor replaced."""
        return torch.utils._pytree.tree_map_only(torch.Tensor, self._one, value)

    def _one(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._made:
            dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
            with self.mode:
                fake = torch.empty(tensor.shape, dtype=dtype, device="cpu", requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = tensor, fake
        return self._made[id(tensor)][1]


def fake_state(module: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Fake tensors for all parameters and buffers by name; tied ones share theirs."""
    everything = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return FakeTensorConverter(mode, dtype)(dict(everything))


@contextmanager
def without_log() -> Iterator[None]:
    """Torch writes a traceback of its own where a function fails on fake tensors; who asked gets an error anyway."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)
