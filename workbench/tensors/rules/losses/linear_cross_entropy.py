"""Functions that torch writes twice, once for memory's sake: global tensors take the way made of other functions."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from workbench.tensors.dispatch.dispatcher import decompose
from workbench.tensors.dispatch.registry import composite

if hasattr(F, "linear_cross_entropy"):  # torch 2.13

    @composite("linear_cross_entropy")
    def linear_cross_entropy(*args: Any, options: Any = None, **kwargs: Any) -> Any:
        """``cross_entropy(linear(...))``; in chunks it would write its gradients into plain buffers."""
        body = decompose(F.linear_cross_entropy)
        return NotImplemented if body is None else body(*args, **kwargs)
