"""Stages of a preset are cut in the order in which a forward calls the layers, which the first batch shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from workbench.core.presets import strategy_of
from workbench.tensors import default_generator
from workbench.tensors.global_tensor import GlobalTensor, plain
from workbench.tensors.tensor_state import forget_derived
from workbench.tensors.world import World
from workbench.training.batches import call
from workbench.training.gradients.stale_optimizer import optimizers_of
from workbench.training.parallel import parallelize
from workbench.training.strategies.call_order import Calls, recorded_calls
from workbench.training.strategies.reshard_state import OptimizerState
from workbench.training.strategies.state import ParallelState, describe, state_of


def reorder_stages(module: nn.Module, state: ParallelState, inputs: Any, world: World) -> ParallelState:
    """What is in force on the module once its stages follow the order of calls. All ranks call it.

    ``parallelize`` knows no batch: it cuts a preset's stages in the order in which the module lists its layers. One
    forward of the first micro-batch, without a schedule, shows the order of calls. Where the stages are others by it,
    weights, buffers and the state of optimizers are boxed to them; the parameters stay the same objects.
    """
    if state.preset is None:
        return state
    preset, state.preset = state.preset, None
    if state.resolved.num_stages == 1:
        return state
    strategy = strategy_of(preset, describe(module, _calls(module, inputs, world)), world.world_size)
    if strategy == state.strategy:
        return state
    optimizers = [OptimizerState(optimizer, module, world) for optimizer in optimizers_of(module, world)]
    parallelize(module, strategy)
    for optimizer in optimizers:
        optimizer.reshard({})
    reordered = state_of(module)
    reordered.has_compared_batch = state.has_compared_batch
    return reordered


def _calls(module: nn.Module, inputs: Any, world: World) -> Calls:
    """The calls of a forward that leaves nothing behind."""
    with _buffers_kept(module), world.context.temporarily(generator=torch.Generator(), tracer=None):
        random = default_generator.states(world.device)
        with recorded_calls(module) as calls:
            call(module, inputs)
        default_generator.set_states(random, world.device)
    return calls


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Afterwards the module has its buffers, with the values that they have now."""
    held: list[tuple[dict[str, Any], str, Any]] = [
        (part._buffers, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()
    ]
    here = [b for _, _, b in held if isinstance(b, GlobalTensor) and not b._spec.is_placeholder]
    values = [plain(buffer).clone() for buffer in here]
    try:
        yield
    finally:
        for holder, name, buffer in held:
            holder[name] = buffer
            if isinstance(buffer, GlobalTensor):
                forget_derived(buffer)  # the write below is seen on one stage's ranks only
        with torch.no_grad():
            for buffer, before in zip(here, values, strict=True):
                plain(buffer).copy_(before)
