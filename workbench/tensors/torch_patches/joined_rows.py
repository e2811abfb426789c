"""Linear layers that join all dims but the last into one: of slices of the second dim, that dim would have to move."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from workbench.core.sbp import Split
from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.patch_table import patch


def is_conv1d(kind: type) -> bool:
    """Whether a class is the linear layer of GPT-2 in ``transformers``, whose weight is (inputs, outputs)."""
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _without_joining(forward: Any) -> Any:
    @functools.wraps(forward)
    def keep_dims(self: Any, x: torch.Tensor) -> Any:
        if type(x) is GlobalTensor and any(
            isinstance(e, Split) and 0 < e.dim < x.dim() - 1 for e in x._spec.layout.sbp
        ):
            return F.linear(x, self.weight.t(), self.bias)
        return forward(self, x)

    return keep_dims


patch(
    "transformers.pytorch_utils.Conv1D.forward",
    "it joins samples and sequence in one dim: slices of the sequence would move to other ranks for that",
    _without_joining,
)
