"""Convolutions of a part with their channels last, which is how Inductor and oneDNN run them fastest.

A part that has recorded channels before rows and columns would turn each operand of each convolution, in forward and
backward. Here what enters the first convolution is turned once, what follows keeps that order as torch's operators do,
and only what leaves the part is turned back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from workbench.tensors.fake_mode import fake_mode

_OPERANDS = {torch.ops.aten.convolution.default: 2, torch.ops.aten.convolution_backward.default: 3}
"""Convolutions, with the number of their first operands that are images and weights."""
_VIEWS = (torch.ops.aten.view.default,)
_FEWEST = 2
"""Convolutions, in forward and backward, for which turning pays."""


class _CannotTurnError(Exception):
    pass


def with_channels_last(graph: fx.GraphModule, values: Sequence[Any]) -> fx.GraphModule:
    """The same graph with its images turned; the graph itself if that is impossible, or of no use.

    Args:
        graph: of torch's operators.
        values: its operands.
    """
    if sum(node.target in _OPERANDS for node in graph.graph.nodes) < _FEWEST:
        return graph
    mode = fake_mode()
    try:
        with mode:
            return _turned(graph, [mode.from_tensor(value) for value in values])
    except (_CannotTurnError, RuntimeError, NotImplementedError):
        return graph


def _turned(graph: fx.GraphModule, values: Sequence[torch.Tensor]) -> fx.GraphModule:
    """By running the operators on fake tensors, as they are and turned."""
    made = fx.Graph()
    as_it_is: dict[fx.Node, Any] = {}
    turned: dict[fx.Node, Any] = {}
    nodes: dict[fx.Node, fx.Node] = {}
    copied: set[int] = set()  # memory of tensors of which there are turned copies
    given = iter(values)

    def add(node: fx.Node, target: Any, args: Any, kwargs: Any) -> None:
        nodes[node] = made.call_function(target, *fx.map_arg((args, kwargs), nodes.__getitem__))
        filled, named = fx.map_arg((args, kwargs), turned.__getitem__)
        turned[node] = target(*filled, **named)

    def copy(node: fx.Node, order: torch.memory_format) -> None:
        copied.add(as_it_is[node].untyped_storage()._cdata)
        add(node, torch.ops.aten.clone.default, (node,), {"memory_format": order})

    for node in graph.graph.nodes:
        if node.op == "placeholder":
            nodes[node] = made.placeholder(node.name)
            as_it_is[node] = turned[node] = next(given)
        elif node.op == "call_function":
            if _writes(node) & {each for each in node.all_input_nodes if _memory(as_it_is[each]) in copied}:
                raise _CannotTurnError
            for operand in node.args[: _OPERANDS.get(node.target, 0)]:
                if turned[operand].ndim == 4 and not turned[operand].is_contiguous(memory_format=torch.channels_last):
                    copy(operand, torch.channels_last)
            filled, named = fx.map_arg((node.args, node.kwargs), as_it_is.__getitem__)
            as_it_is[node] = node.target(*filled, **named)
            add(node, torch.ops.aten.reshape.default if node.target in _VIEWS else node.target, node.args, node.kwargs)
        else:
            for result in node.all_input_nodes:
                if turned[result].stride() != as_it_is[result].stride():
                    if not as_it_is[result].is_contiguous():
                        raise _CannotTurnError
                    copy(result, torch.contiguous_format)
            made.output(fx.map_arg(node.args[0], nodes.__getitem__))
    return fx.GraphModule(torch.nn.Module(), made)


def _memory(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _writes(node: fx.Node) -> set[fx.Node]:
    """Of the operands of an operator, those that it may write to."""
    schema = getattr(node.target, "_schema", None)
    return set(node.all_input_nodes) if schema is not None and schema.is_mutable else set()
