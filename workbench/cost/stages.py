"""The price of a stage: the sum of its layers' prices, with recomputation and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workbench.core.layer_layouts import following_of
from workbench.core.model_costs import LayerCost, ModelCosts
from workbench.core.recompute_kinds import chosen_blocks
from workbench.core.strategy import ResolvedLayer
from workbench.core.weight_splits import TABLE
from workbench.cost.accumulation import accumulation_s, rows_in_blocks, stage_adds_in_place
from workbench.cost.boxings import are_siblings, ends_of_expert
from workbench.cost.buckets import LARGEST_BYTES, bucket_bytes, num_buckets
from workbench.cost.layers import NO_WEIGHTS, LayerPrice, Weights, layer_price, state_bytes
from workbench.cost.offload import copies_s, offloads, state_here_bytes
from workbench.cost.peaks import NO_PEAKS, Peaks, RowsAgain, peaks_of, units_of
from workbench.cost.stage_settings import StageSettings, held_by, weights_in, weights_of


@dataclass(frozen=True, slots=True)
class StagePrice:
    """The price of a stage on one rank; seconds and bytes of one micro-batch unless a step is named.

    Attributes:
        forward_s, input_s, weight_s: forward, backward of inputs and of weights, with exchanges and recomputation.
        compute_s, boxing_s: the parts of these three together.
        boxed_bytes: bytes that a rank receives from other ranks of its stage.
        weights: number of trained weights, which it updates; units are those of ``stage_settings.weights_of``.
        shared: number of these whose gradients are also summed over the model axis.
        tables: number of weights that backward does not need: of embeddings, and where no backward is.
        cast_weights: number of ``weights`` that ZeRO 3 gathers for backward in 16 bits.
        boxing_forward_s: the part of ``boxing_s`` in forward.
        num_units: blocks and layers outside of blocks, which ZeRO 3 gathers one by one.
        num_buckets: buckets of gradients, and of parameters that ZeRO 1 and 2 gather after the update.
        apart: number of ``weights`` whose gradients are not summed over the data axis: experts that it splits.
        parameters, gradients, optimizer: bytes that it holds.
        kept_bytes: activations, per live micro-batch.
        operands_bytes, result_gradients: further activations of a micro-batch whose gradients of weights are postponed:
            what recomputed layers read for them, and the gradients of the results of layers.
        offloaded: bytes that it holds beside the device, instead of these.
        leaving: activations beside the device, per live micro-batch.
        frozen: its weights that are not trained.
        peaks: memory at the fullest moments of a backward.
    """

    forward_s: float
    input_s: float
    weight_s: float
    compute_s: float
    boxing_s: float
    boxed_bytes: float
    weights: float
    parameters: float
    gradients: float
    optimizer: float
    kept_bytes: float
    peaks: Peaks = NO_PEAKS
    shared: float = 0.0
    tables: float = 0.0
    boxing_forward_s: float = 0.0
    cast_weights: float = 0.0
    num_units: float = 1
    num_buckets: tuple[int, int] = (1, 1)
    apart: float = 0.0
    offloaded: float = 0.0
    operands_bytes: float = 0.0
    leaving: float = 0.0
    frozen: Weights = NO_WEIGHTS
    result_gradients: float = 0.0

    @property
    def trained(self) -> Weights:
        """The weights that it updates."""
        return Weights(self.weights, self.shared, self.apart)

    @property
    def postponed_bytes(self) -> float:
        """Bytes that a micro-batch holds besides while the gradients of its weights wait."""
        return self.operands_bytes + self.result_gradients


def prices_of(
    rows: Sequence[LayerCost], choices: Sequence[ResolvedLayer], settings: Sequence[StageSettings]
) -> list[LayerPrice]:
    """Prices of all layers; equal layers with equal neighbours are priced once."""
    known: dict[tuple[object, ...], LayerPrice] = {}
    prices = []
    for index, (row, choice) in enumerate(zip(rows, choices, strict=True)):
        has_before = index > 0 and choices[index - 1].stage == choice.stage
        before = (rows[index - 1], choices[index - 1]) if has_before else None
        behind = following_of(choices, index)
        setting = settings[choice.stage]
        key: tuple[object, ...] = (row.counted, row.layer.tied_to, _of_choice(choice), setting.data, setting.model)
        if before is not None:
            key += (
                before[0].passed or before[0].output,
                before[0].passed_itemsize or before[0].itemsize,
                _of_choice(before[1]),
                are_siblings(before, (row, choice)),
            )
        is_last = index == len(rows) - 1
        key += (behind and _of_choice(behind), is_last, ends_of_expert(choice, before, behind, setting.model))
        price = known.get(key)
        if price is None:
            price = known[key] = layer_price(row, choice, before, behind, setting, is_last)
        prices.append(price)
    return prices


def _of_choice(choice: ResolvedLayer) -> tuple[object, ...]:
    return choice.kind, choice.parallel, choice.split, choice.over_data


def stage_prices(
    model: ModelCosts, choices: Sequence[ResolvedLayer], prices: Sequence[LayerPrice], settings: Sequence[StageSettings]
) -> list[StagePrice]:
    """The prices of all stages."""
    rows_of: list[list[int]] = [[] for _ in settings]
    for index, choice in enumerate(choices):
        rows_of[choice.stage].append(index)
    blocks, again = block_of_rows(model), rows_again(model, settings[0].recompute)
    units = units_of(model, blocks)
    known: dict[object, StagePrice] = {}
    stages = []
    in_place = _added_in_place(model, choices, prices, settings)
    for mine, setting in zip(rows_of, settings, strict=True):
        updated = _updated(model, mine, setting)
        held = set(updated)
        # as many equal blocks cost the same
        begin, first = (blocks[mine[0]], again.blocks[mine[0]]) if mine else (0, 0)
        key = (
            id(setting),
            *(
                (
                    id(prices[i]),
                    blocks[i] < 0 or blocks[i] - begin,
                    again.blocks[i] < 0 or again.blocks[i] - first,
                    i in held,
                    in_place[i],
                )
                for i in mine
            ),
        )
        if key not in known:
            known[key] = _added_up(model, mine, again, units, prices, setting, updated, [in_place[i] for i in mine])
        stages.append(known[key])
    return stages


def _added_in_place(
    model: ModelCosts, choices: Sequence[ResolvedLayer], prices: Sequence[LayerPrice], settings: Sequence[StageSettings]
) -> list[float]:
    """For each row, to the gradients of how many weights a later micro-batch adds in place."""
    added = [price.added_in_place if stage_adds_in_place(settings[c.stage]) else 0.0
             for price, c in zip(prices, choices, strict=True)]  # fmt: skip
    if any(added) and settings[0].stages > 1:
        stages = [choice.stage for choice in choices]
        are_inside = rows_in_blocks([row.layer.name for row in model.rows], stages)
        for index, is_inside in enumerate(are_inside):
            if is_inside and settings[stages[index]].model == 1:
                added[index] = 0.0
    return added


def _added_up(
    model: ModelCosts, mine: Sequence[int], rows_again: RowsAgain, units: Sequence[int],
    prices: Sequence[LayerPrice], setting: StageSettings, updated: Sequence[int], in_place: Sequence[float],
) -> StagePrice:  # fmt: skip
    if setting.zero == 3:
        prices = [price.without_casts() for price in prices]
    forward = sum(prices[i].forward_s for i in mine)
    boxing = sum(prices[i].boxing_forward_s for i in mine)
    again = _recomputed(mine, rows_again, prices, setting)
    boxing_back = sum(prices[i].boxing_backward_s for i in mine)
    input_s, weight_s = sum(prices[i].input_s for i in mine), sum(prices[i].weight_s for i in mine)
    weight_s += accumulation_s(sum(prices[i].weights + prices[i].tied for i in mine) - sum(in_place), setting)
    hidden = {
        "none": 0.0,
        "sums": sum(prices[i].boxing_sums_s for i in mine),
        "all": boxing_back,
    }[setting.software.hides_tensor_parallel]
    boxing_back -= min(hidden, weight_s)  # overlapped with the products for the weights
    weights, shared = sum(prices[i].weights for i in updated), sum(prices[i].shared for i in updated)
    apart = sum(prices[i].apart for i in updated)
    frozen = sum((prices[i].frozen for i in updated), NO_WEIGHTS)
    parameters, gradients, optimizer = state_bytes(weights, shared, setting, apart, frozen)
    peaks = peaks_of(model, mine, rows_again, units, prices, setting, updated, in_place)
    offloaded = optimizer if offloads(setting, "optimizer") else 0.0
    if offloaded:
        part = setting.software.parameter_bytes(setting.precision) / (setting.shards if setting.zero else 1)
        sizes = [size * part for size in _tensors(model, {i: prices[i].weights for i in updated}, setting)]
        optimizer, updating = state_here_bytes(offloaded, sizes, setting)
        peaks = peaks._replace(update_bytes=peaks.update_bytes + updating)
    backward = input_s + boxing_back + again.compute_s + again.boxing_s + weight_s
    leaving = 0.0
    if offloads(setting, "activations"):  # not those of a loss, which is computed behind the module
        of_loss = prices[-1].kept_after_bytes if len(model.rows) - 1 in mine else 0.0
        leaving = max(0.0, again.kept_bytes - again.results_bytes - of_loss)
    is_again = {i for i in mine if setting.recompute and (rows_again.are_alone or rows_again.blocks[i] >= 0)}
    is_kept = not setting.recompute or setting.recompute_kind == "scores"
    with_backward = {units[i] for i in mine if prices[i].has_backward or (rows_again.blocks[i] >= 0 and not is_kept)}
    waits = copies_s(leaving, forward + boxing, setting), copies_s(leaving, backward, setting)
    return StagePrice(
        forward + boxing + waits[0],
        input_s + boxing_back + again.compute_s + again.boxing_s + waits[1],
        weight_s,
        forward + input_s + weight_s + again.compute_s + sum(waits),
        boxing + boxing_back + again.boxing_s,
        sum(prices[i].boxed_bytes for i in mine) + again.boxed_bytes,
        weights,
        parameters,
        gradients,
        optimizer,
        again.kept_bytes - leaving,
        peaks,
        shared,
        sum(
            prices[i].weights + prices[i].frozen.number
            for i in mine
            if model.rows[i].layer.kind == TABLE or units[i] not in with_backward
        ),
        boxing,
        sum(prices[i].cast for i in updated if model.rows[i].layer.tied_to is None and i not in is_again),
        len({units[i] for i in mine}),
        _buckets(model, updated, prices, setting),
        apart,
        offloaded,
        again.operands_bytes,
        leaving,
        frozen,
        sum(prices[i].result_gradients for i in mine),
    )


def _buckets(
    model: ModelCosts, updated: Sequence[int], prices: Sequence[LayerPrice], setting: StageSettings
) -> tuple[int, int]:
    """Number of buckets of trained parameters that ranks sum. Backward fills them from the last parameter on."""
    each = setting.software.gradient_bytes(setting.precision)
    summed = {i: prices[i].weights if setting.data > 1 else prices[i].shared for i in updated}
    sizes = [number * each for number in _tensors(model, summed, setting)]
    return num_buckets(sizes[::-1], bucket_bytes(sum(sizes))), num_buckets(sizes, LARGEST_BYTES)


def _tensors(model: ModelCosts, weights: Mapping[int, float], setting: StageSettings) -> list[float]:
    """The sizes of a rank's trained parameters, from how many weights it has of each row."""
    sizes = []
    for i, held in weights.items():
        layer, software = model.rows[i].layer, setting.software
        numbers = [weights_in(layer, name, software) for name in held_by(layer, software) if name not in layer.frozen]
        numbers = numbers if layer.shapes else [weights_of(layer, software)[0]]
        sizes += [held / sum(numbers) * number for number in numbers if number]
    return sizes


