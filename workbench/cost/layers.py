"""The price of one layer on one rank of its stage: a pure function of the layer, its choice and its neighbours.

Estimates are sums of these prices, and a search adds the same prices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from operator import add
from typing import Any, NamedTuple

from workbench.core.layer_layouts import Entry, boxed_output_entry, input_entry
from workbench.core.model_costs import LayerCost, OpCost
from workbench.core.strategy import ResolvedLayer
from workbench.core.weight_splits import TABLE, split_dim
from workbench.cost.accumulation import added_in_place
from workbench.cost.boxings import (
    boxings,
    copies_input,
    extent_bytes,
    moved_weight_bytes,
    num_dims,
    passed_bytes,
    seconds_and_bytes,
    splits_words,
)
from workbench.cost.compute import FLASH, backward_s, forward_s
from workbench.cost.stage_settings import StageSettings, held_by, weights_in, weights_of

_INNER = ("bmm", "baddbmm")
"""Products of two activations inside a layer."""
ITEMSIZE_16_BIT = 2
"""Bytes of a number in 16 bits."""


class Weights(NamedTuple):
    """Weights on a rank: their number, those of them that every rank of the model axis has, and those of experts that
    the data axis splits (``LayerPrice.shared``, ``apart``).
    """

    number: float = 0.0
    shared: float = 0.0
    apart: float = 0.0

    def __add__(self, other: Any) -> Weights:
        return Weights(*map(add, self, other))


NO_WEIGHTS = Weights()


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """The price of a layer on one rank; seconds and bytes of ONE micro-batch unless a step is named.

    Attributes:
        forward_s, input_s, weight_s: compute: forward, backward of the input, backward of the weight.
        boxing_forward_s, boxing_backward_s: exchanges of the model axis, for the layer's input and output.
        boxing_sums_s: the part of ``boxing_backward_s`` that adds terms of gradients.
        boxed_bytes: bytes that a rank receives in them, forward and backward.
        boxed_forward_bytes: the part of these in forward, which full recomputation repeats.
        weights: number of trained weights on the rank, each in units of ``stage_settings.weights_of``.
        shared: number of these that every rank of the model axis has; their gradients are summed on that axis, too.
        kept_bytes: activations for backward, without recomputation.
        kept_after_bytes: the part of these that belongs to the functions after the layer.
        passing_bytes, passing_after_bytes: further operands and results of backward, in the layer's own function and in
            the functions after it.
        cast: number of ``weights`` of which ``kept_bytes`` has a copy in 16 bits.
        input_bytes: bytes of its input as it arrives, which a recomputed block keeps for its first layer.
        boxed_input_bytes: bytes of its input in the layout that it needs.
        apart: of ``weights``, those of experts over the data axis that count as on one rank only, and not summed.
        scores_s, scores_bytes: forward, and kept bytes, of the functions from the first product after the layer to the
            last one: the scores of attention, which selective recomputation computes again.
        own_products_s, own_products_bytes: forward, and bytes of the results, of products with its weights.
        own_products_backward_s: backward of these.
        products_s, products_bytes: the same of all products, with those of attention after it.
        added_in_place: number of ``weights`` to whose gradients later micro-batches may add in place.
        frozen: what the rank has of weights that are not trained.
        result_gradients: bytes of the gradients of its results, which wait for those of its weights where these are
            postponed.
        has_backward: whether backward goes through the layer: it does not before the first trained one.
        tied: number of trained weights on the rank, besides ``weights``, that another layer holds.
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
    boxed_input_bytes: float = 0.0
    apart: float = 0.0
    own_products_s: float = 0.0
    own_products_bytes: float = 0.0
    products_s: float = 0.0
    products_bytes: float = 0.0
    own_products_backward_s: float = 0.0
    added_in_place: float = 0.0
    frozen: Weights = NO_WEIGHTS
    has_backward: bool = True
    result_gradients: float = 0.0
    tied: float = 0.0

    def again_s(self, kind: str) -> float:
        """Forward seconds that a recomputed block repeats; ``kind`` as in ``core.recompute_kinds``."""
        return self.forward_s - {"attention": self.own_products_s, "cheap": self.products_s}.get(kind, 0.0)

    def kept_results_bytes(self, kind: str) -> float:
        """Bytes of the results that a recomputed block keeps."""
        return {"attention": self.own_products_bytes, "cheap": self.products_bytes}.get(kind, 0.0)

    @property
    def kept_alone_bytes(self) -> float:
        """The part of ``kept_bytes`` that stays where the layer is recomputed alone: what the functions after it keep,
        and its input, unless others keep that already.
        """
        own = self.kept_bytes - self.kept_after_bytes
        return self.kept_after_bytes + min(own, self.boxed_input_bytes)

    @property
    def kept_behind_block_bytes(self) -> float:
        """``kept_bytes`` of a layer behind a recomputed block: with its input, which the block no longer keeps."""
        return self.kept_after_bytes + max(self.kept_bytes - self.kept_after_bytes, self.input_bytes)

    def without_casts(self) -> LayerPrice:
        """The price under ZeRO 3, which gathers copies of weights again for backward."""
        return replace(self, kept_bytes=self.kept_bytes - ITEMSIZE_16_BIT * self.cast) if self.cast else self


