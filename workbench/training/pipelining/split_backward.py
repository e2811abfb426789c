"""Split backward of a whole block (zero bubble): gradients of inputs first, of weights later, from torch's own graph.

``dispatch/weight_gradients`` gives every function with a parameter a graph of its own. A block that runs as plain torch
has one graph instead. The first part walks it from the results to the inputs, and keeps the gradients of the results of
those functions that read a parameter beside an input. The second part asks each of these functions for its parameters
alone, so nothing is computed twice. (Qi et al., arXiv 2401.10241.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from workbench.tensors.dispatch.weight_gradients import WeightGradients, gradients
from workbench.tensors.global_tensor import local_torch


@dataclass(frozen=True, slots=True)
class Reader:
    """A function of a graph that alone reads some parameters, with its used results."""

    edges: list[GradientEdge]
    parameters: list[torch.Tensor]


def readers_of(
    results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[list[Reader], list[torch.Tensor]]:
    """The functions between ``inputs`` (leaves) and ``results`` that read parameters, and parameters read by several.

    >>> x, w = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    >>> [reader], shared = readers_of([F.linear(x, w).tanh()], [x])
    >>> type(reader.edges[0].node).__name__, reader.parameters[0] is w, shared
    ('MmBackward0', True, [])
    """
    roots = [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, results)]
    nodes, number, graph = _graph(node for node, _ in roots)
    ends = frozenset(number[node] for node in (get_gradient_edge(leaf).node for leaf in inputs) if node in number)
    places = _readers(graph, tuple((number[node], output) for node, output in roots), ends)
    readers = [
        Reader([GradientEdge(nodes[at], output) for output in outputs], [nodes[leaf].variable for leaf in leaves])
        for at, outputs, leaves in places.readers
    ]
    return readers, [nodes[leaf].variable for leaf in places.shared]


_Edges = tuple[tuple[int, int], ...]
"""Of one node, by number: those that it hands gradients to, and which of their outputs each is about."""


def _graph(roots: Iterable[Any]) -> tuple[list[Any], dict[Any, int], tuple[_Edges, ...]]:
    """All nodes behind ``roots``, their numbers, and the edges of each."""
    nodes = list(dict.fromkeys(roots))
    number = {node: at for at, node in enumerate(nodes)}
    graph: list[_Edges] = []
    for node in nodes:  # the loop appends to the list
        edges = []
        for below, output in node.next_functions:
            if below is not None:
                at = number.get(below)
                if at is None:
                    at = number[below] = len(nodes)
                    nodes.append(below)
                edges.append((at, output))
        graph.append(tuple(edges))
    return nodes, number, tuple(graph)


@dataclass(frozen=True, slots=True)
class _Places:
    """The places of functions that read parameters in a graph (node, outputs, leaves), and leaves that several read."""

    readers: list[tuple[int, list[int], list[int]]]
    shared: list[int]


@lru_cache(maxsize=256)
def _readers(graph: tuple[_Edges, ...], roots: _Edges, ends: frozenset[int]) -> _Places:
    """The result of ``readers_of`` by numbers of nodes, so that all graphs of one block share it."""
    follows: dict[int, bool] = {}  # whether a function's result depends on an input
    reads: dict[int, list[int]] = {}
    used: list[dict[int, None]] = [{} for _ in graph]
    for node in _inputs_first(graph, roots):
        beside = [below for below, _ in graph[node] if not follows[below]]
        follows[node] = node in ends or len(beside) < len(graph[node])
        if beside and follows[node]:
            reads[node] = _leaves(graph, beside)
        for below, output in graph[node]:
            used[below][output] = None
    for node, output in roots:
        used[node][output] = None
        if not follows[node]:
            reads[node] = _leaves(graph, [node])
    count = Counter(leaf for leaves in reads.values() for leaf in leaves)
    readers = [(node, list(used[node]), [leaf for leaf in found if count[leaf] == 1]) for node, found in reads.items()]
    return _Places([reader for reader in readers if reader[2]], [leaf for leaf in count if count[leaf] > 1])


def _inputs_first(graph: tuple[_Edges, ...], roots: _Edges) -> Iterator[int]:
    """All nodes in an order in which each follows those that it gives gradients to."""
    seen: set[int] = set()
    waiting = [(node, False) for node, _ in roots]
    while waiting:
        node, is_ready = waiting.pop()
        if is_ready:
            yield node
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting += [(below, False) for below, _ in graph[node] if below not in seen]


def _leaves(graph: tuple[_Edges, ...], roots: Iterable[int]) -> list[int]:
    """The leaves at the ends of a part of a graph."""
    seen: dict[int, None] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting += [below for below, _ in graph[node]]
    return [node for node in seen if not graph[node]]


class _SplitBlock(torch.autograd.Function):
    """A block in a graph of its own; its backward gives the gradients of the inputs and keeps the rest."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., list[torch.Tensor]], kept: WeightGradients, anchor: Any, *inputs: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            own = [value.detach().requires_grad_() for value in inputs]
            results = run(own)
        ctx.inner = (results, own, kept)
        made = tuple(result.detach() for result in results)
        ctx.mark_non_differentiable(*(m for m, result in zip(made, results, strict=True) if not result.requires_grad))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (results, own, kept), ctx.inner = ctx.inner, None
        pairs = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
        if not pairs:
            return None, None, None, *(None for _ in own)
        ends, seeds = map(list, zip(*pairs, strict=True))
        with local_torch():
            readers, shared = readers_of(ends, own)
            wanted = [*own, *(edge for reader in readers for edge in reader.edges), *shared]
            found = gradients(ends, seeds, wanted) if wanted else ()
        given = iter(found[len(own) :])
        for reader in readers:
            kept.add(reader.edges, [next(given) for _ in reader.edges], reader.parameters)
        for parameter in shared:
            kept.add([parameter], [next(given)], [parameter])
        return None, None, None, *found[: len(own)]


def split_block(forward: Callable[..., Any], kept: WeightGradients, device: torch.device) -> Callable[..., Any]:
    """A forward on plain tensors whose parameters get their gradients in the second part."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given, structure = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(given) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        leaves: list[Any] = []
        made: list[Any] = []

        def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            for place, value in zip(places, inputs, strict=True):
                given[place] = value
            again, named = tree_unflatten(given, structure)
            found, shape = tree_flatten(forward(*again, **named))
            leaves[:], made[:] = found, [shape]
            return [leaf for leaf in found if isinstance(leaf, torch.Tensor)]

        anchor = torch.empty(0, device=device, requires_grad=True)  # gives the first block a history
        tensors = iter(_SplitBlock.apply(run, kept, anchor, *(given[place] for place in places)))
        return tree_unflatten([next(tensors) if isinstance(x, torch.Tensor) else x for x in leaves], made[0])

    return call