def _updated(model: ModelCosts, mine: Sequence[int], setting: StageSettings) -> Sequence[int]:
    """Rows of the stage whose weights it holds and updates; a copy of a tied weight where the stage lacks the first."""
    if not setting.software.copies_tied:
        return mine
    names = {model.rows[i].layer.name for i in mine}
    return [i for i in mine if model.rows[i].layer.tied_to not in names]


def block_of_rows(model: ModelCosts) -> list[int]:
    """For every row the number of its block; rows outside of blocks have numbers of their own below zero."""
    numbers = [-1 - index for index in range(len(model.rows))]
    count = 0
    for first, length, repeats in model.blocks:
        for _ in range(repeats):
            numbers[first : first + length] = [count] * length
            first, count = first + length, count + 1
    return numbers


def rows_again(model: ModelCosts, recompute: str = "full") -> RowsAgain:
    """The rows that recomputation runs again. Where backward does not go through a block, it does not run again."""
    blocks: Sequence[int] = model.recomputed or block_of_rows(model)
    has_blocks = max(blocks, default=-1) >= 0
    if recompute.isdecimal() and not has_blocks:
        blocks = range(len(blocks))  # each layer is one
    chosen = chosen_blocks(max(blocks, default=-1) + 1, recompute)
    with_backward = {block for row, block in zip(model.rows, blocks, strict=True) if row.has_gradients[1]}
    blocks = [block if block in chosen and block in with_backward else -1 - row for row, block in enumerate(blocks)]
    return RowsAgain(blocks, are_alone=not has_blocks and not recompute.isdecimal())


