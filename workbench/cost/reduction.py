"""Sums of gradients over data-parallel ranks, and the update.

With W weights on each of d ranks, each rank receives (d - 1) / d times

    ZeRO 0   2 g W                  one all-reduce
    ZeRO 1   g W + p W              gradients to shards, parameters gathered after the update
    ZeRO 2   m g W + p W            the same, gradients after each of m micro-batches
    ZeRO 3   m g W + 2 m p W        parameters gathered for each forward and backward (3 m p W by software that frees
                                    them between recomputation and backward); tables for forward only; weights that
                                    autocast casts, in 16 bits for backward

With groups of n ranks instead, each rank receives (n - 1) / n times that, and for the sum between the groups

    ZeRO 1, 3   2 g W / n (d/n - 1) / (d/n)
    ZeRO 2      m times that

where g and p are bytes of a gradient and of a parameter. Frozen weights have no gradient, and only ZeRO 3 gathers them.
Weights that all t ranks of the model axis share are summed over d t ranks. Weights of experts that the data axis splits
are not summed over it.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.float8_layers import multiplies_in_8_bits
from workbench.core.model_costs import LayerCost, ModelCosts
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy
from workbench.cost.calls import num_calls
from workbench.cost.collectives import exchange_s, summed_bytes
from workbench.cost.layers import ITEMSIZE_16_BIT, Weights, sharded
from workbench.cost.offload import offload_bytes_per_s, offloads
from workbench.cost.software import optimizer_of
from workbench.cost.stage_settings import StageSettings
from workbench.cost.stages import StagePrice, rows_again

_NUM_BUCKETS = 8
"""Sums start bucket by bucket. The last one cannot overlap with backward."""
_PASSES = 8
"""Bytes of memory traffic per byte received: copies and casts in and out, a write, a read to pass it on. Compute waits
for these also if an exchange runs beside it. Chosen among 4, 6 and 8 by published runs of FSDP.
"""
_NEXT_TO_NOTHING = 1.0
"""Bytes of an exchange whose start alone counts."""
_LARGEST_BYTES = (8, 4)
"""Of the largest values of an input and its weight in forward, and of a gradient in backward, in 32 bits."""
_STATISTICS_BYTES = 2 * 4
"""Bytes of a channel's mean and variance in forward, and of its gradient's two sums in backward."""
_MASTER_PASSES = 6 + 8 + 12 + 6
"""Bytes per weight for 16-bit gradients and 32-bit weights: gradients to 32 bits, search for infinities, norm and clip,
weights back to 16 bits.
"""


def reduced_bytes(stage: StagePrice, setting: StageSettings) -> tuple[float, float, float]:
    """The bytes that a rank receives in a step: (from the data ranks of its group, in addition from those of its model
    axis, from ranks of other groups).
    """
    d, t, software, m = setting.data, setting.model, setting.software, setting.num_micro_batches
    g, p = software.gradient_bytes(setting.precision), software.parameter_bytes(setting.precision)
    gathers = 3 if software.gathers_again and setting.recompute else 2
    per_weight = {0: 2 * g, 1: g + p, 2: m * g + p, 3: m * (g + gathers * p)}[setting.zero]
    across, inside = per_weight * (stage.weights - stage.apart), per_weight * stage.shared
    if setting.zero == 3:
        across += m * gathers * p * (stage.frozen.number - stage.frozen.apart)
        across -= m * (p * stage.tables + (p - ITEMSIZE_16_BIT) * stage.cast_weights)
        inside += m * gathers * p * stage.frozen.shared
    n = setting.shards if setting.zero else d
    own = ((stage.weights - stage.apart - stage.shared) + stage.shared / t) / n
    between = 2 * g * (m if setting.zero == 2 else 1) * own * (1 - n / d)
    return across * (1 - 1 / n), inside * (1 / n - 1 / (n * t)), between


def reduction_s(stages: Sequence[StagePrice], setting: StageSettings) -> float:
    """Seconds of a step in which a rank waits for sums of gradients and for parameters, over all its stages."""
    found = (reduced_bytes(stage, setting) for stage in stages)
    across, inside, between = (sum(parts) for parts in zip(*found, strict=True))
    software, hardware, received = setting.software, setting.hardware, across + inside + between
    n, t = setting.shards if setting.zero else setting.data, setting.model
    seconds = exchange_s(hardware, across, n, t, "gradients", software.uses_all_adapters)
    seconds += exchange_s(hardware, inside, t, 1, "gradients")
    gathers_s = seconds * _gathered_part(setting) if software.hides_gathers else 0.0
    seconds += exchange_s(hardware, between, setting.data // n, n * t, "gradients", software.uses_all_adapters)
    if hardware.exchanges_on_cores:
        starts = _num_exchanges(stages, setting) - 1 if across or inside else 0
        axis = (setting.data, t) if across else (t, 1)
        return seconds + starts * exchange_s(hardware, _NEXT_TO_NOTHING, *axis, "gradients")
    if setting.stages > 1 and not software.hides_gradients_of_pipelines:
        return seconds
    forward = sum(stage.forward_s for stage in stages)
    backward = sum(stage.input_s + stage.weight_s for stage in stages)
    bucket = _part_of_a_bucket(sum(stage.weights for stage in stages), setting)
    last, beside = bucket, 1
    if setting.zero >= 2:
        last, beside = bucket / setting.num_micro_batches, setting.num_micro_batches
    elif software.hides_gathers and len(stages) > 1:  # a stage's, while the rank works on others with p micro-batches
        last, beside = 1 / len(stages), min(setting.stages, setting.num_micro_batches)
    exposed = _exposed_s(seconds - gathers_s, beside * backward, last) + _exposed_s(gathers_s, beside * forward, bucket)
    taken = received * _PASSES / hardware.memory_bandwidth_bytes_per_s
    return min(seconds, max(exposed, taken))


def _exposed_s(seconds: float, compute_s: float, alone: float) -> float:
    """What is left of exchanges beside compute; the part ``alone`` of them, and of it, are not beside the other."""
    return max(seconds * alone, seconds - compute_s * (1 - alone))


def _gathered_part(setting: StageSettings) -> float:
    """The part of ZeRO's exchanges that gathers parameters after the update."""
    software, sums = setting.software, setting.num_micro_batches if setting.zero == 2 else 1
    g, p = software.gradient_bytes(setting.precision), software.parameter_bytes(setting.precision)
    return p / (sums * g + p) if setting.zero in (1, 2) else 0.0


