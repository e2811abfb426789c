"""Saved tensors that hooks of saved tensors keep as they are. torch does not look at their versions, because it cannot
know what hooks keep.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from workbench.tensors.global_tensor import local_torch
from workbench.tensors.hidden_from_modes import hidden_from_modes


class Kept(NamedTuple):
    """A saved tensor, and its version when it was saved."""

    tensor: torch.Tensor
    version: int


def keep(tensor: torch.Tensor) -> Kept:
    """What a hook returns for a tensor: not the tensor itself, which may hold the node that saves it."""
    with local_torch(), torch.no_grad(), hidden_from_modes():
        return Kept(tensor if tensor.is_leaf else tensor.detach(), tensor._version)


def unchanged(kept: Kept, advice: str = "") -> torch.Tensor:
    """The tensor, for backward.

    Raises:
        RuntimeError: it has been written to since; torch's error.
    """
    with local_torch():
        if kept.tensor._version == kept.version:
            return kept.tensor
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tuple(kept.tensor.shape)} is at version {kept.tensor._version}; expected version {kept.version} instead."
            f"{advice}"
        )
