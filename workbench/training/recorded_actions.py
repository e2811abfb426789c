"""Actions of a rank: forwards, backwards and optimizers' steps, recorded while they run and read when the device has
done them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from workbench.core.metrics import ActionSpan
from workbench.pipeline.schedules import Action
from workbench.tensors.world import World
from workbench.transport.traffic import Moment, Traffic


class RecordedAction(NamedTuple):
    """An action between two moments of its rank."""

    action: Action
    start: Moment
    stop: Moment


def read_actions(traffic: Traffic, actions: Sequence[RecordedAction], clock_offset_s: float) -> tuple[ActionSpan, ...]:
    """The actions as they are reported; waits for the device.

    Args:
        traffic: of the rank.
        clock_offset_s: the time on its clock at a moment that is the same on all ranks.
    """
    found = []
    for action, start, stop in actions:
        between = traffic.between(start, stop)
        span = ActionSpan(
            action.kind,
            action.stage,
            action.micro_batch,
            between.start_s - clock_offset_s,
            between.stop_s - clock_offset_s,
            between.exchange_s,
            between.num_exchanges,
            between.sent_bytes,
        )
        found.append(span)
    return tuple(found)


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

    @property
    def actions(self) -> list[RecordedAction]:
        """The actions since the last ``take``; a forward may still end later than it says."""
        return self._actions

    def take(self) -> tuple[RecordedAction, ...]:
        """The actions since the last call, in the order in which they ended."""
        found = tuple(self._actions)
        self._forget()
        return found
