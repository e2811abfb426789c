"""``wb.log``: reports the steps of a user's own training loop to the live view of the notebook."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from workbench.core.metrics import LastSteps, LossTerm, StepSpans
from workbench.core.sbp import broadcast, partial_sum
from workbench.pipeline.schedules import Action
from workbench.tensors.global_tensor import GlobalTensor, plain
from workbench.tensors.world import World, current
from workbench.training.diagnostics.device_use import DeviceMeter
from workbench.training.diagnostics.memory import PeakMeter, model_memory
from workbench.training.pipelining.timeline import clock_offset
from workbench.training.recorded_actions import RecordedAction, read_actions
from workbench.training.runs.step_metrics import Listener, MeasuredStep, StepCollector
from workbench.transport.traffic import Moment

_SPANS_INTERVAL_S = 1.0


def _same() -> int:
    return 0


_listener: Listener | None = None
_number: Callable[[], int] = _same


def listen(listener: Listener | None, number: Callable[[], int] = _same) -> None:
    """Send the reports of loops to ``listener`` (None: to no one). ``number()`` distinguishes loops."""
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

    A step lasts from one call to the next. About three times a second, one exchange of all ranks sends the steps. A
    loss stays on its device until then, so reading it does not slow the loop. When the cell ends, also by an error, the
    remaining steps are reported. Another ``model`` begins another loop. Without a notebook it does nothing.

    Args:
        loss: loss of the step: a number, or a scalar tensor, global or not.
        samples: samples of the step, over all ranks, for samples per second.
        model: the trained model. With it and ``optimizer`` the view also shows memory by kind.
        optimizer: its optimizer.

    From the second step on the timeline shows the forwards of parallelized modules, the backwards from global losses
    and the optimizers' steps, between one call and the next.

    ``wb.log(loss=loss, samples=64)`` after ``optimizer.step()`` is all that a loop needs.
    """
    if _listener is None:
        return
    world = current()
    loop = _loops.get(world)
    if loop is not None and loop.is_another(_number(), model):
        loop.report(_listener)
        loop.stop_timing()
        loop = None
    if loop is None:
        loop = _loops[world] = _Loop(world, _number())
    loop.add(loss, samples, model, optimizer, _listener)


def report_remaining_steps() -> None:
    """Report the remaining steps of all loops when a cell has ended, perhaps by an error. Each rank reports alone."""
    for loop in list(_loops.values()):
        if _listener is not None:
            loop.end(_listener)
    _loops.clear()


