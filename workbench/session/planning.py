"""The planner's doors for notebooks, panel and command line: from torch models to costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.core.model_costs import ModelCosts

if TYPE_CHECKING:
    from torch import Tensor, nn


def layer_costs(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    loss_fn: Callable[..., Tensor] | None = None,
    targets: Any = None,
    *,
    dtype: str | None = None,
) -> ModelCosts:
    """What a model's layers cost, without a cluster and without weights: ``workbench.runtime.layer_costs``."""
    from workbench.runtime.layer_costs import layer_costs as count

    return count(model, inputs, loss_fn, targets, dtype=dtype)


__all__ = ["layer_costs"]
