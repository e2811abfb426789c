"""Split backward: gradients of weights are computed later than those of inputs (zero bubble schedules).

A function of shards that has a parameter among its operands runs in a graph of its own. The backward asks that graph
for the gradients of the inputs alone, which other stages wait for, and keeps the gradient of the result; the second
half asks it for the gradients of the parameters. Two walks through the whole graph would run every boxing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward as _run_backward
from torch.utils._pytree import tree_flatten, tree_unflatten

from workbench.tensors.global_tensor import GlobalTensor
from workbench.tensors.world import World


def gradients(results: Sequence[Any], grads: Sequence[torch.Tensor], wanted: Sequence[Any]) -> tuple[Any, ...]:
    """``torch.autograd.grad`` of tensors or edges of a graph that stays, without its checks; None for what is not used.

    The two halves call the engine for every layer; torch's functions around it compare shapes as symbols, which takes
    longer than small layers do.
    """
    return _run_backward(tuple(results), tuple(grads), True, False, tuple(wanted), allow_unreachable=True)


class WeightGradients:
    """The postponed part of a micro-batch's backward: results, their gradients, and the parameters behind them."""

    def __init__(self) -> None:
        self._left: list[tuple[list[Any], list[torch.Tensor], list[torch.Tensor]]] = []

    def add(self, results: list[Any], grads: list[torch.Tensor | None], parameters: list[torch.Tensor]) -> None:
        """Record results (tensors, or edges of a graph) whose parameters have no gradients yet."""
        pairs = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
        if pairs:
            self._left.append(([result for result, _ in pairs], [grad for _, grad in pairs], parameters))

    def accumulate(self) -> None:
        """Compute the postponed gradients and add them to those of the parameters."""
        left, self._left = self._left, []
        for results, grads, parameters in left:
            ends, seeds, leaves = tuple(results), tuple(grads), tuple(parameters)
            _run_backward(ends, seeds, False, False, leaves, allow_unreachable=True, accumulate_grad=True)


class _Split(torch.autograd.Function):
    """A local function in a graph of its own; its backward gives the gradients of the inputs and keeps the rest."""

    @staticmethod
    def forward(
        ctx: Any, call: Callable[..., torch.Tensor], kept: WeightGradients, parameters: Any, anchor: Any, *inputs: Any
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            own = [value.detach().requires_grad_() for value in inputs]
            result = call(own)
        ctx.inner, ctx.ends = (result, own, kept, parameters), [*own, anchor]
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (result, own, kept, parameters), grad = ctx.inner, grads[0]
        ctx.inner = None
        if grad is None:
            return None, None, None, None, *(None for _ in own)
        found = gradients([result], [grad], own) if own else ()
        kept.add([result], [grad], parameters)
        return None, None, None, None, *found


def graph_inside(node: Any) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """The result of the graph that a node of the surrounding graph stands for, and its leaves but for parameters."""
    return (node.inner[0], node.ends) if isinstance(node, _Split._backward_cls) else None  # type: ignore[attr-defined]


def split_backward(local: Callable[..., Any], world: World) -> Callable[..., Any]:
    """``local``, whose parameters get their gradients later wherever the world's running step keeps them back."""

    def call(*args: Any, **kwargs: Any) -> Any:
        defers = world.context.running is not None and torch.is_grad_enabled()
        kept = world.context.running.deferred_weight_gradients() if defers else None
        if kept is None:
            return local(*args, **kwargs)
        leaves, structure = tree_flatten((args, kwargs))
        learns = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        parameters = [leaves[i] for i in learns if is_parameter(leaves[i])]
        if not parameters:
            return local(*args, **kwargs)
        places = [i for i in learns if not is_parameter(leaves[i])]

        def on(inputs: list[torch.Tensor]) -> torch.Tensor:
            for place, value in zip(places, inputs, strict=True):
                leaves[place] = value
            again, named = tree_unflatten(leaves, structure)
            return local(*again, **named)

        anchor = torch.empty(0, device=world.device, requires_grad=True)  # gives a first layer a history
        return _Split.apply(on, kept, parameters, anchor, *(leaves[i] for i in places))

    return call


def is_parameter(tensor: Any) -> bool:
    """Whether a tensor is a parameter itself, and not something made of one."""
    return isinstance(tensor, GlobalTensor) and tensor._is_param and tensor.is_leaf


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether a parameter has hooks on its gradient."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
