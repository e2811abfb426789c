"""Backward from global tensors.

Local autograd computes on every rank the gradient of the sum over the ranks of the local results. A loss that lies
as B on n ranks is therefore seeded with 1/n on each, one that lies as P with 1, and every gradient has the dual
layout of its tensor; nothing else is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workbench.core.sbp import Partial, broadcast
from workbench.errors import LayoutError
from workbench.runtime.boxing import box
from workbench.runtime.entry import enter_as_broadcast
from workbench.runtime.ops.registry import handler
from workbench.runtime.tensor import GlobalTensor, ghost_storage, label, local_torch, spec_of


def seed_of(loss: GlobalTensor, gradient: Any) -> torch.Tensor:
    """The local gradient to start from: the logical one (default one) over the number of copies of the loss."""
    spec = loss._spec
    for entry in spec.layout.sbp:
        if isinstance(entry, Partial) and entry.reduction != "sum":
            raise LayoutError(f"backward: the tensor lies as {entry}, which is not differentiable. Box it to B first.")
    if gradient is None and spec.shape:
        raise RuntimeError(
            f"grad can be implicitly created only for scalar outputs, but this one has shape {tuple(spec.shape)}"
        )
    if spec.is_ghost and gradient is None:
        return ghost_storage(spec.shape, loss.dtype, spec.world.device)
    if gradient is None:
        with local_torch():
            return torch.full((), 1.0 / spec.layout.num_replicas, dtype=loss.dtype, device=spec.world.device)
    whole = spec.layout.with_sbp(tuple(broadcast if isinstance(entry, Partial) else entry for entry in spec.layout.sbp))
    if not isinstance(gradient, GlobalTensor):
        gradient = enter_as_broadcast(gradient, spec.world, spec.layout)
    gradient = box(gradient, whole)
    with local_torch():
        return (gradient / spec.layout.num_replicas).as_subclass(torch.Tensor)


@handler("backward")
def backward(func: Any, args: Any, kwargs: Any) -> None:
    """``loss.backward()``; every rank calls it, with a ghost loss too."""
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    loss, options = args[0], {**dict(zip(names, args[1:], strict=False)), **kwargs}
    seed = seed_of(loss, options.get("gradient"))
    with local_torch():
        torch.autograd.backward(
            loss, seed, options.get("retain_graph"), bool(options.get("create_graph")), inputs=options.get("inputs")
        )


@handler("grad")
def grad(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """``torch.autograd.grad``; the gradients come labelled with the dual layouts."""
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
    options = {**dict(zip(names, args, strict=False)), **kwargs}
    outputs, inputs = _listed(options["outputs"]), _listed(options["inputs"])
    given = _listed(options.get("grad_outputs")) or [None] * len(outputs)
    seeds = [seed_of(output, seed) for output, seed in zip(outputs, given, strict=True)]
    rest = {name: options[name] for name in ("retain_graph", "create_graph", "allow_unused") if name in options}
    with local_torch():
        found = torch.autograd.grad(outputs, inputs, seeds, **rest)
    return tuple(_labelled(value, tensor) for value, tensor in zip(found, inputs, strict=True))


def _labelled(value: torch.Tensor | None, tensor: Any) -> Any:
    if value is None or not isinstance(tensor, GlobalTensor):
        return value
    spec = spec_of(tensor._spec.world, tensor._spec.layout.dual(), tensor._spec.shape)
    with local_torch():
        return label(value.view_as(value), spec)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) else [value]