def layer_price(
    row: LayerCost,
    choice: ResolvedLayer,
    before: tuple[LayerCost, ResolvedLayer] | None,
    following: ResolvedLayer | None,
    setting: StageSettings,
    is_last: bool = False,
) -> LayerPrice:
    """The price of a layer with the functions after it and the boxings of its input and output.

    Args:
        row: its undivided costs.
        choice: its choice.
        before: the layer before it on the same stage, whose output it takes; None for the first of a stage.
        following: the next layer on the same stage.
        setting: all other settings.
        is_last: whether it is the last layer of the model.
    """
    forward = first = second = scores = scores_kept = products_back = 0.0
    kept, passing = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    products_s, products_bytes = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
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
        if work.is_matmul:
            products_s[is_own] += seconds
            made = _result_numbers(work) * row.itemsize * setting.samples * setting.scale
            products_bytes[is_own] += made * inner_parts / parts
        passing[is_own] = max(passing[is_own], work.passing_bytes * setting.samples * setting.scale / parts)
        if any(work is one for one in scored):
            scores += seconds
            scores_kept += 0.0 if work.is_matmul else saved  # its inputs stay: queries, keys and values
        outputs, rows = _backward_dims(work, row, choice, setting) if work.is_matmul and is_own else (0, 0)
        back = backward_s(work, setting.samples, setting.rates, parts, inner_parts, outputs, rows, weight)
        back = back[0] * work.backward_products[0], back[1] * work.backward_products[1]
        first, second = first + back[0], second + (back[1] if is_own else 0.0)
        first += 0.0 if is_own else back[1]
        products_back += sum(back) if work.is_matmul and is_own else 0.0
    beside = products_s[True], products_back
    exchanges = boxings(row, choice, before, following, setting, is_last=is_last, products_s=beside)
    boxing = [seconds_and_bytes(some, setting) for some in (exchanges.forward, exchanges.backward)]
    sums_s, _ = seconds_and_bytes(exchanges.sums, setting)
    if setting.software.keeps_exponentials and splits_words(row, choice, following, setting):
        kept[False] *= 2  # the logits, and their exponentials
    (weights, shared, apart), frozen = _weights(row, choice, setting)
    elsewhere = row.layer.shapes.keys() - {*held_by(row.layer, setting.software), *row.layer.frozen}
    tied = sum(weights_in(row.layer, name, setting.software) for name in elsewhere)
    tied /= setting.model if choice.split else 1
    cast = row.num_cast / (setting.model * choice.over_data if choice.split else 1)
    kept[True] += ITEMSIZE_16_BIT * cast
    if choice.split and setting.model > 1 and not cast:  # rows of heads, of which the product is
        kept[True] += moved_weight_bytes(row, setting) / setting.model
    arriving_bytes, taken_bytes = _input_bytes(row, choice, before, setting)
    return LayerPrice(
        forward, first, second, boxing[0][0], boxing[1][0], sums_s,
        boxing[0][1] + boxing[1][1], weights, sum(kept.values()), arriving_bytes,
        scores, scores_kept, shared, boxing[0][1], kept[False], passing[True], passing[False], cast, taken_bytes,
        apart, products_s[True], products_bytes[True], sum(products_s.values()), sum(products_bytes.values()),
        products_back, added_in_place(row, choice, setting), frozen, row.has_gradients[1],
        _result_gradients(row, choice, following, setting) if weights + tied else 0.0, tied,
    )  # fmt: skip


