"""Records the forwards, backwards and optimizers' steps of a loop, for its timeline."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.pipeline.schedules import Action
from workbench.tensors.world import World
from workbench.training.recorded_actions import RecordedAction
from workbench.transport.traffic import Moment

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
