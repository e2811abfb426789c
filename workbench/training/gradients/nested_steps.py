"""Which call of an optimizer's step is the outermost one: it alone sums gradients and exchanges places.

torch puts hooks around the ``step`` of each class that has had an instance in the process. So a step that calls
``super().step()`` runs the hooks twice where the base class had an instance, and once elsewhere, as on a rank whose
process was replaced. A second sum would wait for ranks that make none, and lose what the outer step did to gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def is_nested(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer called the step whose hook calls this function.

    Only the stack can tell: after a step that raised, no hook runs.
    """
    frame = sys._getframe(2)  # torch's function around a step, which calls the hook
    around, before = (frame.f_code, step_without_hooks.__code__), frame.f_back
    while before is not None:
        if before.f_code in around and before.f_locals.get("self") is optimizer:
            return True
        before = before.f_back
    return False


def step_without_hooks(self: Optimizer, step: Callable[[Any], Any]) -> None:
    """Call a class's own ``step``, without hooks of this one or of those that it calls."""
    step(self)
