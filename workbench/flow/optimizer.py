"""Update rules and learning rates of training jobs: ``flow.optimizer.SGD(rate, momentum=0.9).minimize(loss)``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.errors import JobError

__all__ = [
    "SGD", "Adam", "AdamW", "CosineScheduler", "CustomScheduler", "ExponentialScheduler", "InverseTimeScheduler",
    "NaturalExpScheduler", "PiecewiseConstantScheduler", "PiecewiseScalingScheduler", "PolynomialSchduler",
    "PolynomialScheduler", "RMSProp", "UpdateRule", "grad_clipping", "warmup",
]  # fmt: skip

Rate = Callable[[int], float]
"""Learning rate of a step, counted from 0."""


@dataclass(frozen=True)
class Scheduler:
    """A learning rate over the steps of a job. A call returns the rate of one step, with warm-up."""

    rate: Rate
    warmup: Callable[[Rate, int], float] | None = None

    def __call__(self, step: int) -> float:
        return self.warmup(self.rate, step) if self.warmup else self.rate(step)


class warmup:  # noqa: N801 - programs write flow.optimizer.warmup.linear(...)
    """The warm-up of a rate: ``flow.optimizer.warmup.linear(100, 0.1)``, or ``constant(100, 0.1)``."""

    @staticmethod
    def constant(steps: int, multiplier: float) -> Any:
        """For the first ``steps`` steps, ``multiplier`` times the base rate."""
        return lambda rate, step: rate(0) * multiplier if step < steps else rate(step)

    @staticmethod
    def linear(steps: int, start_multiplier: float) -> Any:
        """For the first ``steps`` steps, a line from ``start_multiplier`` times the base rate to the base rate."""

        def rising(rate: Rate, step: int) -> float:
            if step >= steps:
                return rate(step)
            return rate(0) * (start_multiplier + (1.0 - start_multiplier) * step / steps)

        return rising


def PiecewiseConstantScheduler(  # noqa: N802 - as programs write it
    boundaries: Sequence[int], values: Sequence[float], warmup: Any = None
) -> Scheduler:
    """``values[0]`` until step ``boundaries[0]``, inclusive, then ``values[1]``, and so on.

    >>> [PiecewiseConstantScheduler([2], [0.1, 0.01])(step) for step in range(5)]
    [0.1, 0.1, 0.1, 0.01, 0.01]
    """
    if len(values) != len(boundaries) + 1:
        raise ValueError(
            f"PiecewiseConstantScheduler: {len(boundaries)} boundaries and {len(values)} values. There is one value "
            "more than boundaries: PiecewiseConstantScheduler([], [0.1]) is 0.1 throughout."
        )
    return Scheduler(lambda step: values[sum(step > boundary for boundary in boundaries)], warmup)


def PiecewiseScalingScheduler(  # noqa: N802
    base_lr: float, boundaries: Sequence[int], scale: float | Sequence[float], warmup: Any = None
) -> Scheduler:
    """``base_lr``, and after every boundary that boundary's scale times ``base_lr``. A number is the scale of all.

    >>> [PiecewiseScalingScheduler(1.0, [1, 2], [0.1, 0.01])(step) for step in range(4)]
    [1.0, 1.0, 0.1, 0.01]
    """
    scales = scale if isinstance(scale, Sequence) else [scale] * len(boundaries)
    return PiecewiseConstantScheduler(boundaries, [base_lr, *(base_lr * factor for factor in scales)], warmup)


def CosineScheduler(base_lr: float, steps: int, alpha: float = 0.0, warmup: Any = None) -> Scheduler:  # noqa: N802
    """From ``base_lr`` to ``alpha * base_lr`` along half a cosine."""

    def rate(step: int) -> float:
        wave = 0.5 * (1.0 + math.cos(math.pi * min(step, steps) / steps))
        return base_lr * ((1.0 - alpha) * wave + alpha)

    return Scheduler(rate, warmup)


def ExponentialScheduler(  # noqa: N802
    base_lr: float, steps: int, decay_rate: float, staircase: bool = False, warmup: Any = None
) -> Scheduler:
    """``base_lr * decay_rate ** (step / steps)``. With ``staircase`` the power is rounded down."""
    return Scheduler(lambda step: base_lr * decay_rate ** _periods(step, steps, staircase), warmup)


def NaturalExpScheduler(  # noqa: N802
    base_lr: float, steps: int, decay_rate: float, staircase: bool = False, warmup: Any = None
) -> Scheduler:
    """``base_lr * exp(-decay_rate * step / steps)``."""
    return Scheduler(lambda step: base_lr * math.exp(-decay_rate * _periods(step, steps, staircase)), warmup)


def InverseTimeScheduler(  # noqa: N802
    base_lr: float, steps: int, decay_rate: float, staircase: bool = False, warmup: Any = None
) -> Scheduler:
    """``base_lr / (1 + decay_rate * step / steps)``."""
    return Scheduler(lambda step: base_lr / (1.0 + decay_rate * _periods(step, steps, staircase)), warmup)


def PolynomialScheduler(  # noqa: N802
    base_lr: float,
    steps: int,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
    warmup: Any = None,
) -> Scheduler:
    """From ``base_lr`` to ``end_learning_rate``, by a power of the share of steps that is left.

    With ``cycle`` the period grows by ``steps`` whenever it ends.
    """

    def rate(step: int) -> float:
        length = steps * max(1, math.ceil(step / steps)) if cycle else steps
        left = 1.0 - min(step, length) / length
        return (base_lr - end_learning_rate) * left**power + end_learning_rate

    return Scheduler(rate, warmup)


PolynomialSchduler = PolynomialScheduler
"""The spelling of older programs."""


def CustomScheduler(rate: Rate) -> Scheduler:  # noqa: N802
    """Any function of the step: ``CustomScheduler(lambda step: 0.1 / (step + 1))``."""
    return Scheduler(rate)


def _periods(step: int, steps: int, staircase: bool) -> float:
    return step // steps if staircase else step / steps


class grad_clipping:  # noqa: N801 - programs write flow.optimizer.grad_clipping.by_global_norm(1.0)
    """Limits of gradients."""

    @staticmethod
    def by_global_norm(clip_norm: float) -> float:
        """Scale all gradients so that their common norm is at most ``clip_norm``."""
        return float(clip_norm)


@dataclass(frozen=True)
class UpdateRule:
    """How a training job updates its variables.

    Attributes:
        kind: torch's class of the optimizer.
        rate: learning rate of a step.
        options: arguments of the class, except for the rate.
        max_norm: limit of the common norm of all gradients; None for no limit.
        corrects_bias: whether Adam divides its moments by ``1 - beta ** step``.
    """

    kind: Callable[..., torch.optim.Optimizer]
    rate: Rate
    options: Mapping[str, Any] = field(default_factory=dict)
    max_norm: float | None = None
    corrects_bias: bool = True

    @property
    def settings(self) -> tuple[Any, ...]:
        """What an optimizer is made from. Each step sets the rate."""
        return self.kind, dict(self.options), self.corrects_bias

    def minimize(self, model_diff_lbn: Any) -> None:
        """Train on this loss (its mean over all elements). The job takes the step when its body has ended.

        Raises:
            JobError: outside of a job function, or in one of type ``"predict"``.
        """
        from workbench.flow.losses import name_loss

        name_loss(model_diff_lbn, self, "optimizer.minimize")

    def set_rate(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Set the optimizer's rate for this step."""
        changes = {"lr": self.rate(step)}
        if not self.corrects_bias:  # torch's Adam then makes the step ``rate * m / (sqrt(v) + eps)``
            first, second = (1.0 - beta ** (step + 1) for beta in self.options["betas"])
            scale = first / math.sqrt(second)
            changes = {
                "lr": changes["lr"] * scale,
                "eps": self.options["eps"] / math.sqrt(second),
                "weight_decay": self.options["weight_decay"] / scale,  # by the rate itself
            }
        for group in optimizer.param_groups:
            group.update(changes)


