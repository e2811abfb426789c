"""``wb.log``: what a training loop of one's own reports to the live view of the notebook."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from workbench.core.metrics import StepSpans
from workbench.runtime.pipelining.timeline import clock_offset
from workbench.runtime.runs.collecting import Collector, Listener, Measured, action_spans
from workbench.runtime.strategies.state import STATE
from workbench.runtime.watching.memory import PeakMeter, model_memory
from workbench.runtime.world import World, current

_SPANS_INTERVAL_S = 1.0


def _same() -> int:
    return 0


_listener: Listener | None = None
_number: Callable[[], int] = _same


def listen(listener: Listener | None, number: Callable[[], int] = _same) -> None:
    """Have ``listener`` get what loops report; ``number()`` tells one loop from the next. None: nobody listens."""
    global _listener, _number
    _listener, _number = listener, number


def log(
    *,
    loss: torch.Tensor | float | None = None,
    samples: int = 0,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Report one step of a training loop to the notebook's live view (``wb.LiveView``). All ranks call it, every step.

    A step lasts from one call to the next. Steps travel together, about three times a second, in one exchange of all
    ranks; a loss stays where it is until then, so reading it does not slow the loop. The last third of a second of a
    loop may be missing. Without a notebook nothing happens.

    Args:
        loss: of the step: a number, or a scalar tensor, global or not.
        samples: in the step, over all ranks; for samples per second.
        model: what is trained, and
        optimizer: its optimizer: then memory by kind and the timeline of a scheduled step are shown, too.

    ``wb.log(loss=loss, samples=64)`` after ``optimizer.step()`` is all that a loop needs.
    """
    if _listener is None:
        return
    world = current()
    loop = _loops.get(world)
    if loop is None or loop.number != _number():
        loop = _loops[world] = _Loop(world, _number())
    loop.add(loss, samples, model, optimizer, _listener)


class _Loop:
    """The steps of one loop on this rank."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self._collector = Collector(world)
        self._peak = PeakMeter(world.device, shares_process=True)
        self._offset = clock_offset(world)
        self._before: tuple[float, float, int] | None = None
        self._until_spans_s = 0.0
        self._step = 0

    def add(self, loss: Any, samples: int, model: nn.Module | None, optimizer: Any, listener: Listener) -> None:
        now, traffic = time.perf_counter(), self.world.traffic
        before = self._before or (now, traffic.time_s, traffic.sent_bytes)  # the first step has no beginning
        measured = Measured(samples, now - before[0], traffic.time_s - before[1], traffic.sent_bytes - before[2])
        self._collector.add(measured, loss.detach() if isinstance(loss, torch.Tensor) else loss)
        if self._collector.is_due:
            block, _ = self._collector.collect(self._memory(model, optimizer))
            if self.world.rank == 0:
                listener(block)
            self._until_spans_s -= sum(block.step_times_s)
            spans = model.__dict__[STATE].spans if model is not None and STATE in model.__dict__ else []
            if spans and self._until_spans_s <= 0:
                self._until_spans_s = _SPANS_INTERVAL_S
                listener(StepSpans(self.world.rank, self._step, action_spans(spans, self._offset)))
        self._step += 1
        self._before = (time.perf_counter(), traffic.time_s, traffic.sent_bytes)

    def _memory(self, model: nn.Module | None, optimizer: Any) -> dict[str, int]:
        held = model_memory(model, optimizer) if model is not None and optimizer is not None else {}
        return {**held, "peak": self._peak.peak_bytes()}


_loops: WeakKeyDictionary[World, _Loop] = WeakKeyDictionary()

__all__ = ["listen", "log"]