class Recomputation(NamedTuple):
    """Recomputation of a micro-batch: seconds of compute and exchanges, bytes received, bytes kept before it, further
    bytes kept after it for the gradients of weights, and of those before it, results that blocks do not compute again.
    """

    compute_s: float
    boxing_s: float
    boxed_bytes: float
    kept_bytes: float
    operands_bytes: float = 0.0
    results_bytes: float = 0.0


def _recomputed(
    mine: Sequence[int], again: RowsAgain, prices: Sequence[LayerPrice], setting: StageSettings
) -> Recomputation:
    kept = sum(prices[i].kept_bytes for i in mine)
    if not setting.recompute:
        return Recomputation(0.0, 0.0, 0.0, kept)
    kind = setting.recompute_kind
    if kind == "scores":
        scores = [prices[i].scores_bytes for i in mine]
        return Recomputation(sum(prices[i].scores_s for i in mine), 0.0, 0.0, kept - sum(scores))
    blocks = again.blocks
    inside = [i for i in mine if blocks[i] >= 0 or (again.are_alone and prices[i].has_backward)]
    there = set(mine)
    behind = [i for i in mine if blocks[i] < 0 and i - 1 in there and blocks[i - 1] >= 0]
    kept += sum(prices[i].kept_behind_block_bytes - prices[i].kept_bytes for i in behind)
    begun: set[int] = set()
    operands = 0.0
    results = sum(prices[i].kept_results_bytes(kind) for i in inside)
    for i in inside:
        kept -= prices[i].kept_bytes
        own = prices[i].kept_bytes - prices[i].kept_after_bytes
        if again.are_alone:
            kept += prices[i].kept_alone_bytes
            own -= min(own, prices[i].boxed_input_bytes)
        elif blocks[i] not in begun:
            kept += prices[i].input_bytes
            own -= min(own, prices[i].input_bytes)
        begun.add(blocks[i])
        operands += own
    kept += results
    return Recomputation(
        sum(prices[i].again_s(kind) for i in inside),
        sum(prices[i].boxing_forward_s for i in inside),
        sum(prices[i].boxed_forward_bytes for i in inside),
        kept,
        operands,
        results,
    )
