"""Backward from global tensors.

Local autograd computes on every rank the gradient of the sum over the ranks of the local results. A loss that lies
as B on n ranks is therefore seeded with 1/n on each, one that lies as P with 1, and every gradient has the dual
layout of its tensor; nothing else is needed.

The engine runs with torch functions enabled: what it calls of the user's (hooks, recomputation) meets global tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.overrides import handle_torch_function
from torch.utils._pytree import tree_leaves

from workbench.core.sbp import Partial
from workbench.errors import LayoutError
from workbench.tensors.boxing.box import box
from workbench.tensors.conversion import from_local
from workbench.tensors.dispatch.hooks import GradientConversion
from workbench.tensors.dispatch.registry import EXACT
from workbench.tensors.execution_context import ExecutionContext
from workbench.tensors.global_tensor import GlobalTensor, local_torch, new_placeholder
from workbench.tensors.patch_table import patch


def seed_of(loss: Any, gradient: Any) -> torch.Tensor | None:
    """The local gradient to start from: the logical one (default one) over the number of copies of the loss."""
    if not isinstance(loss, GlobalTensor):
        return _plain_seed(loss, gradient)
    spec = loss._spec
    for entry in spec.layout.sbp:
        if isinstance(entry, Partial) and entry.reduction != "sum":
            raise LayoutError(f"backward: the tensor lies as {entry}, which is not differentiable. Box it to B first.")
    if gradient is None:
        if not loss.requires_grad:
            return None
        if math.prod(spec.shape) != 1:
            raise RuntimeError(
                f"grad can be implicitly created only for scalar outputs, but this one has shape {tuple(spec.shape)}"
            )
        if spec.is_placeholder:
            return new_placeholder(spec.shape, loss.dtype, spec.world.device)
        with local_torch():
            one = 1.0 / spec.layout.num_replicas
            return torch.full(spec.local_shape, one, dtype=loss.dtype, device=spec.world.device)
    if tuple(gradient.shape) != tuple(spec.shape):
        raise RuntimeError(
            f"Mismatch in shape: the gradient has shape {tuple(gradient.shape)} and the output {tuple(spec.shape)}. "
            "Both are logical shapes: give the gradient of the whole tensor."
        )
    if not isinstance(gradient, GlobalTensor):
        gradient = from_local(gradient, spec.world, spec.layout)
    gradient = box(gradient, spec.layout.without_terms())
    with local_torch():
        if spec.is_placeholder and not gradient.requires_grad:
            return new_placeholder(spec.shape, loss.dtype, spec.world.device)
        return (gradient / spec.layout.num_replicas).as_subclass(torch.Tensor)


def _plain_seed(loss: Any, gradient: Any) -> torch.Tensor | None:
    """What torch takes for a plain output (or an edge of the graph); a global gradient is taken whole, on all ranks."""
    if isinstance(gradient, GlobalTensor):
        return gradient.full_tensor()
    if gradient is None and isinstance(loss, torch.Tensor) and loss.requires_grad:
        if loss.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return torch.ones_like(loss)
    return gradient


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """``torch.autograd.backward``; every rank calls it, with a placeholder loss too."""
    losses, inputs = _listed(tensors), _listed(inputs)
    given = _listed(grad_tensors) or [None] * len(losses)
    known = next((loss._spec.world.context for loss in losses if isinstance(loss, GlobalTensor)), None)
    context = ExecutionContext() if known is None else known
    running = context.running
    if running is not None and running.defers_backward(losses, is_plain=given == [None] * len(losses) and not inputs):
        return
    seeds = [seed_of(loss, gradient) for loss, gradient in zip(losses, given, strict=True)]
    context.begin_action("B")
    try:
        _engine_run_backward(
            tuple(losses),
            tuple(seeds),
            create_graph if retain_graph is None else retain_graph,
            create_graph,
            tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    finally:
        context.end_action("B")


def _backward_of_one(
    self: Any, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """``loss.backward()``."""
    backward(self, gradient, retain_graph, create_graph, inputs)


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    """``torch.autograd.grad``; the gradients have the dual layouts."""
    if is_grads_batched:
        raise LayoutError(
            "torch.autograd.grad(is_grads_batched=True) of a global tensor: vmap over shards has no layout for the "
            "batch of gradients. Call grad once per gradient."
        )
    outputs, inputs = _listed(outputs), _listed(inputs)
    given = _listed(grad_outputs) or [None] * len(outputs)
    seeds = [seed_of(output, seed) for output, seed in zip(outputs, given, strict=True)]
    reached = _ReachedInputs(inputs)
    try:
        found = _engine_run_backward(
            tuple(outputs),
            tuple(seeds),
            create_graph if retain_graph is None else retain_graph,
            create_graph,
            tuple(inputs),
            True,  # unreachable inputs give None; the code below then decides alike on all ranks
            accumulate_grad=False,
        )
    finally:
        reached.remove()
    results = [reached.gradient_of(number, value) for number, value in enumerate(found)]
    if not (materialize_grads if allow_unused is None else allow_unused) and any(result is None for result in results):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if "
            "this is the desired behavior."
        )
    if materialize_grads:
        results = [torch.zeros_like(t) if r is None else r for t, r in zip(inputs, results, strict=True)]
    return tuple(results)


class _ReachedInputs:
    """The inputs that a backward has reached. The gradient of a placeholder is None even then, so hooks record it."""

    def __init__(self, inputs: list[Any]) -> None:
        self.inputs = inputs
        self.placeholders: set[int] = set()
        self.handles: list[Any] = []
        for number, tensor in enumerate(inputs):
            if isinstance(tensor, GlobalTensor) and tensor._spec.is_placeholder:
                with local_torch():
                    if tensor.requires_grad:
                        self.handles.append(tensor.register_hook(self._recorder_of(number)))

    def _recorder_of(self, number: int) -> Any:
        def record(grad: Any) -> None:
            self.placeholders.add(number)

        return record

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def gradient_of(self, number: int, value: torch.Tensor | None) -> Any:
        """The gradient of an input in the dual layout; None where the backward did not reach it."""
        tensor = self.inputs[number]
        if not isinstance(tensor, GlobalTensor):
            return value
        is_reached = value is not None or number in self.placeholders
        return GradientConversion(tensor).to_global(value) if is_reached else None


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, (torch.Tensor, GradientEdge)):
        return [value]
    if isinstance(value, Mapping):
        return list(value.values())
    assert isinstance(value, Sequence) or hasattr(value, "__iter__")
    return list(value)


def _detach_in_place(self: GlobalTensor) -> GlobalTensor:
    with local_torch():
        torch.Tensor.detach_(self)
    return self


def _asking_seeds(torchs_own: Callable[..., Any], position: int, name: str) -> Callable[..., Any]:
    """``torchs_own``, which asks its outputs and inputs, and here the gradients that it starts from, too."""

    @functools.wraps(torchs_own)
    def ask(*args: Any, **kwargs: Any) -> Any:
        seeds = args[position] if len(args) > position else kwargs.get(name)
        known = tuple(seed for seed in tree_leaves(seeds) if isinstance(seed, GlobalTensor))
        if known and torch._C._is_torch_function_enabled():
            return handle_torch_function(torchs_own, known, *args, **kwargs)
        return torchs_own(*args, **kwargs)

    return ask


def _instead(replacement: Any, torchs_own: Any) -> Any:
    return replacement


EXACT[torch.Tensor.detach_] = EXACT[torch.detach_] = _detach_in_place
EXACT[torch.Tensor.backward] = _backward_of_one
for ours, position, name in ((backward, 1, "grad_tensors"), (grad, 2, "grad_outputs")):
    own = getattr(torch.autograd, ours.__name__)
    asking = _asking_seeds(own, position, name)
    EXACT[own] = EXACT[asking] = ours  # torch hands itself on by its name, which finds the replacement
    why = "it asks outputs and inputs: global gradients of plain outputs would be shards"
    patch(f"torch.autograd.{ours.__name__}", why, functools.partial(_instead, asking))