def _result_gradients(
    row: LayerCost, choice: ResolvedLayer, following: ResolvedLayer | None, setting: StageSettings
) -> float:
    """Bytes of the gradients of results: of products with its weights; of a norm, of its one result. Of a layer whose
    input has no gradient, such as a table, nothing is postponed.
    """
    if not row.has_gradients[0] or row.layer.kind == TABLE:
        return 0.0
    own = _divided(row, choice, following, setting)[: len(row.own)]
    products = [each for each in own if each[0].is_matmul and each[0].attention is None and each[0].name not in _INNER]
    if not products:
        parts = own[-1][1] if own else 1.0
        return extent_bytes(row.output, row.itemsize, setting) / parts
    made = sum(_result_numbers(work) * inner_parts / parts for work, parts, inner_parts, _ in products)
    return made * row.itemsize * setting.samples * setting.scale


def _result_numbers(product: OpCost) -> float:
    """How many numbers a product makes for one sample."""
    if product.attention is not None:
        return float(product.attention.heads * product.attention.rows * product.attention.widths[1])
    return product.flops / (2 * product.inner * (2 if product.name == FLASH else 1))


def scores_of(row: LayerCost) -> tuple[OpCost, ...]:
    """The functions after a layer from the first matrix product to the last one."""
    products = [index for index, work in enumerate(row.after) if work.is_matmul]
    return row.after[products[0] : products[-1] + 1] if len(products) > 1 else ()


def _divided(
    row: LayerCost, choice: ResolvedLayer, following: ResolvedLayer | None, setting: StageSettings
) -> list[tuple[OpCost, float, float, float]]:
    """(function, parts of its work, parts of its inner dim, parts of its saved bytes)."""
    t, dims = setting.model, num_dims(row)
    takes = _parts(input_entry(choice, dims, setting.sequence), setting)
    if choice.split == "column" and setting.sequence and dims > 2 and not setting.software.keeps_gathered:
        takes = float(t)
    own = float(t) if choice.split else takes
    inner = float(t) if choice.split == "row" else 1.0
    left = boxed_output_entry(choice, following, dims, setting.sequence)
    divided = [(work, own, inner if work.is_matmul else 1.0, takes) for work in row.own]
    parts = _parts(left, setting)
    return divided + [(work, parts, 1.0, parts) for work in row.after]


def _backward_dims(work: OpCost, row: LayerCost, choice: ResolvedLayer, setting: StageSettings) -> tuple[float, float]:
    """(outputs, rows): the sizes over which the two products of a layer's backward sum."""
    weight = max(row.layer.shapes.values(), key=prod, default=())
    outputs = prod(weight) / work.inner if weight else 0.0
    rows = setting.samples * prod(row.output_shape[:-1]) if row.output_shape is not None else 0.0
    rows /= setting.batch_parts if choice.parallel == "data" else 1
    return outputs / (setting.model if choice.split == "column" else 1), rows


