"""The two halves of a whole block's backward (zero bubble), read off the graph that torch made of it.

``ops/weight_gradients`` gives every function with a parameter a graph of its own. A block that runs as plain torch has
one graph instead. The first half walks it from the results to the inputs, and keeps the gradients of the results of
those functions that read a parameter beside an input. The second half asks each of these functions for its parameters
alone, so nothing is computed twice. (Qi et al., arXiv 2401.10241.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from workbench.runtime.ops.weight_gradients import WeightGradients
from workbench.runtime.tensor import local_torch


@dataclass(frozen=True, slots=True)
class Reader:
    """A function of a graph that reads parameters which no other one reads, and the results of it that are used."""

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
    graph = _graph(node for node, _ in roots)
    ends = {get_gradient_edge(leaf).node for leaf in inputs}
    follows: dict[Any, bool] = {}  # whether a function's result follows from an input
    reads: dict[Any, list[torch.Tensor]] = {}
    used: dict[Any, dict[int, None]] = {node: {} for node in graph}
    for node, edges in graph.items():
        beside = [below for below, _ in edges if not follows[below]]
        follows[node] = node in ends or len(beside) < len(edges)
        if beside and follows[node]:
            reads[node] = _leaves(graph, beside)
        for below, number in edges:
            used[below][number] = None
    for node, number in roots:
        used[node][number] = None
        if not follows[node]:
            reads[node] = _leaves(graph, [node])
    count = Counter(id(leaf) for leaves in reads.values() for leaf in leaves)
    shared = {id(leaf): leaf for leaves in reads.values() for leaf in leaves if count[id(leaf)] > 1}
    readers = [
        Reader([GradientEdge(node, number) for number in used[node]], [p for p in leaves if id(p) not in shared])
        for node, leaves in reads.items()
    ]
    return [reader for reader in readers if reader.parameters], list(shared.values())


def _graph(roots: Iterable[Any]) -> dict[Any, list[tuple[Any, int]]]:
    """All nodes, each after those that it hands gradients to, with the edges to them."""
    graph: dict[Any, list[tuple[Any, int]]] = {}
    waiting: list[tuple[Any, list[tuple[Any, int]] | None]] = [(root, None) for root in roots]
    while waiting:
        node, edges = waiting.pop()
        if edges is not None:
            graph[node] = edges
        elif node not in graph:
            edges = [edge for edge in node.next_functions if edge[0] is not None]
            waiting.append((node, edges))
            waiting += [(below, None) for below, _ in edges if below not in graph]
    return graph


def _leaves(graph: dict[Any, list[tuple[Any, int]]], roots: Sequence[Any]) -> list[torch.Tensor]:
    """The leaves at the ends of a part of a graph."""
    seen: dict[Any, None] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting += [below for below, _ in graph[node]]
    return [node.variable for node in seen if hasattr(node, "variable")]


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
            found = torch.autograd.grad(ends, wanted, seeds, retain_graph=True, allow_unused=True) if wanted else ()
        given = iter(found[len(own) :])
        for reader in readers:
            kept.add(reader.edges, [next(given) for _ in reader.edges], reader.parameters)
        for parameter in shared:
            kept.add([parameter], [next(given)], [parameter])
        return None, None, None, *found[: len(own)]


def split_block(forward: Callable[..., Any], kept: WeightGradients, device: torch.device) -> Callable[..., Any]:
    """A forward on plain tensors whose parameters get their gradients in the second half."""

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

        anchor = torch.empty(0, device=device, requires_grad=True)  # else a first block would have no history
        tensors = iter(_SplitBlock.apply(run, kept, anchor, *(given[place] for place in places)))
        return tree_unflatten([next(tensors) if isinstance(x, torch.Tensor) else x for x in leaves], made[0])

    return call
