"""A small training job, and the same in plain torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import workbench.flow.typing as tp
from workbench import flow
from workbench.testing import run_ranks

ROWS, COLUMNS = 6, 5
X = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
Y = np.arange(ROWS, dtype=np.int32) % 3
Images = tp.Numpy.Placeholder((ROWS, COLUMNS))
Labels = tp.Numpy.Placeholder((ROWS,), dtype=flow.int32)
NORMAL = flow.truncated_normal(0.5)


def train_with(rule: Any, distribute: Any = None) -> Any:
    @flow.global_function(type="train")
    def job(x: Images, labels: Labels) -> tp.Numpy:
        hidden = flow.layers.dense(
            x, 7, flow.math.tanh, kernel_initializer=NORMAL, name="a", model_distribute=distribute
        )
        logits = flow.layers.dense(hidden, 3, kernel_initializer=NORMAL, name="b")
        loss = flow.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        rule.minimize(loss)
        return loss

    return job


def torch_losses(make: Any, rates: list[float], max_norm: float | None = None) -> list[np.ndarray]:
    """The job of ``train_with`` in plain torch; ``make`` gives the optimizer."""
    shapes = {"a-weight": (7, COLUMNS), "a-bias": (7,), "b-weight": (3, 7), "b-bias": (3,)}

    @flow.global_function()
    def initial() -> tp.Numpy:
        return {n: flow.get_variable(n, s, initializer=NORMAL if len(s) == 2 else None) for n, s in shapes.items()}

    values = run_ranks(lambda rank: initial(), 1)[0]
    parameters = [torch.from_numpy(values[name]).requires_grad_() for name in shapes]
    optimizer, losses = make(parameters), []
    for rate in rates:
        a, a0, b, b0 = parameters
        logits = F.linear(F.linear(torch.from_numpy(X), a, a0).tanh(), b, b0)
        loss = F.cross_entropy(logits, torch.from_numpy(Y).long(), reduction="none")
        optimizer.zero_grad()
        loss.mean().backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(loss.detach().numpy())
    return losses
