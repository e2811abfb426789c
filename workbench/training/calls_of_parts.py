"""Warns of calls in which the precision of the strategy does not act: those of a model's parts, or of its methods other
than ``forward``.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import nn

from workbench.training.precision import AUTOCAST_DTYPES
from workbench.training.strategies.state import ParallelState, layers_of
from workbench.transport.user_code import user_stacklevel


def install(module: nn.Module, state: ParallelState) -> list[Any]:
    """Warn once if a layer runs outside of ``module``'s own call, in which alone the precision of the strategy acts."""
    precision, kind = state.strategy.options.precision, state.layouts.world.autocast_type
    dtype = AUTOCAST_DTYPES.get(precision)
    layers = [(name, layer) for name, layer in layers_of(module) if layer is not module]
    if dtype is None or not layers:
        return []
    depth, has_warned, model = 0, False, type(module).__name__

    def begin(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def end(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    def end_all() -> None:
        nonlocal depth
        depth = 0

    def look(name: str, *_: Any) -> None:
        nonlocal has_warned
        # In backward blocks run again, in the context of their first run
        if depth or has_warned or torch._C._current_graph_task_id() != -1 or torch.is_autocast_enabled(kind):
            return
        has_warned = True
        warnings.warn(
            f"{precision}: {name} of {model} runs in 32 bits. The precision of a strategy acts in the call of the "
            f"model itself, and this is another method of it, or a call of a part. Put it into "
            f'"with torch.autocast({kind!r}, dtype={dtype}):".',
            stacklevel=user_stacklevel(),
        )

    state.on_interrupt.append(end_all)
    return [
        module.register_forward_pre_hook(begin, prepend=True),
        module.register_forward_hook(end, always_call=True),
        *(layer.register_forward_pre_hook(partial(look, name)) for name, layer in layers),
    ]
