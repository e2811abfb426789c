"""``flow.nn``: functions for job functions (``relu``, ``conv2d``, ...), and modules and graphs for eager programs."""

from __future__ import annotations

from typing import Any

_WHERE = {
    "workbench.flow.nn.functional": [
        "avg_pool2d", "bias_add", "conv2d", "dropout", "max_pool2d", "relu", "sigmoid", "softmax",
        "sparse_softmax_cross_entropy_with_logits",
    ],
}  # fmt: skip
"""Module -> the names of ``flow.nn`` that it holds."""

_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
