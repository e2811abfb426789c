"""``linear_cross_entropy``, decomposed. torch's chunked version saves memory, but writes into plain buffers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from workbench.tensors.dispatch.dispatcher import decompose
from workbench.tensors.dispatch.registry import composite

if hasattr(F, "linear_cross_entropy"):  # torch 2.13

    @composite("linear_cross_entropy")
    def linear_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> Any:
        """``cross_entropy(linear(...))``; torch's chunks would write gradients into plain buffers."""
        body = decompose(F.linear_cross_entropy)
        return NotImplemented if body is None else body(*args, **kwargs)
