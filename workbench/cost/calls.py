"""The boxings of layers that are called several times: each call has its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from workbench.core.layer_layouts import following_of, input_entry
from workbench.core.model_costs import LayerCall, LayerCost, ModelCosts
from workbench.core.strategy import ResolvedLayer
from workbench.cost.boxings import boxings, num_dims, seconds_and_bytes
from workbench.cost.layers import LayerPrice
from workbench.cost.stage_settings import StageSettings


def prices_with_calls(
    model: ModelCosts, choices: Sequence[ResolvedLayer], prices: Sequence[LayerPrice], settings: Sequence[StageSettings]
) -> list[LayerPrice]:
    """The prices of layers with the boxings of all their calls. A tensor is boxed to one layout once."""
    if not model.calls:
        return list(prices)
    index_of = {row.layer.name: index for index, row in enumerate(model.rows)}
    followings = [following_of(choices, index) for index in range(len(choices))]
    times = Counter(call.row.layer.name for call in model.calls)
    found = [replace(price, boxing_forward_s=0.0, boxing_backward_s=0.0, boxing_sums_s=0.0, boxed_bytes=0.0,
                     boxed_forward_bytes=0.0) for price in prices]  # fmt: skip
    boxed: set[tuple[int, str]] = set()
    for call in model.calls:
        index = index_of[call.row.layer.name]
        choice, setting = choices[index], settings[choices[index].stage]
        target = call.input, input_entry(choice, num_dims(call.row), setting.sequence)
        before = boxed_for = None
        if call.source is not None and target not in boxed:
            other = index_of[model.calls[call.source].row.layer.name]
            before, boxed_for = (_handed_on(model, call), choices[other]), followings[other]
            before = before if choices[other].stage == choice.stage else None
        boxed.add(target)
        is_last = index == len(choices) - 1
        count, price = times[call.row.layer.name], prices[index]
        beside = price.own_products_s / count, price.own_products_backward_s / count
        exchanges = boxings(call.row, choice, before, followings[index], setting, boxed_for, is_last, beside)
        (forward_s, forward), (backward_s, backward) = (
            seconds_and_bytes(some, setting) for some in (exchanges.forward, exchanges.backward)
        )
        price = found[index]
        found[index] = replace(
            price,
            boxing_forward_s=price.boxing_forward_s + forward_s,
            boxing_backward_s=price.boxing_backward_s + backward_s,
            boxing_sums_s=price.boxing_sums_s + seconds_and_bytes(exchanges.sums, setting)[0],
            boxed_bytes=price.boxed_bytes + forward + backward,
            boxed_forward_bytes=price.boxed_forward_bytes + forward,
        )
    return found


def num_calls(model: ModelCosts, row: LayerCost) -> int:
    """How often a layer is called in a forward."""
    return sum(call.row.layer.name == row.layer.name for call in model.calls) or 1


def _handed_on(model: ModelCosts, call: LayerCall) -> LayerCost:
    """The layer whose result a call takes, with what the call takes of it."""
    assert call.source is not None
    row, taken = model.calls[call.source].row, call.row.input_extent
    if taken is None:
        return row
    if taken.is_batchless:
        return replace(row, output=taken, passed=None, passed_itemsize=call.itemsize)
    return replace(row, passed=taken, passed_itemsize=call.itemsize)
