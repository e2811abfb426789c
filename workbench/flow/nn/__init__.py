"""``flow.nn``: functions for job functions (``relu``, ``conv2d``, ...), and modules and graphs for eager programs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from workbench.lazy import lazy_names

_HOMES = {
    "workbench.flow.nn.functions": [
        "avg_pool2d", "bias_add", "conv2d", "dropout", "leaky_relu", "max_pool2d", "sigmoid_cross_entropy_with_logits",
        "softmax", "softmax_cross_entropy_with_logits", "sparse_softmax_cross_entropy_with_logits",
    ],
    "workbench.flow.math": ["relu", "sigmoid"],
    "workbench.flow.nn.modules": ["Module", "modules="],
    "workbench.flow.nn.graph": ["Graph"],
}  # fmt: skip
"""Module -> the names of ``flow.nn`` that it holds."""


def _from_torch(name: str) -> Any:
    """A module of torch with the methods of this ``Module``. Functions and namespaces of torch.nn are unchanged."""
    return import_module(f"{__name__}.modules").from_torch(name)


__getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES, otherwise=_from_torch)
