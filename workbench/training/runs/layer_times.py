"""Times each layer's forward and backward in a few steps of a training run.

Hooks cost time themselves, so only these steps have them. In backward a layer begins when autograd reaches the node
that made its output. It ends when autograd reaches the node that made its input. If the input needs no gradient, it
ends when the layer's last parameter has its gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from workbench.tensors.global_tensor import local_torch
from workbench.training.strategies.state import ROOT, layers_of
from workbench.transport.traffic import DeviceClock, Time, seconds

FIRST_STEP = 5
"""The first measured step, after those that plan and cache; then every step that is twice as late as the one before."""


def is_measured(step: int) -> bool:
    """Whether a step's layers are timed. Steps 5, 10, 20, 40, ... after the strategy's first step are."""
    parts, rest = divmod(step, FIRST_STEP)
    return rest == 0 and parts > 0 and parts & (parts - 1) == 0


class LayerTimes:
    """Seconds of a model's layers on this rank. ``measure`` is the context of a measured step.

    Attributes:
        forward_s, backward_s: layer -> seconds of one step, over all its micro-batches, the median over the measured
            steps. Neither has the weight gradients that a schedule defers (zero bubble).

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    >>> times = LayerTimes(model)
    >>> with times.measure():
    ...     model(torch.ones(3, 4)).sum().backward()
    >>> sorted(times.forward_s), sorted(times.backward_s)
    (['0', '1'], ['0', '1'])
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [(name or ROOT, module) for name, module in layers_of(model)]
        self._clock = DeviceClock(next((p.device for p in model.parameters()), torch.device("cpu")))
        self._steps: list[list[_LayerTimer]] = []

    @property
    def forward_s(self) -> dict[str, float]:
        """By layer, forward."""
        return _medians([{timer.name: timer.forwards for timer in timers} for timers in self._steps])

    @property
    def backward_s(self) -> dict[str, float]:
        """By layer, backward."""
        return _medians([{timer.name: timer.backwards for timer in timers} for timers in self._steps])

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Context around one step's forwards and backwards."""
        timers = [_LayerTimer(name, self._clock.now) for name, _ in self._layers]
        with ExitStack() as hooks:
            for timer, (_, module) in zip(timers, self._layers, strict=True):
                for handle in timer.hooks(module):
                    hooks.callback(handle.remove)
            yield
        self._steps.append(timers)


class _LayerTimer:
    """One layer in one step: when its forwards and backwards began and ended. Reading these waits for the device."""

    def __init__(self, name: str, now: Callable[[], Time]) -> None:
        self.name, self._now = name, now
        self.forwards: list[tuple[Time, Time]] = []
        self.backwards: list[tuple[Time, Time]] = []
        self._began: Time = 0.0
        self._counted_to: Time = 0.0
        self._is_in_backward = self._ends_with_parameters = False
        self._walk = -1  # through autograd's graph, in which the layer's backward began

    def hooks(self, module: nn.Module) -> Iterator[Any]:
        yield module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        yield module.register_forward_hook(self._after_forward, with_kwargs=True)
        with local_torch():
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad:
                    yield parameter.register_post_accumulate_grad_hook(self._parameter_is_done)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._began = self._now()

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.forwards.append((self._began, self._now()))
        if not torch.is_grad_enabled():
            return
        inputs = _nodes((args, kwargs))
        self._ends_with_parameters = not inputs
        for node in _nodes(output):
            node.register_prehook(self._begin_backward)
        for node in inputs:
            node.register_prehook(self._end_backward)

    def _begin_backward(self, grads: Any) -> None:
        if not self._is_in_backward:
            self._is_in_backward, self._counted_to, self._walk = True, self._now(), _current_walk()

    def _end_backward(self, grads: Any) -> None:
        if self._is_in_backward:
            self._count()

    def _parameter_is_done(self, parameter: torch.Tensor) -> None:
        if self._ends_with_parameters and self._walk == _current_walk():
            self._count()  # others of its parameters may follow

    def _count(self) -> None:
        now = self._now()
        self.backwards.append((self._counted_to, now))
        self._is_in_backward, self._counted_to = False, now


def _current_walk() -> int:
    return torch._C._current_graph_task_id()


def _nodes(values: Any) -> list[Any]:
    """The autograd nodes that made the tensors among ``values``."""
    with local_torch():
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        return [torch.autograd.graph.get_gradient_edge(tensor).node for tensor in tensors]


def _medians(steps: list[dict[str, list[tuple[Time, Time]]]]) -> dict[str, float]:
    """The median over the steps of the seconds in a layer's intervals."""
    found: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, intervals in step.items():
            if intervals:
                found[name].append(sum(seconds(stop) - seconds(start) for start, stop in intervals))
    return {name: median(times_s) for name, times_s in found.items()}
