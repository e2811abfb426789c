"""Times the forwards, backwards and optimizers' steps of a user's own loop on this rank."""

from __future__ import annotations

import time
from collections.abc import Sequence

from workbench.core.metrics import ActionSpan
from workbench.pipeline.simulate import Span
from workbench.tensors.world import World
from workbench.training.runs.step_metrics import action_spans

_MOST_ACTIONS = 1000
_Moment = tuple[float, float, int, int]
"""The time, and this rank's seconds in exchanges, exchanges and sent bytes until then."""


class ActionTimer:
    """Records actions from one ``take`` to the next, as ``world.context.action_timer``.

    Forwards are the calls of parallelized modules with gradients. A forward lasts until its backward begins, so the
    loss is in it, as in a scheduled step. An action inside another one belongs to that one. A scheduled step adds the
    actions that it has timed itself.

    Args:
        world: this rank's world.
        clock_offset_s: the time on this rank's clock at a moment that is the same on all ranks.
    """

    def __init__(self, world: World, clock_offset_s: float) -> None:
        self._world, self._offset_s, self._stage = world, clock_offset_s, 0
        self._forget()

    def _forget(self) -> None:
        self._actions: list[tuple[str, int, int, _Moment, _Moment]] = []  # kind, stage, number, start, stop
        self._scheduled: list[ActionSpan] = []
        self._open: tuple[str, int, int, _Moment] | None = None
        self._depth = 0
        self._counts = {"F": 0, "B": 0, "O": 0}

    def begin(self, kind: str, stage: int | None = None) -> None:
        """Record that an action begins. ``stage`` None means that of the last forward."""
        self._depth += 1
        if self._depth > 1:
            return
        now = self._now()
        if kind == "B" and self._actions and self._actions[-1][0] == "F":
            self._actions[-1] = (*self._actions[-1][:-1], now)
        self._stage = self._stage if stage is None else stage
        self._open = kind, self._stage, self._counts[kind], now
        self._counts[kind] += kind != "O"

    def end(self, kind: str) -> None:
        """Record that the last action ends. Does nothing if no action of this kind has begun."""
        if self._open is None or (self._depth == 1 and self._open[0] != kind):
            return
        self._depth -= 1
        if self._depth == 0:
            if len(self._actions) < _MOST_ACTIONS:
                self._actions.append((*self._open, self._now()))
            self._open = None

    def add(self, spans: Sequence[Span]) -> None:
        """Add the actions of a scheduled step."""
        self._stage = spans[0].action.stage if spans else self._stage
        if len(self._scheduled) < _MOST_ACTIONS:
            self._scheduled += action_spans(spans, self._offset_s)

    def take(self) -> tuple[ActionSpan, ...]:
        """The actions since the last call, in order, on the clock that all ranks share."""
        found = [*self._scheduled, *(self._span(*action) for action in self._actions)]
        self._forget()
        return tuple(sorted(found, key=lambda span: span.start_s))

    def _span(self, kind: str, stage: int, number: int, start: _Moment, stop: _Moment) -> ActionSpan:
        time_s, boxing_s, num_exchanges, sent = start
        moved = stop[1] - boxing_s, stop[2] - num_exchanges, stop[3] - sent
        return ActionSpan(kind, stage, number, time_s - self._offset_s, stop[0] - self._offset_s, *moved)

    def _now(self) -> _Moment:
        traffic = self._world.traffic
        return time.perf_counter(), traffic.time_s, traffic.num_exchanges, traffic.sent_bytes


__all__ = ["ActionTimer"]
