"""Transfers between stages: of activations with their gradients, and of weights that layers of several stages share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from workbench.core.layer_layouts import boxed_output_entry, input_entry
from workbench.core.model_costs import LayerCost, ModelCosts
from workbench.core.strategy import ResolvedStrategy
from workbench.core.weight_splits import TABLE
from workbench.cost.boxings import num_dims, passed_bytes
from workbench.cost.calls import num_calls
from workbench.cost.collectives import exchange_s
from workbench.cost.layers import LayerPrice
from workbench.cost.stage_settings import StageSettings, weights_in


def on_all_ranks(setting: StageSettings, batch_size: int) -> float:
    """How many times the fullest rank of a stage has what all its ranks have: shares of samples may be uneven."""
    return setting.model * batch_size / (setting.num_micro_batches * setting.samples)


def hops_of(
    model: ModelCosts, strategy: ResolvedStrategy, settings: Sequence[StageSettings], batch_size: int
) -> tuple[float, float]:
    """(seconds of the slowest transfer between two stages, bytes of all transfers in a step, both directions)."""
    slowest = total = 0.0
    layers = strategy.layers
    for index in range(1, len(layers)):
        stage, before = layers[index].stage, layers[index - 1].stage
        if stage == before:
            continue
        setting, reader, row = settings[before], settings[stage], model.rows[index - 1]
        whole = passed_bytes(row, reader)
        dims = num_dims(row)
        left = boxed_output_entry(layers[index - 1], None, dims, setting.sequence)
        taken = input_entry(layers[index], dims, setting.sequence)
        parts = 1 if taken == "B" else reader.model
        if setting.software.scatters_between_stages and left != "sequence":
            seconds = exchange_s(setting.hardware, whole / setting.model, 2, setting.data * setting.model)
            seconds += exchange_s(setting.hardware, whole * (1 - 1 / setting.model), setting.model)
        else:
            seconds = _sent_s(whole / parts, setting, reader)
        part = whole / parts
        if strategy.slice_of(stage) == strategy.slice_of(before):  # the same ranks, which keep what they hold
            part, seconds = 0.0 if left in ("B", taken) else part * (1 - 1 / setting.model), 0.0
        slowest = max(slowest, seconds)
        # backward, what came in as B goes back as terms of a sum
        ways = 1 + (row.has_gradients[1] or model.rows[index].has_gradients[0])
        total += ways * part * strategy.num_micro_batches * on_all_ranks(reader, batch_size)
    for source, target, size, ways in _beside(model, strategy, settings):
        slowest = max(slowest, _sent_s(size, settings[source], settings[target]))
        total += ways * size * strategy.num_micro_batches * on_all_ranks(settings[target], batch_size)
    return slowest, total


def _sent_s(num_bytes: float, sender: StageSettings, reader: StageSettings) -> float:
    """Seconds of a transfer of which each rank of the reading stage takes ``num_bytes``, at its busier end."""
    senders, readers = sender.data * sender.model, reader.data * reader.model
    return exchange_s(sender.hardware, num_bytes * max(1.0, readers / senders), 2, senders, "send")


def _beside(
    model: ModelCosts, strategy: ResolvedStrategy, settings: Sequence[StageSettings]
) -> Iterator[tuple[int, int, float, int]]:
    """Transfers between stages other than from a layer to the next, such as a residual, or what a layer takes in a
    further call: (stage that makes it, stage that reads it, bytes of a micro-batch on a rank that reads it, 2 with its
    gradient and else 1). A stage receives each tensor once.
    """
    stages = [layer.stage for layer in strategy.layers]
    called: set[int] = set()  # layers that begin a stage, and have taken what hops_of counts
    for index, row in enumerate(model.rows):
        source = stages[index]
        for skip in row.skip_connections:
            taking = {index + place for place in skip.as_input if place > 0} - called
            taking = {layer for layer in taking if stages[layer] != stages[layer - 1]}
            handed, called = {stages[layer] for layer in taking}, called | taking
            readers = {stages[index + place]: strategy.layers[index + place] for place in skip.readers}
            for target, reader in readers.items():
                if target in (source, *handed) or strategy.slice_of(target) == strategy.slice_of(source):
                    continue
                is_split = reader.parallel == "data" or settings[target].sequence
                size = skip.size_bytes * settings[target].samples * settings[target].scale
                yield source, target, size / (settings[target].model if is_split else 1), 1 + skip.has_gradient


def prices_with_ties(
    model: ModelCosts, ties: Sequence[tuple[int, int]], strategy: ResolvedStrategy, prices: list[LayerPrice],
    settings: Sequence[StageSettings],
) -> list[LayerPrice]:  # fmt: skip
    """The prices of layers with the transfers of weights that an earlier stage holds: a layer gets the weight for each
    call, and its backward sends the gradient. ``ties`` are the model's ``tied_pairs``.
    """
    if settings[0].software.copies_tied or strategy.num_stages == 1 or not ties:
        return prices
    found = list(prices)
    for pair in ties:
        (source, _), (stage, index) = sorted((strategy.layers[index].stage, index) for index in pair)
        if strategy.slice_of(source) == strategy.slice_of(stage):
            continue
        row, price, times = model.rows[index], found[index], num_calls(model, model.rows[index])
        there, back = weight_transfers(row, strategy.layers[index].split is not None, settings[source], settings[stage])
        keeps = row.has_gradients[0] and row.layer.kind != TABLE and not price.cast  # backward multiplies with it
        found[index] = replace(
            price,
            boxing_forward_s=price.boxing_forward_s + times * there.seconds,
            boxing_backward_s=price.boxing_backward_s + times * back.seconds,
            boxed_bytes=price.boxed_bytes + times * (there.num_bytes + back.num_bytes),
            boxed_forward_bytes=price.boxed_forward_bytes + times * there.num_bytes,
            kept_bytes=price.kept_bytes + times * there.num_bytes * keeps,
            passing_bytes=price.passing_bytes + back.num_bytes,
        )
    return found


class Transfer(NamedTuple):
    """What one rank receives from another stage, and its seconds."""

    num_bytes: float
    seconds: float


def weight_transfers(
    row: LayerCost, is_split: bool, owner: StageSettings, user: StageSettings
) -> tuple[Transfer, Transfer]:
    """For one call of a layer whose weight another stage holds: the weight there, and its gradient back."""
    layer, software = row.layer, user.software
    whole = weights_in(layer, "weight", software) if "weight" in layer.shapes else 0.0
    weights = whole / (user.model if is_split else 1)
    there = weights * software.parameter_bytes(user.precision)
    back = weights * software.gradient_bytes(user.precision) * ("weight" not in layer.frozen)
    return Transfer(there, _sent_s(there, owner, user)), Transfer(back, _sent_s(back, owner, user))


def tied_s(model: ModelCosts, strategy: ResolvedStrategy, settings: Sequence[StageSettings]) -> float:
    """Seconds of the sums of gradients of a weight that two stages have copies of; they run last."""
    if not settings[0].software.copies_tied:
        return 0.0
    stage_of = {layer.name: layer.stage for layer in strategy.layers}
    seconds = 0.0
    for row in model.rows:
        first = stage_of.get(row.layer.tied_to or "")
        stage = stage_of[row.layer.name]
        if first is None or first == stage:
            continue
        setting = settings[stage]
        trained = [name for name in row.layer.shapes if name not in row.layer.frozen]
        weight = max((weights_in(row.layer, name, setting.software) for name in trained), default=0) / setting.model
        size = weight * setting.software.gradient_bytes(setting.precision)
        if not trained:
            continue
        seconds += exchange_s(setting.hardware, size, 2, setting.data * setting.model)
    return seconds
