"""Recurrent layers: the batch splits; the weights of a recurrence stay whole, as every step needs all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from workbench.core.rules import Signature
from workbench.core.sbp import Split, broadcast
from workbench.runtime.ops.registry import Call, Resolution, composite, rule
from workbench.runtime.ops.shards import zeros_where_empty

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


@rule(*_LAYERS)
def _layers(call: Call) -> Resolution | None:
    """``(input, states, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first)``."""
    is_packed = isinstance(call.args[3], (list, tuple))
    if is_packed or len(call.shapes[0]) != 3:
        return None
    batch_at = 0 if call.arg(8, "batch_first", False) else 1
    num_states = 2 if call.name == "lstm" else 1
    return Resolution(_over_batch(call, batch_at, (1,) * num_states, (batch_at, *(1,) * num_states)), zeros_where_empty)


@rule(*_CELLS)
def _cells(call: Call) -> Resolution | None:
    if len(call.shapes[0]) != 2:
        return None
    num_states = 2 if call.name == "lstm_cell" else 1
    return Resolution(_over_batch(call, 0, (0,) * num_states, (0,) * num_states), zeros_where_empty)


def _over_batch(call: Call, at: int, states: tuple[int, ...], results: tuple[int, ...]) -> list[Signature]:
    weights = (broadcast,) * (len(call.operands) - 1 - len(states))
    batch = Signature((Split(at), *map(Split, states), *weights), tuple(map(Split, results)), "n")
    return [batch, Signature((broadcast,) * len(call.operands), (broadcast,) * len(results))]


def _with_dropout(name: str) -> Any:
    function = getattr(torch, name)
    num_states = 2 if name == "lstm" else 1

    def run(input: Any, states: Any, weights: Any, *options: Any) -> Any:
        """Layer by layer, with dropout between them that depends on the logical position only."""
        if len(options) != 6 or isinstance(weights, bool):
            return NotImplemented  # packed sequences
        has_biases, num_layers, dropout, train, bidirectional, batch_first = options
        if not (train and dropout and num_layers > 1):
            return NotImplemented
        num_directions = 2 if bidirectional else 1
        per_layer = len(weights) // num_layers
        initial = states if name == "lstm" else (states,)
        finals: list[list[Any]] = [[] for _ in range(num_states)]
        for layer in range(num_layers):
            rows = slice(layer * num_directions, (layer + 1) * num_directions)
            own = [state[rows] for state in initial]
            input, *final = function(
                input, tuple(own) if name == "lstm" else own[0], weights[layer * per_layer : (layer + 1) * per_layer],
                has_biases, 1, 0.0, train, bidirectional, batch_first,
            )  # fmt: skip
            for collected, state in zip(finals, final, strict=True):
                collected.append(state)
            if layer < num_layers - 1:
                input = F.dropout(input, dropout)
        return (input, *(torch.cat(collected) for collected in finals))

    return run


for _name in _LAYERS:
    composite(_name)(_with_dropout(_name))
