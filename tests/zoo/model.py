"""A model of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Model:
    """A model that nobody here wrote.

    Attributes:
        name: its own name in its library, with what it is trained for.
        library: where it comes from.
        make: returns the module with random weights and a batch: keyword arguments, or inputs and targets as a tuple.
        loss_fn: (output, targets) -> loss; None where the module returns its own.
    """

    name: str
    library: str
    make: Callable[[], tuple[nn.Module, Any]]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