def _part_of_a_bucket(weights: float, setting: StageSettings) -> float:
    largest = setting.software.bucket_weights * max(1.0, setting.data / 40)
    return min(1.0, largest / weights) if largest and weights else 1 / _NUM_BUCKETS


def _num_exchanges(stages: Sequence[StagePrice], setting: StageSettings) -> float:
    """Number of exchanges in a step: buckets of gradients, and of parameters after the update; under ZeRO 3, two
    gathers and one scatter per unit. Groups of shards sum each bucket once more.
    """
    gradients, parameters = (sum(stage.num_buckets[which] for stage in stages) for which in (0, 1))
    gradients *= setting.num_micro_batches if setting.zero == 2 else 1
    between = gradients if setting.zero and setting.shards < setting.data else 0
    if setting.zero == 3:
        return 3 * setting.num_micro_batches * sum(stage.num_units for stage in stages) + between
    return gradients + between + (parameters if setting.zero else 0)


def statistics_of(
    model: ModelCosts, strategy: ResolvedStrategy, settings: Sequence[StageSettings]
) -> list[tuple[float, float]]:
    """For each stage, the exchanges of statistics for one micro-batch that is split: (seconds, bytes received).

    Batch norms: in forward, every rank gathers the mean and variance of all channels from all others; in backward, they
    add two sums. In fp8: the largest values of an input and a weight in forward, of a gradient in backward.
    """
    found, (blocks, _) = [(0.0, 0.0)] * len(settings), rows_again(model, strategy.options.recompute)
    for row, choice, block in zip(model.rows, strategy.layers, blocks, strict=True):
        setting = settings[choice.stage]
        exchanges = _statistics(row, choice, setting)
        if not exchanges:
            continue
        calls, (seconds, received) = num_calls(model, row), found[choice.stage]
        is_again = setting.recompute and (row.has_gradients[1] or block >= 0)
        comes_back = row.has_gradients[0 if "BatchNorm" in choice.kind else 1]  # its sums are for the input's gradient
        each = (2 * calls if is_again else calls), calls * comes_back
        for times, (kind, num_bytes, size, stride) in zip(each, exchanges, strict=True):
            seconds += times * exchange_s(setting.hardware, num_bytes, size, stride, kind)
            received += times * num_bytes
        found[choice.stage] = seconds, received
    return found


def _statistics(
    row: LayerCost, choice: ResolvedLayer, setting: StageSettings
) -> tuple[tuple[str, float, int, int], ...]:
    """The exchange of a layer's forward and that of its backward, if it has any: (kind, bytes, ranks, their stride)."""
    whole, over_data = (setting.data * setting.model, 1), (setting.data, setting.model)
    if "BatchNorm" in choice.kind and row.output_shape is not None:
        ranks = whole if choice.parallel == "data" else over_data
        own = _STATISTICS_BYTES * row.output_shape[0]
        summed = summed_bytes(setting.hardware, own, ranks[0])
        return ("all-gather", own * (ranks[0] - 1), *ranks), ("all-reduce", summed, *ranks)
    # Scales of logical tensors are the workbench's
    if setting.precision == "fp8" and not setting.software.has_master_weights and multiplies_in_8_bits(row.layer):
        # The gradient of a sum is whole on the model axis
        each = zip(_LARGEST_BYTES, (whole, over_data if choice.split == "row" else whole), strict=True)
        return tuple(("all-reduce", summed_bytes(setting.hardware, size, ranks[0]), *ranks) for size, ranks in each)
    return ()


def optimizer_s(weights: Weights, setting: StageSettings) -> float:
    """Seconds of the update: passes over memory; under ZeRO, of the rank's shard.

    An offloaded state comes and goes: beside the update on GPUs, besides it on CPUs.
    """
    per_weight = optimizer_of(setting.optimizer).update
    if setting.software.has_master_weights and setting.precision != "fp32":
        per_weight += _MASTER_PASSES
    mine = sharded(weights, setting) if setting.zero else weights.number
    seconds = mine * per_weight / setting.hardware.memory_bandwidth_bytes_per_s
    if not offloads(setting, "optimizer"):
        return seconds
    moved = 2 * mine * setting.optimizer_bytes
    copies = moved / offload_bytes_per_s(setting)
    return seconds + copies if setting.hardware.exchanges_on_cores else max(seconds, copies)
