"""What runs before an optimizer's step: hooks of users, which see the parameters, then the exchange, then its readers.

torch runs hooks of all optimizers before those of one. So the hook that belongs to all of them makes the exchange the
last hook of the one that steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

Hook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], Any]
_EXCHANGE: Any = "the exchange of places"
"""Its key; those of torch are numbers."""


def put_behind_hooks(optimizer: Optimizer, exchange: Hook) -> None:
    """Let ``exchange`` be the last hook of an optimizer that is about to step; torch has not begun with its hooks."""
    hooks: dict[Any, Hook] = optimizer._optimizer_step_pre_hooks
    hooks.pop(_EXCHANGE, None)
    hooks[_EXCHANGE] = exchange


def remove_from_hooks(optimizer: Optimizer) -> None:
    """Leave an optimizer with the hooks of its user only."""
    hooks: dict[Any, Hook] = optimizer._optimizer_step_pre_hooks
    hooks.pop(_EXCHANGE, None)


def call_in_steps(optimizer: Optimizer, reader: Callable[[Optimizer], None]) -> RemovableHandle:
    """Call ``reader`` in each step of an optimizer, when parts with summed gradients are in place of its parameters."""
    readers = optimizer.__dict__.setdefault("_workbench_readers", OrderedDict())
    handle = RemovableHandle(readers)
    readers[handle.id] = reader
    return handle


def readers_of(optimizer: Optimizer) -> list[Callable[[Optimizer], None]]:
    """What ``call_in_steps`` was called with."""
    return list(optimizer.__dict__.get("_workbench_readers", {}).values())


def count_hooks(optimizer: Optimizer) -> int:
    """The number of hooks around a step, of this optimizer and of all optimizers, without those of this package."""
    before: dict[Any, Hook] = optimizer._optimizer_step_pre_hooks
    of_all = [hook for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks) for hook in hooks.values()]
    num_others = sum(not (getattr(hook, "__module__", None) or "").startswith("workbench.") for hook in of_all)
    return len(before) - (_EXCHANGE in before) + len(optimizer._optimizer_step_post_hooks) + num_others
