"""The price of one layer on one rank of its stage: a pure function of the layer, its choice and its neighbours'.

Estimates are sums of these prices, and a search adds up the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from workbench.core.model_costs import LayerCost, OpCost
from workbench.core.strategy import ResolvedLayer
from workbench.cost.activation_layouts import boxed_output_sbp, input_sbp
from workbench.cost.boxings import (
    boxings,
    copies_input,
    num_dims,
    output_bytes,
    passed_bytes,
    seconds_and_bytes,
    splits_words,
)
from workbench.cost.compute import backward_s, forward_s
from workbench.cost.software import ITEMSIZES
from workbench.cost.stage_settings import StageSettings

ITEMSIZE_16_BIT = 2
"""Bytes of a number in 16 bits."""


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """The price of a layer on one rank; seconds and bytes of ONE micro-batch unless a step is named.

    Attributes:
        forward_s, input_s, weight_s: compute: forward, backward of the input, backward of the weight.
        boxing_forward_s, boxing_backward_s: exchanges of the model axis, of the layer's input and output.
        boxing_sums_s: of the latter, those that add up terms of gradients.
        boxed_bytes: that a rank receives in them, forward and backward.
        boxed_forward_bytes: of these, those of forward, which full recomputation repeats.
        weights: how many it works with.
        shared: of these, how many every rank of the model axis has whole, and sums their gradients on that axis, too.
        kept_bytes: activations for backward, without recomputation.
        kept_after_bytes: of these, those of the functions behind the layer.
        passing_bytes, passing_after_bytes: what backward takes and makes besides, in the layer's own function and in
            those behind it.
        cast: of ``weights``, those of which ``kept_bytes`` has a copy in 16 bits.
        input_bytes: bytes of its input, which a recomputed block keeps of its first layer.
        scores_s, scores_bytes: forward, and what is kept, of the functions from the first product behind the layer to
            the last one: the scores of attention, which selective recomputation computes again.
    """

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0
    boxing_forward_s: float = 0.0
    boxing_backward_s: float = 0.0
    boxing_sums_s: float = 0.0
    boxed_bytes: float = 0.0
    weights: float = 0.0
    kept_bytes: float = 0.0
    input_bytes: float = 0.0
    scores_s: float = 0.0
    scores_bytes: float = 0.0
    shared: float = 0.0
    boxed_forward_bytes: float = 0.0
    kept_after_bytes: float = 0.0
    passing_bytes: float = 0.0
    passing_after_bytes: float = 0.0
    cast: float = 0.0

    @property
    def backward_s(self) -> float:
        """Compute of the whole backward."""
        return self.input_s + self.weight_s

    def without_casts(self) -> LayerPrice:
        """As it is under ZeRO 3, which gathers copies of weights again for backward."""
        return replace(self, kept_bytes=self.kept_bytes - ITEMSIZE_16_BIT * self.cast) if self.cast else self


def layer_price(
    row: LayerCost,
    choice: ResolvedLayer,
    before: tuple[LayerCost, ResolvedLayer] | None,
    following: ResolvedLayer | None,
    setting: StageSettings,
) -> LayerPrice:
    """The price of a layer with the functions behind it and the boxings of its input and output.

    Args:
        row: its undivided costs.
        choice: its choice.
        before: the layer whose output it takes, on the same stage; None for the first of a stage.
        following: the next layer on the same stage.
        setting: everything else.
    """
    forward = first = second = scores = scores_kept = 0.0
    kept, passing = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    scored = scores_of(row)
    copies = copies_input(row, choice, before, setting)
    for work, parts, inner_parts, saved_parts in _divided(row, choice, following, setting):
        is_own = work in row.own
        weight = _weight_bytes(row, choice, setting) if work.is_matmul and is_own else 0.0
        seconds = forward_s(work, setting.samples, setting.rates, parts, inner_parts, weight)
        size = setting.samples * setting.scale / saved_parts
        saved = (work.saved_bytes + (work.again_bytes if is_own and copies else 0.0)) * size
        forward += seconds
        kept[is_own] += saved
        passing[is_own] = max(passing[is_own], work.passing_bytes * setting.samples * setting.scale / parts)
        if any(work is one for one in scored):
            scores += seconds
            scores_kept += 0.0 if work.is_matmul else saved  # its inputs stay: queries, keys and values
        outputs, rows = _backward_dims(work, row, choice, setting) if work.is_matmul and is_own else (0, 0)
        back = backward_s(work, setting.samples, setting.rates, parts, inner_parts, outputs, rows, weight)
        first, second = first + back[0], second + (back[1] if is_own else 0.0)
        first += 0.0 if is_own else back[1]
    exchanges = boxings(row, choice, before, following, setting)
    boxing = [seconds_and_bytes(some, setting) for some in (exchanges.forward, exchanges.backward)]
    sums_s, _ = seconds_and_bytes(exchanges.sums, setting)
    if setting.software.keeps_exponentials and splits_words(row, choice, following, setting):
        kept[False] *= 2  # the logits, and their exponentials
    weights, shared = _weights(row, choice, setting)
    cast = row.num_cast / (setting.model if choice.split else 1)
    kept[True] += ITEMSIZE_16_BIT * cast
    return LayerPrice(
        forward, first, second, boxing[0][0], boxing[1][0], sums_s,
        boxing[0][1] + boxing[1][1], weights, sum(kept.values()), _input_bytes(row, choice, before, setting),
        scores, scores_kept, shared, boxing[0][1], kept[False], passing[True], passing[False], cast,
    )  # fmt: skip


def scores_of(row: LayerCost) -> tuple[OpCost, ...]:
    """The functions behind a layer from the first matrix product to the last one."""
    products = [index for index, work in enumerate(row.after) if work.is_matmul]
    return row.after[products[0] : products[-1] + 1] if len(products) > 1 else ()


def _divided(
    row: LayerCost, choice: ResolvedLayer, following: ResolvedLayer | None, setting: StageSettings
) -> list[tuple[OpCost, float, float, float]]:
    """(function, parts of its work, parts of its inner dim, parts of its saved bytes)."""
    t, dims = setting.model, num_dims(row)
    parts_of = {"B": 1.0, "P": 1.0, "S0": setting.batch_parts, "S1": float(t), "S-1": float(t)}
    takes = parts_of[input_sbp(choice, dims, setting.sequence)]
    if choice.split == "column" and setting.sequence and dims > 2 and not setting.software.keeps_gathered:
        takes = float(t)
    own = float(t) if choice.split else takes
    inner = float(t) if choice.split == "row" else 1.0
    left = boxed_output_sbp(choice, following, dims, setting.sequence)
    divided = [(work, own, inner if work.is_matmul else 1.0, takes) for work in row.own]
    for work in row.after:
        parts = parts_of[left] if work.is_parted or left != "S-1" else 1.0
        divided.append((work, parts, 1.0, parts))
    return divided


def _backward_dims(work: OpCost, row: LayerCost, choice: ResolvedLayer, setting: StageSettings) -> tuple[float, float]:
    """(outputs, rows): what the two products of a layer's backward sum over."""
    weight = max(row.layer.shapes.values(), key=prod, default=())
    outputs = prod(weight) / work.inner if weight else 0.0
    rows = setting.samples * prod(row.output_shape[:-1]) if row.output_shape else 0.0
    return outputs / (setting.model if choice.split == "column" else 1), rows


