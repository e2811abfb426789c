"""The order in which a forward calls the layers of a model, which need not be the order in which it lists them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from workbench.tensors.dispatch.aliasing import ALIASING
from workbench.tensors.dispatch.registry import fold_name

Calls = dict[str, tuple[int, int]]
"""By path of a module: the positions of its first call, and of the last one on what other layers have made."""


@contextmanager
def recorded_calls(model: nn.Module) -> Iterator[Calls]:
    """The calls of all modules while this lasts; forwards run with gradients.

    A table that is called again on the inputs of the model has one position, a layer that is called again on what
    other layers have made has two; so has one to whose results those of later layers are added in place.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with recorded_calls(model) as calls:
    ...     _ = model(torch.ones(1, 2))
    >>> calls
    {'': (0, 0), '0': (1, 1), '1': (2, 2)}
    """
    calls: Calls = {}
    position = 0
    writes = _Writes(calls, model)

    def record(path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal position
        if path not in calls:
            calls[path] = position, position
        elif any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))):
            calls[path] = calls[path][0], position
        if next(module.parameters(recurse=False), None) is not None:
            writes.latest = path, position
        position += 1

    handles = [
        module.register_forward_pre_hook(partial(record, path), prepend=True, with_kwargs=True)
        for path, module in model.named_modules()
    ]
    try:
        with torch.enable_grad(), writes:
            yield calls
    finally:
        for handle in handles:
            handle.remove()


class _Writes(TorchFunctionMode):
    """Sees weights that are used without their layer, and what is written in place. What stage a tensor is on is
    decided where it is made, so the layers of what is written to it may not come later.

    Attributes:
        latest: the last layer with parameters that was called, and its position.
    """

    def __init__(self, calls: Calls, model: nn.Module) -> None:
        super().__init__()
        self.latest = ("", -1)
        self._calls, self._made = calls, WeakIdKeyDictionary()
        self._owners: dict[int, list[str]] = {}
        for path, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), []).append(path)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not torch._C._is_torch_function_enabled():  # of an exchange or a gathering, which not all ranks have
            return result
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):  # not of weight.dtype
            for operand in operands:
                self._add_use(self._owners.get(id(operand), []))
        name = fold_name(func)
        if name.in_place:
            self._add_write(operands)
        elif operands:
            of_base = self._made.get(operands[0]) if name.folded in ALIASING else None
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and leaf not in self._made:
                    self._made[leaf] = of_base or self.latest
        return result

    def _add_use(self, owners: list[str]) -> None:
        """The first use of a weight whose layer is not called (``layer.weight[i]``) counts as the layer's call."""
        if owners and not any(path in self._calls for path in owners):
            position = max(self.latest[1], 0)
            self._calls[owners[0]] = position, position

    def _add_write(self, operands: list[torch.Tensor]) -> None:
        target, *others = [self._made.get(tensor, ("", -1)) for tensor in operands]
        path, position = target
        last = max((position for _, position in others), default=-1)
        if path and last > position:
            first, before = self._calls[path]
            self._calls[path] = first, max(before, last)
