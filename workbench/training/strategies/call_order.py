"""The order in which a forward calls the layers of a model, which need not be the order in which it lists them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

Calls = dict[str, tuple[int, int]]
"""By path of a module: the positions of its first call, and of the last one on what other layers have made."""


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[Calls]:
    """The calls of all modules while this lasts; forwards run with gradients.

    A table that is called again on the inputs of the model has one position, a layer that is called again on what
    other layers have made has two.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with recorded_calls(model) as calls:
    ...     _ = model(torch.ones(1, 2))
    >>> calls
    {'': (0, 0), '0': (1, 1), '1': (2, 2)}
    """
    calls: Calls = {}
    position = 0

    def record(path: str, args: Any, kwargs: Any) -> None:
        nonlocal position
        if path not in calls:
            calls[path] = position, position
        elif any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))):
            calls[path] = calls[path][0], position
        position += 1

    handles = [_hook(module, path, record) for path, module in model.named_modules()]
    try:
        with torch.enable_grad():
            yield calls
    finally:
        for handle in handles:
            handle.remove()


def _hook(module: nn.Module, path: str, record: Any) -> Any:
    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        record(path, args, kwargs)

    return module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


__all__ = ["Calls", "recorded_calls"]
