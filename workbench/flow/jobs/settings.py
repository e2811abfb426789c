"""``flow.function_config()``: the settings of a job, which programs set by calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from workbench.errors import JobError
from workbench.flow.old_spellings import warn_old_spelling
from workbench.flow.optimizer import UpdateRule, update_rule_of_conf
from workbench.flow.scope import View, placement


class TrainConfig:
    """``config.train``: the older spelling of the update of variables."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self.conf: Mapping[str, Any] | None = None

    def primary_lr(self, value: float) -> None:
        """The learning rate."""
        warn_old_spelling(
            f"train.primary_lr({value})",
            f"flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [{value}]), momentum=0).minimize(loss) "
            "in the job",
        )
        self.rate = float(value)

    def model_update_conf(self, value: Mapping[str, Any]) -> None:
        """The update rule: ``{"naive_conf": {}}``, ``{"momentum_conf": {"beta": 0.9}}``, ``{"adam_conf": {}}``..."""
        update_rule_of_conf(value, lambda step: 0.0)
        self.conf = value

    @property
    def is_set(self) -> bool:
        """Whether a setting was made."""
        return self.rate is not None or self.conf is not None

    def rule(self, job: str) -> UpdateRule:
        """The update rule for losses of ``losses.add_loss``.

        Raises:
            JobError: there is no learning rate.
        """
        if self.rate is None:
            raise JobError(
                f"{job}: losses.add_loss was called, but the job's config has no learning rate. Set it, "
                "config.train.primary_lr(0.1), or name the rule with the loss: "
                "flow.optimizer.SGD(flow.optimizer.PiecewiseConstantScheduler([], [0.1])).minimize(loss)."
            )
        rate: float = self.rate
        return update_rule_of_conf(self.conf or {"naive_conf": {}}, lambda step: rate)


class FunctionConfig:
    """The settings of a job function, to be filled by calls.

    >>> config = FunctionConfig()
    >>> config.default_data_type(torch.float64)
    >>> config.dtype
    torch.float64
    """

    def __init__(self) -> None:
        self.train = TrainConfig()
        self.view: View | None = None
        self.dtype = torch.float32
        self.scope: placement | None = None

    def default_logical_view(self, view: View) -> None:
        """The view of the job: ``flow.scope.consistent_view()`` or ``flow.scope.mirrored_view()``."""
        if not isinstance(view, View):
            raise TypeError(
                f"function_config.default_logical_view({view!r}): views are flow.scope.consistent_view() and "
                "flow.scope.mirrored_view()."
            )
        self.view = view

    def default_distribute_strategy(self, view: View) -> None:
        """The older name of ``default_logical_view``."""
        warn_old_spelling(
            f"function_config.default_distribute_strategy(scope.{view}_view())",
            f"function_config.default_logical_view(scope.{view}_view())",
        )
        self.default_logical_view(view)

    def default_data_type(self, dtype: torch.dtype) -> None:
        """The dtype of variables and placeholders without one."""
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"function_config.default_data_type({dtype!r}): give a dtype, e.g. flow.float.")
        self.dtype = dtype

    def default_placement_scope(self, scope: placement) -> None:
        """The devices of the job where its body names no others."""
        if not isinstance(scope, placement):
            raise TypeError(
                f"function_config.default_placement_scope({scope!r}): give a placement, e.g. "
                'flow.scope.placement("gpu", "0:0-1").'
            )
        self.scope = scope

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("enable_") or name in _WITHOUT_EFFECT:
            return lambda *args, **kwargs: None
        known = sorted(name for name in dir(type(self)) if name.startswith("default_"))
        raise AttributeError(f"function_config has no setting {name!r}. It has train, {', '.join(known)}.")


_WITHOUT_EFFECT = {"cudnn_conv_heuristic_search_algo", "prune_parallel_cast_ops", "use_boxing_v2", "concurrency_width"}
"""Settings of a compiler; they have no effect here."""


function_config = FunctionConfig
"""The name in programs."""
