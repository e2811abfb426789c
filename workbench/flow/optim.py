"""``flow.optim``: torch's optimizers. On global parameters they reduce gradients and step on the local shards."""

from __future__ import annotations

from typing import Any

import torch.optim

from workbench.flow.world_join import join_if_launched
from workbench.training import torch_patches  # noqa: F401 - completes GlobalTensor and torch

join_if_launched()


def __getattr__(name: str) -> Any:
    if name.startswith("__") or not hasattr(torch.optim, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has what torch.optim has.")
    return getattr(torch.optim, name)


def __dir__() -> list[str]:
    return dir(torch.optim)
