"""Times each layer's forward and backward in a few steps of a training run.

Hooks cost time themselves, so only these steps have them. In backward a layer begins when autograd reaches the node
that made its output. It ends when autograd reaches the node that made its input. If the input needs no gradient, it
ends when the layer's last parameter has its gradient.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from workbench.tensors.global_tensor import local_torch
from workbench.training.strategies.state import ROOT, layers_of

FIRST_STEP = 5
"""The first measured step, after those that plan and cache; then every step that is twice as late as the one before."""


def is_measured(step: int) -> bool:
    """Whether a step's layers are timed. Steps 5, 10, 20, 40, ... after the strategy's first step are."""
    parts, rest = divmod(step, FIRST_STEP)
    return rest == 0 and parts > 0 and parts & (parts - 1) == 0


class LayerTimes:
    """Seconds of a model's layers on this rank. ``measure`` is the context of a measured step.

    On a GPU a measured step waits for the device at every layer, so it takes longer than others.

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
        self._steps: list[tuple[dict[str, float], dict[str, float]]] = []

    @property
    def forward_s(self) -> dict[str, float]:
        """By layer, forward."""
        return _medians([forward for forward, _ in self._steps])

    @property
    def backward_s(self) -> dict[str, float]:
        """By layer, backward."""
        return _medians([backward for _, backward in self._steps])

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Context around one step's forwards and backwards."""
        watches = [_LayerTimer(name) for name, _ in self._layers]
        with ExitStack() as hooks:
            for timer, (_, module) in zip(watches, self._layers, strict=True):
                for handle in timer.hooks(module):
                    hooks.callback(handle.remove)
            yield
        self._steps.append(
            (
                {timer.name: timer.forward_s for timer in watches if timer.forward_s},
                {timer.name: timer.backward_s for timer in watches if timer.backward_s},
            )
        )


class _LayerTimer:
    """One layer in one step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.forward_s = self.backward_s = 0.0
        self._began = self._counted_to = 0.0
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
        self._began = _now(args)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.forward_s += _now(output) - self._began
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
            self._is_in_backward, self._counted_to, self._walk = True, _now(grads), _current_walk()

    def _end_backward(self, grads: Any) -> None:
        if self._is_in_backward:
            self._count(grads)

    def _parameter_is_done(self, parameter: torch.Tensor) -> None:
        if self._ends_with_parameters and self._walk == _current_walk():
            self._count(parameter)  # others of its parameters may follow

    def _count(self, value: Any) -> None:
        now = _now(value)
        self.backward_s += now - self._counted_to
        self._is_in_backward, self._counted_to = False, now


def _current_walk() -> int:
    return torch._C._current_graph_task_id()


def _nodes(values: Any) -> list[Any]:
    """The autograd nodes that made the tensors among ``values``."""
    with local_torch():
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        return [torch.autograd.graph.get_gradient_edge(tensor).node for tensor in tensors]


def _now(values: Any) -> float:
    """The time when the device has finished its work."""
    if torch.cuda.is_available() and any(getattr(leaf, "is_cuda", False) for leaf in tree_leaves(values)):
        torch.cuda.synchronize()
    return time.perf_counter()


def _medians(steps: list[dict[str, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, seconds in step.items():
            found[name].append(seconds)
    return {name: median(seconds) for name, seconds in found.items()}


__all__ = ["LayerTimes", "is_measured"]