def _weight_bytes(row: LayerCost, choice: ResolvedLayer, setting: StageSettings) -> float:
    """Bytes of this rank's part of the layer's weight, as products read it."""
    number = max((prod(shape) for shape in row.layer.shapes.values()), default=0)
    return number / (setting.model * choice.over_data if choice.split else 1) * setting.weight_itemsize


def _parts(entry: Entry, setting: StageSettings) -> float:
    """Into how many parts an entry on the model axis divides an activation."""
    return {"B": 1.0, "P": 1.0, "samples": setting.batch_parts}.get(entry, float(setting.model))


def _input_bytes(
    row: LayerCost, choice: ResolvedLayer, before: tuple[LayerCost, ResolvedLayer] | None, setting: StageSettings
) -> tuple[float, float]:
    """Bytes of the input as it arrives (a recomputed block keeps it so, and boxes it again in backward), and boxed."""
    if before is None:  # of its output, if the input is unknown
        size = extent_bytes(row.input_extent or row.output, row.itemsize, setting)
    else:
        size = passed_bytes(before[0], setting)
    taken = arriving = input_entry(choice, num_dims(row), setting.sequence)
    if before is not None:
        arriving = boxed_output_entry(before[1], choice, num_dims(before[0]), setting.sequence)
    return size / _parts(arriving, setting), size / _parts(taken, setting)


def _weights(row: LayerCost, choice: ResolvedLayer, setting: StageSettings) -> tuple[Weights, Weights]:
    """What a rank has of the trained weights and of the frozen ones. A row-split layer has whole biases."""
    layer, (trained, frozen) = row.layer, weights_of(row.layer, setting.software)
    whole = {False: trained, True: frozen}
    if choice.split is not None:
        whole = {False: 0.0, True: 0.0}
        for name in held_by(layer, setting.software):
            if split_dim(choice.kind, choice.split, len(layer.shapes[name])) is None:
                whole[name in layer.frozen] += weights_in(layer, name, setting.software)
    return _part_of(trained, whole[False], choice, setting), _part_of(frozen, whole[True], choice, setting)


def _part_of(number: float, whole: float, choice: ResolvedLayer, setting: StageSettings) -> Weights:
    """A rank's part of a layer's weights, of which ``whole`` are not split."""
    parts = setting.model * choice.over_data
    if parts == 1:
        return Weights(number)
    is_summed = setting.model > 1 and (setting.software.sums_shared or choice.parallel == "data")
    shared = whole if is_summed else 0.0
    held = whole + (number - whole) / parts
    if choice.expert is not None:  # of a rank's share of the list
        held, shared = number / parts, 0.0
    # Each expert is on data / over_data ranks. Their sums and ZeRO's shards are those of so many weights on one rank
    # and the others on all ranks of the data axis.
    apart = held * (choice.over_data - 1) / (setting.data - 1) if choice.over_data > 1 else 0.0
    return Weights(held, shared, apart)


def state_bytes(
    weights: float, shared: float, setting: StageSettings, apart: float = 0.0, frozen: Weights = NO_WEIGHTS
) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer state. ZeRO shards them over the ranks that share a weight.

    Args:
        weights, shared, apart: of trained weights; units are those of ``weights_of``.
        frozen: the weights without gradient and state.
    """
    software, precision = setting.software, setting.precision
    parameter = software.parameter_bytes(precision)
    sizes = parameter, software.gradient_bytes(precision), setting.optimizer_bytes
    shard = sharded(Weights(weights, shared, apart), setting)
    held = [shard if setting.zero >= stage else weights for stage in (3, 2, 1)]
    parameters, gradients, optimizer = (number * size for number, size in zip(held, sizes, strict=True))
    still = sharded(frozen, setting) if setting.zero == 3 else frozen.number
    return parameters + still * parameter, gradients, optimizer


def sharded(weights: Weights, setting: StageSettings) -> float:
    """The number of weights in a rank's shard under ZeRO."""
    number, shared, apart = weights
    return (number - shared - apart) / setting.shards + apart + shared / (setting.shards * setting.model)
