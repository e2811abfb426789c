"""``flow.nn``: functions for job functions (``relu``, ``conv2d``, ...), and modules and graphs for eager programs."""

from __future__ import annotations

from typing import Any

_WHERE = {
    "workbench.flow.nn.functions": [
        "avg_pool2d", "bias_add", "conv2d", "dropout", "leaky_relu", "max_pool2d", "relu", "sigmoid",
        "sigmoid_cross_entropy_with_logits", "softmax", "softmax_cross_entropy_with_logits",
        "sparse_softmax_cross_entropy_with_logits",
    ],
    "workbench.flow.nn.modules": ["Module"],
    "workbench.flow.nn.graph": ["Graph"],
}  # fmt: skip
"""Module -> the names of ``flow.nn`` that it holds."""

_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    from importlib import import_module
    from importlib.util import find_spec

    if name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
    elif name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    elif find_spec(f"{__name__}.{name}"):
        value = import_module(f"{__name__}.{name}")
    else:  # a module of torch's, with the methods of this Module; a function or a namespace of torch.nn as it is
        value = import_module(f"{__name__}.modules").from_torch(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
