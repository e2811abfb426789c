"""How ranks that should stop are made to stop: ask, then end their waits, then end them. A pure schedule."""

from __future__ import annotations

#: Seconds after the decision to stop, and what happens then to ranks that still run.
STEPS = ((0.0, "interrupt"), (0.25, "abort"), (0.6, "interrupt"), (1.0, "interrupt"), (1.5, "kill"))


class Ladder:
    """The steps from a given moment on.

    ``interrupt`` is SIGINT (reaches Python code), ``abort`` a message to the control thread (ends waits
    for other ranks), ``kill`` is SIGKILL (for code that is stuck in C).
    """

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._left = list(STEPS)

    def due(self, now: float) -> list[str]:
        """Steps whose time has come since the last call."""
        due = [step for after, step in self._left if now >= self._started_s + after]
        self._left = self._left[len(due) :]
        return due

    def wakeup(self) -> float | None:
        """When the next step is due; None after the last."""
        return self._started_s + self._left[0][0] if self._left else None
