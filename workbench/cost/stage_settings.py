"""Settings of all layers of a stage: ranks, micro-batches, options, machine and software."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from workbench.core.model_costs import ModelCosts
from workbench.core.options import V_SCHEDULES
from workbench.core.rows import Layer
from workbench.core.strategy import ResolvedStrategy
from workbench.cost.compute import Rates
from workbench.cost.hardware import Hardware
from workbench.cost.software import ITEMSIZES, WORKBENCH, Software, itemsize_of
from workbench.errors import StrategyError

_COUNTED_AS = ITEMSIZES["fp32"]
"""Bytes of a weight that counts as one."""


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
        scale: bytes of an activation's element at this precision, over those with which the model was counted.
        weight_itemsize: bytes of an element of a weight as products read it.
        numbers_per_weight: for an optimizer whose state has 8 bits for a weight of any size: trained weights of the
            model over their sizes in 32 bits, 2 if all have 16 bits.
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
    weight_itemsize: int = 4
    numbers_per_weight: float = 1.0

    @property
    def optimizer_bytes(self) -> float:
        """Bytes of the optimizer's state for one weight of 32 bits."""
        return self.numbers_per_weight * self.software.optimizer_bytes(self.precision, self.optimizer)

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


def computed_in(model: ModelCosts, precision: str, software: Software) -> str:
    """The dtype of products. Autocast leaves 64 bits as they are; without a precision, a model has its own dtype."""
    if software.has_master_weights or not model.is_traced:
        return precision
    return model.dtype if precision == "fp32" or itemsize_of(model.dtype) > ITEMSIZES["fp32"] else precision


def rate_of(hardware: Hardware, dtype: str, precision: str) -> str:
    """The precision whose rate of products holds for ``dtype``: fp32 for a model's own dtype, of which the machine has
    none.
    """
    return dtype if dtype in hardware.matmul_flops_per_s or dtype == precision else "fp32"


def weights_of(layer: Layer, software: Software) -> tuple[float, float]:
    """(trained weights, frozen weights) that a whole layer holds, as weights of 32 bits: one of 16 bits counts half.

    With master weights all have the sizes of the precision, and each counts as one.
    """
    if not layer.shapes:
        return layer.num_parameters * (1 if software.has_master_weights else layer.itemsize / _COUNTED_AS), 0.0
    held = {name: weights_in(layer, name, software) for name in held_by(layer, software)}
    frozen = sum(number for name, number in held.items() if name in layer.frozen)
    return sum(held.values()) - frozen, frozen


def held_by(layer: Layer, software: Software) -> list[str]:
    """Names of the parameters that a layer holds: not of those of an earlier layer, unless the program copies them."""
    return [name for name in layer.shapes if software.copies_tied or layer.holds(name)]


def weights_in(layer: Layer, name: str, software: Software) -> float:
    """One parameter of a layer in the units of ``weights_of``."""
    part = 1.0 if software.has_master_weights else layer.itemsize_of(name) / _COUNTED_AS
    return prod(layer.shapes[name]) * part


def numbers_per_weight(model: ModelCosts, software: Software, optimizer: str) -> float:
    """``StageSettings.numbers_per_weight`` of a model."""
    if optimizer != "adamw8bit":
        return 1.0
    layers = [layer for layer in model.layers if layer.tied_to is None]
    trained = sum(weights_of(layer, software)[0] for layer in layers)
    return sum(layer.num_parameters - layer.num_frozen for layer in layers) / trained if trained else 1.0


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
    dtype = computed_in(model, options.precision, software)
    scale = itemsize_of(dtype) / itemsize_of(model.dtype)
    precision = rate_of(hardware, dtype, options.precision)
    rates = Rates.of(hardware, precision, scale, software.fuses, software.has_first_flash)
    per_weight = numbers_per_weight(model, software, optimizer)
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
                itemsize_of(dtype), per_weight,
            )
        )  # fmt: skip
    return tuple(settings)
