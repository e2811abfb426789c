"""The learning rate of an optimizer's steps, and the norm of the gradients, without an exchange and without a wait."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from workbench.core.step_values import LEARNING_RATE
from workbench.tensors.global_tensor import local_torch
from workbench.tensors.world import joined
from workbench.training.gradients.optim import stepping_gradients
from workbench.training.gradients.step_hooks import call_in_steps


class OptimizerMeter:
    """Reads an optimizer's learning rate in every step, and the norm of its gradients where ``wants_norm``.

    The norm is that of this rank's part: a gradient that several ranks hold counts on one of them, so the root of the
    sum of the ranks' squares is the norm of all gradients. Gradients are those of the step itself: clipped, and without
    the scale of a ``GradScaler``.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> meter = OptimizerMeter(optimizer)
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> meter.wants_norm = True
    >>> optimizer.step(); meter.take()          # gradients: 3 and 4 for the weight, 1 for the bias
    ({'learning_rate': 0.1}, tensor(5.0990))
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.wants_norm = optimizer, False
        self._rate = _learning_rate(optimizer)
        self._norm: torch.Tensor | None = None
        self._handle = call_in_steps(optimizer, self._read)

    def take(self) -> tuple[dict[str, Any], torch.Tensor | None]:
        """Of the last step: its learning rate (of the first group) by its name, and once the norm, on its device, if it
        was measured.
        """
        norm, self._norm = self._norm, None
        return self._rate, norm

    def end(self) -> None:
        """Read no more."""
        self._handle.remove()

    def _read(self, optimizer: Optimizer) -> None:
        self._rate = _learning_rate(optimizer)
        gradients = stepping_gradients(optimizer) if self.wants_norm else None
        if gradients is None:
            return
        here = joined()
        with torch.no_grad(), local_torch():
            parts = [grad.coalesce().values() if grad.is_sparse else grad for grad in gradients]
            norms = list(torch._foreach_norm(parts)) if parts else []
            zero = torch.zeros((), device="cpu" if here is None else here.device)
            norm = torch.linalg.vector_norm(torch.stack([zero, *(norm.float() for norm in norms)]))
            scale = getattr(optimizer, "grad_scale", None)  # by which a fused step divides, in place of a GradScaler
            self._norm = norm if scale is None else norm / scale


def _learning_rate(optimizer: Optimizer) -> dict[str, Any]:
    rate = optimizer.param_groups[0].get("lr")
    return {} if rate is None else {LEARNING_RATE: rate.detach().clone() if isinstance(rate, torch.Tensor) else rate}
