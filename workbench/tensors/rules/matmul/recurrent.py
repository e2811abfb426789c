"""Recurrent layers: the batch may be split. Weights stay whole, because each step needs all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from workbench.core.rules import Signature
from workbench.core.sbp import Split, broadcast
from workbench.tensors.dispatch.fallback import run_fallback
from workbench.tensors.dispatch.planning import Plan, operands_of
from workbench.tensors.dispatch.registry import Call, Resolution, composite, fold_name, rule
from workbench.tensors.rules.reduction.empty_shards import as_if_filled

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


@rule(*_LAYERS, *_CELLS)
def _recurrent(call: Call) -> Resolution | None:
    """``(input, states, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first)``, or of one step
    ``(input, states, weights)``; packed sequences have the weights fourth.
    """
    is_cell = call.name in _CELLS
    if isinstance(call.args[3], (list, tuple)) or len(call.shapes[0]) != (2 if is_cell else 3):
        return None
    batch_at = 0 if is_cell or call.arg(8, "batch_first", False) else 1
    states = (Split(0 if is_cell else 1),) * (2 if call.name.startswith("lstm") else 1)
    results = states if is_cell else (Split(batch_at), *states)
    weights = (broadcast,) * (len(call.operands) - 1 - len(states))
    batch = Signature((Split(batch_at), *states, *weights), results, "n")
    whole = Signature((broadcast,) * len(call.operands), (broadcast,) * len(results))
    return Resolution([batch, whole], as_if_filled)


def _layer_by_layer(name: str) -> Any:
    function = getattr(torch, name)
    has_cell = name == "lstm"

    def run(*args: Any) -> Any:
        """With dropout between layers, which depends on the logical position only; packed sequences are gathered."""
        is_packed = isinstance(args[3], (list, tuple))
        first, (states, weights, has_biases, num_layers, dropout, train, bidirectional) = (
            (args[:2], args[2:9]) if is_packed else (args[:1], args[1:8])
        )
        if not (train and dropout and num_layers > 1):
            return _gathered(function, args) if is_packed else NotImplemented
        rest = (has_biases, 1, 0.0, train, bidirectional, *args[8:][: not is_packed])
        per_layer, num_directions = len(weights) // num_layers, 2 if bidirectional else 1
        finals = []
        for layer in range(num_layers):
            rows = slice(layer * num_directions, (layer + 1) * num_directions)
            own = tuple(state[rows] for state in states) if has_cell else states[rows]
            out, *final = function(*first, own, weights[layer * per_layer : (layer + 1) * per_layer], *rest)
            finals.append(final)
            first = (F.dropout(out, dropout), *first[1:])
        return (out, *(torch.cat(states) for states in zip(*finals, strict=True)))

    return run


def _gathered(function: Any, args: Any) -> Any:
    """A call on packed sequences, which no rule covers, because the results depend on their lengths."""
    operands = operands_of(args, {})
    targets = [operand._spec.layout.broadcast() for operand in operands]
    plan = Plan(None, targets, None, None, function, fold_name(function), operands[0]._spec.world)
    return run_fallback(plan, function, args, {})


for _name in _LAYERS:
    composite(_name)(_layer_by_layer(_name))