def _weight_bytes(row: LayerCost, choice: ResolvedLayer, setting: StageSettings) -> float:
    """Of this rank's part of the layer's weight, as products read it."""
    number = max((prod(shape) for shape in row.layer.shapes.values()), default=0)
    return number / (setting.model if choice.split else 1) * ITEMSIZES[setting.precision]


def _input_bytes(
    row: LayerCost, choice: ResolvedLayer, before: tuple[LayerCost, ResolvedLayer] | None, setting: StageSettings
) -> float:
    size = passed_bytes(before[0], setting) if before else output_bytes(row, setting)
    entry = input_sbp(choice, num_dims(row), setting.sequence)
    return size / (1.0 if entry == "B" else setting.batch_parts if entry == "S0" else setting.model)


def _weights(row: LayerCost, choice: ResolvedLayer, setting: StageSettings) -> tuple[float, float]:
    """(parameters of a rank, those of them that are whole); a row-split layer has its biases whole."""
    number = float(row.layer.num_parameters)
    if setting.model == 1:
        return number, 0.0
    whole = number
    if choice.split is not None:
        biases = (prod(shape) for shape in row.layer.shapes.values() if len(shape) == 1)
        whole = float(sum(biases)) if choice.split == "row" else 0.0
    is_summed = setting.software.sums_shared or choice.parallel == "data"
    return whole + (number - whole) / setting.model, whole if is_summed else 0.0


def state_bytes(weights: float, shared: float, setting: StageSettings) -> tuple[float, float, float]:
    """Parameters, gradients and the optimizer's state; ZeRO shards over the ranks that share a weight."""
    software, precision = setting.software, setting.precision
    sizes = (
        software.parameter_bytes(precision),
        software.gradient_bytes(precision),
        software.optimizer_bytes(precision, setting.optimizer),
    )
    sharded = (weights - shared) / setting.data + shared / (setting.data * setting.model)
    held = [sharded if setting.zero >= stage else weights for stage in (3, 2, 1)]
    parameters, gradients, optimizer = (number * size for number, size in zip(held, sizes, strict=True))
    return parameters, gradients, optimizer


def accumulation_s(weights: float, setting: StageSettings) -> float:
    """Adding a micro-batch's gradients to those of the ones before, which the first has not: read, read, write."""
    if setting.software.fuses_accumulation:
        return 0.0
    later = 1 - 1 / setting.num_micro_batches
    moved = 3 * later * setting.software.gradient_bytes(setting.precision) * weights
    return moved / setting.hardware.memory_bandwidth_bytes_per_s


__all__ = ["ITEMSIZE_16_BIT", "LayerPrice", "accumulation_s", "layer_price", "state_bytes"]
