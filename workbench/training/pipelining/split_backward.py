"""Split backward (zero bubble): gradients of inputs first, of weights later, from torch's own graph.

The first part is a backward of the whole micro-batch that leaves out the parameters of this rank. Beside it stay the
gradients of the results of those functions that read a parameter beside an input. The second part asks each of these
functions for its parameters alone, so nothing is computed twice and no boxing runs twice. A checkpoint runs its layers
again in the first part, and keeps for the second what these functions read. (Qi et al., arXiv 2401.10241.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, _engine_run_backward

from workbench.tensors.dispatch.autograd import backward
from workbench.tensors.global_tensor import GlobalTensor, local_torch
from workbench.training.pipelining.running_step import RunningStep

_FUNCTION, _BARRIER, _PARAMETER = range(3)
_Kinds = tuple[int, ...]
"""By number of a node: a function of torch, or one in Python with two parts; another function in Python (a boxing) or
leaf, which the first part visits; or a parameter of this rank."""
_Graph = tuple[tuple[int, ...], ...]
"""By number of a node, the nodes that it hands gradients to."""


class WeightGradients:
    """The postponed part of a micro-batch's backward: functions, gradients of their results, and their parameters."""

    def __init__(self, running: RunningStep) -> None:
        self._running = running
        self._left: list[tuple[Any, list[Any], list[torch.Tensor]]] = []

    def watch(self, node: Any, parameters: list[torch.Tensor], between: list[Any]) -> None:
        """Keep the gradients of a function's results, and what it reads in a checkpoint, when the first part comes by.

        Functions ``between`` it and its parameters do not run in the first part.
        """
        grads: list[Any] = []
        running = self._running

        def begin(found: Any) -> None:  # a hook that held the node would keep it alive for ever
            if running.computes_weights:
                return
            grads.extend(found)
            running.keeps_operands = True
            for function in between:
                _read_operands(function)

        def end(*_: Any) -> None:
            running.keeps_operands = False

        if _has_parts(node):
            node.part = "input"
        node.register_prehook(begin)
        node.register_hook(end)
        self._left.append((node, grads, parameters))

    def accumulate(self) -> None:
        """Compute the postponed gradients and add them to those of the parameters."""
        left, self._left = self._left, []
        self._running.computes_weights = True
        try:
            while left:  # from the loss on: what is done keeps nothing alive
                node, grads, parameters = left.pop()
                if _has_parts(node):
                    node.part = "weight"
                found = [(GradientEdge(node, at), grad) for at, grad in enumerate(grads) if grad is not None]
                if found:
                    ends, seeds = zip(*found, strict=True)
                    _engine_run_backward(
                        ends, seeds, False, False, tuple(parameters), allow_unreachable=True, accumulate_grad=True
                    )
        finally:
            self._running.computes_weights = False


def _read_operands(function: Any) -> None:
    kind: Any = type(function)
    for name in _names_of_operands(kind):
        getattr(function, name)


@cache
def _names_of_operands(kind: Any) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_saved_")]


def backward_of_inputs(loss: torch.Tensor, running: RunningStep) -> WeightGradients:
    """The first part of a backward, in the step ``running``; the result is the second one."""
    kept = WeightGradients(running)
    with local_torch():
        nodes, kinds, graph = _graph(loss.grad_fn)
        readers = _readers(kinds, graph)
        postponed = {leaf for _, leaves, _ in readers for leaf in leaves}
        others = [node.variable for at, node in enumerate(nodes) if hasattr(node, "variable") and at not in postponed]
    if not postponed or not others:
        backward(loss)
        return kept
    for at, leaves, between in readers:
        kept.watch(nodes[at], [nodes[leaf].variable for leaf in leaves], [nodes[function] for function in between])
    backward(loss, retain_graph=True, inputs=others)
    return kept


def _graph(root: Any) -> tuple[list[Any], _Kinds, _Graph]:
    """All nodes behind ``root``, their kinds, and the edges of each."""
    nodes, number = [root], {root: 0}
    kinds, graph = list[int](), list[tuple[int, ...]]()
    for node in nodes:  # the loop appends to the list
        edges = []
        for below, _ in node.next_functions:
            if below is not None:
                at = number.get(below)
                if at is None:
                    at = number[below] = len(nodes)
                    nodes.append(below)
                edges.append(at)
        graph.append(tuple(edges))
        kinds.append(_kind_of(node))
    return nodes, tuple(kinds), tuple(graph)


def _kind_of(node: Any) -> int:
    leaf = getattr(node, "variable", None)
    if leaf is None:
        return _BARRIER if isinstance(node, BackwardCFunction) and not _has_parts(node) else _FUNCTION
    is_here = isinstance(leaf, GlobalTensor) and leaf._is_param and not leaf._spec.is_placeholder
    return _PARAMETER if is_here else _BARRIER


def _has_parts(node: Any) -> bool:
    """Whether a function in Python computes the gradients of its inputs and of its weight apart, if ``part`` says so.

    torch asks its own functions for some gradients only, and those in Python for all.
    """
    return isinstance(node, BackwardCFunction) and hasattr(node, "part")


@lru_cache(maxsize=256)
def _readers(kinds: _Kinds, graph: _Graph) -> list[tuple[int, list[int], list[int]]]:
    """The functions of torch that read parameters beside an input, each with those that it alone reads, and the
    functions between.

    An input is what leads to a barrier. All micro-batches of a step share the result.

    >>> kinds = _FUNCTION, _FUNCTION, _PARAMETER, _BARRIER, _FUNCTION, _PARAMETER
    >>> _readers(kinds, ((1, 4), (2, 3), (), (), (5,), ()))
    [(1, [2], []), (0, [5], [4])]
    """
    leads: dict[int, bool] = {}  # whether a node leads to an input
    reads: dict[int, list[int]] = {}
    passed: dict[int, list[int]] = {}
    for node in _inputs_first(graph):
        beside = [below for below in graph[node] if not leads[below]]
        leads[node] = kinds[node] == _BARRIER or len(beside) < len(graph[node])
        if beside and leads[node]:
            behind = _behind(graph, beside)
            reads[node] = [one for one in behind if kinds[one] == _PARAMETER]
            passed[node] = [one for one in behind if kinds[one] == _FUNCTION]
    # What a barrier reads, it reads in the first part: its parameters count twice
    count = Counter(leaf for node, leaves in reads.items() for leaf in leaves * (1 + kinds[node]))
    found = [(node, [leaf for leaf in leaves if count[leaf] == 1], passed[node]) for node, leaves in reads.items()]
    return [each for each in found if each[1]]


def _inputs_first(graph: _Graph) -> Iterator[int]:
    """All nodes in an order in which each follows those that it gives gradients to."""
    seen: set[int] = set()
    waiting = [(0, False)]
    while waiting:
        node, is_ready = waiting.pop()
        if is_ready:
            yield node
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(below, False) for below in graph[node] if below not in seen]


def _behind(graph: _Graph, roots: Iterable[int]) -> list[int]:
    """The nodes of a part of a graph."""
    seen: dict[int, None] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting += graph[node]
    return list(seen)