class _Loop:
    """The steps of one loop on this rank."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self._collector = StepCollector(world)
        self._peak = PeakMeter(world.device, collects_garbage=False)
        self._device = DeviceMeter(world.device)
        self._timer = world.context.action_timer = ActionTimer(world)
        self._clock_offset = clock_offset(world)
        self._before: Moment | None = None
        self._until_spans_s = 0.0
        self._step = 0
        self._model: nn.Module | None = None
        self._optimizer: Any = None
        self._actions: tuple[RecordedAction, ...] = ()

    def is_another(self, number: int, model: nn.Module | None) -> bool:
        """Whether a step in this cell, of this model, belongs to another loop."""
        return number != self.number or (model is not None and self._model is not None and model is not self._model)

    def add(self, loss: Any, samples: int, model: nn.Module | None, optimizer: Any, listener: Listener) -> None:
        now = self.world.traffic.moment()
        measured = MeasuredStep(samples, self._before or now, now)  # the first step has no beginning
        self._collector.add(measured, loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._model, self._optimizer = model, optimizer
        self._actions = self._timer.take()
        if self._collector.is_due:
            self.report(listener)
        self._step += 1
        self._before = self.world.traffic.moment()

    def report(self, listener: Listener) -> None:
        """Exchange what the ranks have not reported yet, and report it. All ranks call it."""
        block, _ = self._collector.collect(self._memory(), device=self._device.read("fp32"))
        if self.world.rank == 0 and block.samples:
            listener(block)
        self._until_spans_s -= sum(block.step_times_s)
        if self._until_spans_s <= 0:
            self._report_spans(listener)

    def end(self, listener: Listener) -> None:
        """Report the last steps, and the timeline of the very last one, without an exchange."""
        first, steps, losses = self._collector.take()
        if steps:
            listener(
                LastSteps(
                    self.world.rank,
                    self.world.world_size,
                    first,
                    tuple(samples for samples, _ in steps),
                    tuple(map(_own_term, losses)),
                    tuple(interval.time_s for _, interval in steps),
                    tuple(interval.exchange_s for _, interval in steps),
                    tuple(interval.sent_bytes for _, interval in steps),
                    self._memory(),
                )
            )
        self._step -= 1
        self._report_spans(listener)
        self.stop_timing()

    def stop_timing(self) -> None:
        """End the loop. Later actions belong to no timeline."""
        if self.world.context.action_timer is self._timer:
            self.world.context.action_timer = None

    def _report_spans(self, listener: Listener) -> None:
        if self._actions:
            self._until_spans_s = _SPANS_INTERVAL_S
            spans = read_actions(self.world.traffic, self._actions, self._clock_offset)
            listener(StepSpans(self.world.rank, self._step, spans))

    def _memory(self) -> dict[str, int]:
        is_known = self._model is not None and self._optimizer is not None
        held = model_memory(self._model, self._optimizer) if is_known else {}  # type: ignore[arg-type]
        return {**held, "peak": self._peak.peak_bytes()}


def _own_term(loss: Any) -> LossTerm | None:
    """This rank's part of a loss."""
    if loss is None or not isinstance(loss, torch.Tensor):
        return None if loss is None else LossTerm(float(loss))
    if not isinstance(loss, GlobalTensor):
        return LossTerm(float(loss))
    if loss._spec.is_placeholder:
        return None
    layout = loss._spec.layout
    entries = list(zip(layout.sbp, layout.placement.shape, strict=True))
    copies = math.prod(size for entry, size in entries if entry == broadcast)
    is_term = any(entry == partial_sum for entry, _ in entries)
    return LossTerm(float(plain(loss)), copies, is_term, len(layout.placement.ranks))


_loops: WeakKeyDictionary[World, _Loop] = WeakKeyDictionary()


_MOST_ACTIONS = 1000


class ActionTimer:
    """Records actions from one ``take`` to the next, as ``world.context.action_timer``.

    Forwards are the calls of parallelized modules with gradients. A forward lasts until its backward begins, so the
    loss is in it, as in a scheduled step. An action inside another one belongs to that one. A scheduled step adds the
    actions that it has timed itself.

    Args:
        world: this rank's world.
    """

    def __init__(self, world: World) -> None:
        self._world, self._stage = world, 0
        self._forget()

    def _forget(self) -> None:
        self._actions: list[RecordedAction] = []
        self._open: tuple[Action, Moment] | None = None
        self._depth = 0
        self._counts = {"F": 0, "B": 0, "O": 0}

    def begin(self, kind: str, stage: int | None = None) -> None:
        """Record that an action begins. ``stage`` None means that of the last forward."""
        self._depth += 1
        if self._depth > 1:
            return
        now = self._world.traffic.moment()
        if kind == "B" and self._actions and self._actions[-1].action.kind == "F":
            self._actions[-1] = self._actions[-1]._replace(stop=now)
        self._stage = self._stage if stage is None else stage
        self._open = Action(self._stage, kind, self._counts[kind]), now
        self._counts[kind] += kind != "O"

    def end(self, kind: str) -> None:
        """Record that the last action ends. Does nothing if no action of this kind has begun."""
        if self._open is None or (self._depth == 1 and self._open[0].kind != kind):
            return
        self._depth -= 1
        if self._depth == 0:
            if len(self._actions) < _MOST_ACTIONS:
                self._actions.append(RecordedAction(*self._open, self._world.traffic.moment()))
            self._open = None

    def add(self, actions: Sequence[RecordedAction]) -> None:
        """Add the actions of a scheduled step."""
        self._stage = actions[0].action.stage if actions else self._stage
        if len(self._actions) < _MOST_ACTIONS:
            self._actions += actions

    def take(self) -> tuple[RecordedAction, ...]:
        """The actions since the last call, in the order in which they ended."""
        found = tuple(self._actions)
        self._forget()
        return found
