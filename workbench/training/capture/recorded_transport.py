"""The transport of a step that is being recorded: its calls, and those of the functions that they return."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from workbench.tensors.world import World
from workbench.training.capture.recorder import Recorder


class RecordedTransport:
    """A transport whose calls are entries of a recording; ``recorded`` is the transport itself."""

    def __init__(self, recorder: Recorder, transport: Any) -> None:
        self._recorder, self.recorded = recorder, transport

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.recorded, name)
        if not callable(value):
            return value
        recorder, world = self._recorder, self._recorder.world

        def run(*args: Any, **kwargs: Any) -> Any:
            """Call the world's present transport: a rebuilt world has another one."""
            transport: Any = world.transport
            return _timed(world, getattr(transport, name), *args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            world.transport = self.recorded
            try:
                return recorder.call(f"transport.{name}", run, *args, **kwargs)
            finally:
                world.transport = self

        return call


def _timed(world: World, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of a transport. In a replay its time counts as time in exchanges; else its caller counts it. So
    does that of functions in its result.
    """
    started = None if world.context.recorder is not None else world.traffic.now()
    made = function(*args, **kwargs)
    if started is not None:
        world.traffic.end_exchange(started)
    return _timed_parts(world, made)


def _timed_parts(world: World, made: Any) -> Any:
    if isinstance(made, list | tuple):
        return type(made)(_timed_parts(world, part) for part in made)
    return partial(_timed, world, made) if callable(made) and not isinstance(made, torch.Tensor) else made
