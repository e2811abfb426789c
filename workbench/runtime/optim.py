"""Plain torch optimizers on global parameters: gradients reduced in buckets, the step on local shards.

A parameter's ``.grad`` keeps its dual layout (one term of a sum on each rank) and is never reduced in place, so it
goes on accumulating. Before an optimizer's step, torch's global step hooks (registered here once) put the local
shard with the reduced gradient in the place of each global parameter; after it, the parameters come back. Whatever
the optimizer does, fused or foreach, it does to plain local tensors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from workbench.core.layout import Layout
from workbench.runtime.tensor import GlobalTensor, local_torch, plain

BUCKET_BYTES = 25 * 2**20
"""Gradients are reduced in flat buckets of about this size."""
_BUCKETS_UNDER_WAY = 2
"""More would only take memory for copies of gradients."""

Graded = tuple[GlobalTensor, torch.Tensor]
"""A parameter and its local gradient."""
_installed = False
_swapped: dict[int, list[list[Any]]] = {}


def install_hooks() -> None:
    """Register the step hooks with torch, once per process."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _installed = True


def state_layout(parameter: GlobalTensor) -> Layout:
    """The layout in which an optimizer's per-element state of ``parameter`` lies: its own, or its shard's under ZeRO.

    ``optimizer.state[parameter]`` holds this rank's part as plain tensors.
    """
    return parameter._spec.layout


Finish = Callable[[], dict[GlobalTensor, torch.Tensor]]


def start_reduction(parameters: Iterable[GlobalTensor]) -> Finish:
    """Begin to sum the terms of the parameters' gradients over the axes on which a parameter is broadcast.

    All ranks of the parameters' placements call it with the same parameters in the same order; ghosts and parameters
    without a gradient are left out.

    Returns:
        a function that waits for the sums and gives each parameter's local gradient, in the parameter's own layout.
    """
    with local_torch():
        graded = [(parameter, plain(parameter.grad)) for parameter in parameters if parameter.grad is not None]
    return start_sums([(parameter, local, parameter._spec.term_ranks) for parameter, local in graded])


def start_sums(terms: Iterable[tuple[GlobalTensor, torch.Tensor, tuple[int, ...]]]) -> Finish:
    """Begin to sum local tensors, each over a group of ranks, in flat buckets.

    Args:
        terms: (whose sum it is, this rank's term, the ranks that hold terms).

    Returns:
        a function that waits for the sums and gives each by whose it is.
    """
    result: dict[GlobalTensor, torch.Tensor] = {}
    buckets: dict[Any, list[Graded]] = {}
    for owner, local, group in terms:
        if len(group) == 1:
            result[owner] = local
        else:
            buckets.setdefault((group, local.dtype), []).append((owner, local))
    # In the order of the parameters on all ranks, so that no two ranks wait for each other's later buckets.
    waiting = deque((bucket, key[0]) for key, members in buckets.items() for bucket in _cut_into_buckets(members))
    started = deque(_start_bucket(*waiting.popleft()) for _ in range(min(_BUCKETS_UNDER_WAY, len(waiting))))

    def finish() -> dict[GlobalTensor, torch.Tensor]:
        while started:
            result.update(started.popleft()())
            if waiting:
                started.append(_start_bucket(*waiting.popleft()))
        return result

    return finish


def _cut_into_buckets(members: list[Graded]) -> Iterator[list[Graded]]:
    bucket: list[Graded] = []
    size = 0
    for parameter, local in members:
        bucket.append((parameter, local))
        size += local.numel() * local.element_size()
        if size >= BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _start_bucket(bucket: list[Graded], group: tuple[int, ...]) -> Finish:
    world = bucket[0][0]._spec.world
    started = time.perf_counter()
    locals_ = [local for _, local in bucket]
    num_bytes = sum(local.nbytes for local in locals_)
    header = f"reduction of {len(bucket)} gradients, {num_bytes} bytes"
    wait = world.transport.start_all_reduce(locals_, group, "sum", world.next_sum_tag(group), header)

    def finish() -> dict[GlobalTensor, torch.Tensor]:
        pieces = wait().split([local.numel() for local in locals_])
        sent = 2 * (len(group) - 1) * num_bytes // len(group)
        world.traffic.add("gradients", sent, time.perf_counter() - started)
        if world.tracer is not None:
            world.tracer.add_reduction(group, [local for _, local in bucket])
        return {p: piece.view(local.shape) for (p, local), piece in zip(bucket, pieces, strict=True)}

    return finish


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    _put_back(optimizer)  # a step that raised has left its local tensors behind
    held = [group["params"] for group in optimizer.param_groups]
    parameters = [p for params in held for p in params if isinstance(p, GlobalTensor)]
    if not parameters:
        return None
    args, kwargs = _run_closure_first(args, kwargs)
    finish = start_reduction(parameters)
    _swapped[id(optimizer)] = held
    with local_torch():  # while the sums are under way
        for group, params in zip(optimizer.param_groups, held, strict=True):
            group["params"] = [_as_local(optimizer, parameter) for parameter in _present(params)]
        for parameter, grad in finish().items():
            parameter.__dict__["_local_alias"].grad = grad
    return args, kwargs


def _as_local(optimizer: Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, GlobalTensor):
        return parameter
    local = parameter.__dict__.get("_local_alias")
    if local is None or local.data_ptr() != parameter.data_ptr():
        local = parameter.__dict__["_local_alias"] = plain(parameter)
    if parameter in optimizer.state:
        state = optimizer.state.pop(parameter)  # what an optimizer has made of global tensors before its first step
        optimizer.state[local] = {k: plain(v) if isinstance(v, GlobalTensor) else v for k, v in state.items()}
    return local


def _present(parameters: list[Any]) -> list[Any]:
    """The parameters of which this rank holds a part."""
    return [p for p in parameters if not (isinstance(p, GlobalTensor) and p._spec.is_ghost)]


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _put_back(optimizer)


def _put_back(optimizer: Optimizer) -> None:
    held = _swapped.pop(id(optimizer), None)
    if held is None:
        return
    for group, params in zip(optimizer.param_groups, held, strict=True):
        for owner, local in zip(_present(params), group["params"], strict=True):
            if owner is not local:
                local.grad = None
                if local in optimizer.state:
                    optimizer.state[owner] = optimizer.state.pop(local)
        group["params"] = params


def _run_closure_first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A closure computes the gradients that are to be reduced, so it runs before; the step gets its loss."""
    closure: Callable[[], Any] | None = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    if "closure" in kwargs:
        return args, {**kwargs, "closure": lambda: loss}
    return (args[0], lambda: loss, *args[2:]), kwargs