def _rate_of(lr_scheduler: Rate | float) -> Rate:
    if isinstance(lr_scheduler, (int, float)):
        return Scheduler(lambda step: float(lr_scheduler))
    return lr_scheduler


def SGD(  # noqa: N802
    lr_scheduler: Rate | float, momentum: float = 0.9, grad_clipping: float | None = None
) -> UpdateRule:
    """``w -= rate * m`` with ``m = momentum * m + gradient``. The default is that of the older documents."""
    return UpdateRule(torch.optim.SGD, _rate_of(lr_scheduler), {"momentum": momentum}, grad_clipping)


def Adam(  # noqa: N802
    lr_scheduler: Rate | float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    do_bias_correction: bool = False,
    grad_clipping: float | None = None,
) -> UpdateRule:
    """Adam (Kingma and Ba 2015). As in the older documents, the default is without bias correction."""
    options = {"betas": (beta1, beta2), "eps": epsilon, "weight_decay": 0.0}
    return UpdateRule(torch.optim.Adam, _rate_of(lr_scheduler), options, grad_clipping, do_bias_correction)


def AdamW(  # noqa: N802
    lr_scheduler: Rate | float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    do_bias_correction: bool = False,
    weight_decay: float = 0.0,
    grad_clipping: float | None = None,
) -> UpdateRule:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019); bias correction as for ``Adam``."""
    options = {"betas": (beta1, beta2), "eps": epsilon, "weight_decay": weight_decay}
    return UpdateRule(torch.optim.AdamW, _rate_of(lr_scheduler), options, grad_clipping, do_bias_correction)


def RMSProp(  # noqa: N802
    lr_scheduler: Rate | float,
    decay_rate: float = 0.99,
    epsilon: float = 1e-8,
    centered: bool = False,
    grad_clipping: float | None = None,
) -> UpdateRule:
    """RMSProp. Epsilon is added to the root, as in torch."""
    options = {"alpha": decay_rate, "eps": epsilon, "centered": centered}
    return UpdateRule(torch.optim.RMSprop, _rate_of(lr_scheduler), options, grad_clipping)


_OF_CONF: dict[str, Callable[..., UpdateRule]] = {
    "naive_conf": lambda rate: SGD(rate, 0.0),
    "momentum_conf": lambda rate, beta=0.9: SGD(rate, beta),
    "adam_conf": Adam,
    "adamw_conf": AdamW,
    "rmsprop_conf": RMSProp,
}
"""Names in the older spelling -> function of the rate and of the hyperparameters."""


def update_rule_of_conf(conf: Mapping[str, Any], rate: Rate) -> UpdateRule:
    """The rule that ``config.train.model_update_conf({"momentum_conf": {"beta": 0.9}})`` asks for.

    Raises:
        JobError: ``conf`` has no rule, several rules, or an unknown one.
        TypeError: the rule has no such hyperparameter.
    """
    make = _OF_CONF.get(next(iter(conf))) if len(conf) == 1 else None
    if make is None:
        known = ", ".join(f'"{name}"' for name in _OF_CONF)
        raise JobError(
            f"train.model_update_conf({dict(conf)!r}): it holds {', '.join(map(repr, conf)) or 'nothing'}, and one of "
            f'{known} is needed. Write e.g. {{"naive_conf": {{}}}}.'
        )
    (options,) = conf.values()
    return make(rate, **options)
