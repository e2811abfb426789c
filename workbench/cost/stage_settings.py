"""Settings of all layers of a stage: ranks, micro-batches, options, machine and software."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from workbench.core.model_costs import ModelCosts
from workbench.core.options import V_SCHEDULES
from workbench.core.strategy import ResolvedStrategy
from workbench.cost.compute import Rates
from workbench.cost.hardware import Hardware
from workbench.cost.software import ITEMSIZES, WORKBENCH, Software
from workbench.errors import StrategyError


@dataclass(frozen=True)
class StageSettings:
    """The settings of one stage; a pure value, so that layers can be priced one by one.

    Attributes:
        data, model: degrees of the stage's grid.
        stages: pipeline stages of the whole strategy.
        context: number of data ranks that share samples.
        samples: samples of one micro-batch on the data-parallel rank with most of them; a slice of the sequence counts
            as a part of a sample.
        num_micro_batches: per step.
        precision, zero, recompute, sequence, offload, overlap: options of the strategy.
        shards: number of consecutive data ranks over which ZeRO splits.
        rates: the machine at this precision.
        itemsize: bytes of an activation's element at this precision; rows are scaled to it.
        scale: ``itemsize`` over the bytes with which the model was counted.
        splits_backward: whether gradients of inputs and of weights are separate actions of its ranks.
    """

    hardware: Hardware
    rates: Rates
    software: Software
    optimizer: str
    data: int
    model: int
    stages: int
    samples: float
    num_micro_batches: int
    precision: str
    zero: int
    recompute: str
    sequence: bool
    scale: float
    context: int = 1
    shards: int = 1
    offload: str = ""
    overlap: int = 1
    splits_backward: bool = False

    @property
    def recompute_kind(self) -> str:
        """What recomputed blocks keep: as in ``core.recompute_kinds``, or "scores" for all but scores of attention."""
        if self.recompute == "full" and self.software.recompute == "selective":
            return "scores"
        return "full" if self.recompute.isdecimal() else self.recompute

    @property
    def batch_parts(self) -> float:
        """Number of parts into which the model axis divides the batch dim: fewer than its ranks if samples are few."""
        samples = self.samples * self.context
        return samples / ceil(samples / self.model) if samples >= 1 else 1.0


def splits_backward(schedule: str | None, stage: int) -> bool:
    """Whether a schedule has gradients of inputs and of weights as separate actions on the ranks of a stage. Nobody
    waits for gradients of the first stage's inputs.
    """
    return schedule in V_SCHEDULES or (schedule == "zero_bubble" and stage > 0)


def counted_at(model: ModelCosts, precision: str, software: Software) -> ModelCosts:
    """The model's rows at a precision: under autocast, unless the program keeps weights and activations in 16 bits."""
    return model if software.has_master_weights else model.under_autocast(precision)


def settings_of(
    model: ModelCosts,
    strategy: ResolvedStrategy,
    hardware: Hardware,
    batch_size: int,
    optimizer: str = "adamw",
    software: Software = WORKBENCH,
) -> tuple[StageSettings, ...]:
    """The settings of each stage.

    Raises:
        StrategyError: there are fewer samples than micro-batches, or the hardware lacks the precision.
    """
    options = strategy.options
    scale = ITEMSIZES[options.precision] / ITEMSIZES[model.dtype]
    rates = Rates.of(hardware, options.precision, scale, software.fuses)
    num_stages = strategy.num_stages
    settings = []
    for stage in range(num_stages):
        data, width = strategy.stage_width(stage)
        parts = data // options.context * strategy.num_micro_batches
        if batch_size < strategy.num_micro_batches:
            raise StrategyError(
                f"batch_size={batch_size}: {strategy.num_micro_batches} micro-batches; each takes at least one sample. "
                f"Use batch_size={parts}, one for each of {data // options.context} replicas, or a multiple."
            )
        settings.append(
            StageSettings(
                hardware, rates, software, optimizer, data, width, num_stages,
                ceil(batch_size / parts) / options.context, strategy.num_micro_batches, options.precision, options.zero,
                options.recompute, options.sequence, scale, options.context,
                options.shards or data, options.offload, options.overlap, splits_backward(strategy.schedule, stage),
            )
        )  # fmt: skip
    return tuple(settings)
