"""Which call of an optimizer's step is the outermost one: it alone sums gradients and exchanges places.

torch puts hooks around the ``step`` of each class that has had an instance in the process. So a step that calls
``super().step()`` runs the hooks twice where the base class had an instance, and once elsewhere, as on a rank whose
process was replaced. A second sum would wait for ranks that make none, and lose what the outer step did to gradients.

A step may also call the step of another optimizer, of the same parameters: chains of optimizers, warm-up, lookahead.
Then the inner one sums and exchanges, and the outer one works on the parameters themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves


def is_nested(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer called the step whose hook calls this function.

    Only the stack can tell: after a step that raised, no hook runs.
    """
    return _is_behind(optimizer, sys._getframe(2).f_back)  # of torch's function around a step, which calls the hook


def step_without_hooks(self: Optimizer, step: Callable[[Any], Any]) -> None:
    """Call a class's own ``step``, without hooks of this one or of those that it calls."""
    step(self)


_AROUND = Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""Of torch's function around a step, which calls the hooks."""


def is_within_step(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer has called, at any depth, the caller of this function."""
    return _is_behind(optimizer, sys._getframe(1).f_back)


def _is_behind(optimizer: Optimizer, frame: FrameType | None) -> bool:
    """Whether a step of the optimizer is among the calls from a frame outwards."""
    while frame is not None:
        if frame.f_code in (_AROUND, step_without_hooks.__code__) and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def optimizers_within(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that one has as attributes, or in a list or dict that is one; with those that these have."""
    found: list[Optimizer] = []
    waiting = [optimizer]
    while waiting:
        for name, value in vars(waiting.pop()).items():
            if isinstance(value, dict):
                values = [] if name == "state" else list(value.values())
            else:
                values = list(value) if isinstance(value, (list, tuple, set)) else [value]
            new = [v for v in values if isinstance(v, Optimizer) and v is not optimizer and v not in found]
            found += new
            waiting += new
    return found


def distinct(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer and those within it. Of a wrapper that shows the groups and state of another one, only that one."""
    found: dict[tuple[int, ...], Optimizer] = {}
    for each in (optimizer, *optimizers_within(optimizer)):
        key = (id(each.state), *map(id, each.param_groups))
        if key not in found or "state" not in vars(found[key]):
            found[key] = each
    return list(found.values())


def state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors in the state of an optimizer and of those within it, each once, also those in lists and dictionaries.

    >>> optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    >>> optimizer.state["newest"] = [torch.ones(3), {"step": 3, "sum": torch.ones(4)}]
    >>> [len(tensor) for tensor in state_tensors(optimizer)]
    [3, 4]
    """
    leaves = [leaf for each in distinct(optimizer) for leaf in tree_leaves([*each.state.values()])]
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


def holds_another(optimizer: Optimizer) -> bool:
    """Whether an optimizer has another one, of some of its parameters.

    >>> model = nn.Linear(2, 1)
    >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> outer = torch.optim.Adam(model.parameters())
    >>> before = holds_another(outer)
    >>> outer.parts = [inner]
    >>> before, holds_another(outer)
    (False, True)
    """
    own = {id(parameter) for parameter in _parameters_of(optimizer)}
    return any(id(p) in own for other in optimizers_within(optimizer) for p in _parameters_of(other))


def _parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
