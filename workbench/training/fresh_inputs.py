"""Copies of inputs for runs of a forward besides those of the program: a model may write to its batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only


def fresh(inputs: Any) -> Any:
    """The same inputs in tensors of their own, with their gradients' way back.

    >>> given = [torch.zeros(2)]
    >>> _ = fresh(given)[0].add_(1)
    >>> given
    [tensor([0., 0.])]
    """
    return tree_map_only(torch.Tensor, torch.clone, inputs)
